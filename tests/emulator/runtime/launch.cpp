// The one entry point of a compiled kernel: run a grid, report the first error.
#include <algorithm>
#include <cstring>

#include "launch.hpp"
#include "machine.hpp"

extern "C" void emulated_invoke(void** values);

int emulator_launch(const Launch* launch) {
  using namespace emulator;
  grid_extent = {launch->grid[0], launch->grid[1], launch->grid[2]};
  block_extent = {launch->block[0], launch->block[1], launch->block[2]};
  machine.cluster = cluster_blocks();
  const unsigned threads = machine.cluster * block_extent.x * block_extent.y * block_extent.z;
  machine.failed = false;
  machine.message.clear();
  machine.order = launch->order;
  machine.random = (unsigned long long)launch->order;
  machine.shared_bytes = launch->shared_bytes;
  machine.check_races = launch->check_races != 0;
  machine.dependent = launch->dependent != 0;
  machine.waited = false;
  machine.invoke = emulated_invoke;
  machine.arguments = launch->arguments;
  machine.regions.clear();
  for (int i = 0; i < launch->tensor_count; ++i) {
    const Tensor& tensor = launch->tensors[i];
    machine.regions.push_back({static_cast<unsigned char*>(tensor.base), std::size_t(tensor.bytes),
                               tensor.argument, tensor.earlier, 0});
  }
  machine.threads.resize(threads);
  machine.warps.resize((threads + warp_lanes - 1) / warp_lanes);
  if (grid_extent.x % unsigned(machine.cluster)) {
    std::strncpy(launch->message, "the grid is no whole clusters", launch->message_bytes);
    return 1;
  }
  current = nullptr;
  find_shared_memory();
  allocate_stacks(int(threads));
  begin_launch_memory();

  // The blocks of a cluster follow one another along x; below, they count as one.
  const unsigned width = grid_extent.x / unsigned(machine.cluster);
  const unsigned long long blocks = 1ull * width * grid_extent.y * grid_extent.z;
  // Out of order: a prime step, larger than any grid, meets every block once.
  const unsigned long long step = launch->order > 1 ? 2654435761ull : 1;
  unsigned long long number = launch->order > 1 ? launch->order % blocks : 0;
  for (unsigned long long i = 0; i < blocks && !machine.failed; ++i) {
    const unsigned long long block = launch->order == 1 ? blocks - 1 - i : number;
    number = (number + step) % blocks;
    if (launch->most_blocks && block + launch->most_blocks < blocks) continue;
    machine.block_number = block;
    block_index = {unsigned(block % width) * unsigned(machine.cluster),
                   unsigned(block / width % grid_extent.y), unsigned(block / width / grid_extent.y)};
    begin_block_memory();
    run_block();
  }
  current = nullptr;
  release_stacks();
  if (machine.check_races) end_launch_races();
  for (const Region& region : machine.regions)
    for (int i = 0; i < launch->tensor_count; ++i)
      if (launch->tensors[i].base == region.base) launch->tensors[i].touched |= region.touched;
  if (!machine.failed && machine.dependent && !machine.waited) {
    machine.failed = true;
    machine.message = "missing grid_dependency_wait: no block waits for the launches before";
  }
  if (!machine.failed) return 0;
  std::strncpy(launch->message, machine.message.c_str(), launch->message_bytes - 1);
  launch->message[launch->message_bytes - 1] = 0;
  return 1;
}
