// Stands in for the CUDA runtime and the kernel launches of an exported file: what would be queued
// is written down as text. Pointers are numbers that the test knows.
#pragma once
#include <string>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };

namespace recorded {

inline std::string text;

inline long long number(long long value) { return value; }
inline long long number(const void* pointer) { return reinterpret_cast<long long>(pointer); }

}  // namespace recorded

namespace convt3d::host {

template <typename... Arguments>
cudaError_t launch(const char* kernel, long long grid, int block, int shared_bytes, cudaStream_t,
                   Arguments... arguments) {
  recorded::text += std::string("launch ") + kernel;
  for (const long long n : {grid, static_cast<long long>(block),
                            static_cast<long long>(shared_bytes), recorded::number(arguments)...})
    recorded::text += " " + std::to_string(n);
  recorded::text += "\n";
  return cudaSuccess;
}

}  // namespace convt3d::host
