// The interface of a compiled kernel; harness.py mirrors these structures with ctypes.
#pragma once

struct Tensor {
  void* base;
  unsigned long long bytes;
  int argument;  // the first kernel argument that points into it
  int earlier;   // 1: earlier launches that may still run read it; 2: they write it
  int touched;   // 1: this launch has read it; 2: written
};

struct Launch {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  int order;  // of threads and blocks: 0 ascending, 1 descending, else at random from this seed
  unsigned long long most_blocks;  // only the last so many (clusters) run; 0: all
  int check_races;
  int dependent;  // the launches before may still run, until a thread has waited for them
  int tensor_count;
  Tensor* tensors;
  void** arguments;  // as for cuLaunchKernel
  char* message;     // receives the first error
  int message_bytes;
};

/// Runs a grid. Returns 0, or 1 with a message.
extern "C" __attribute__((visibility("default"))) int emulator_launch(const Launch* launch);
