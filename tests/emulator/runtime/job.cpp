// main() of a sanitized kernel: reads a launch from a file, runs it, writes the tensors back.
// Every tensor is a heap block of exactly its size, so AddressSanitizer guards both ends.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "launch.hpp"

namespace {

std::FILE* file;

long long number() {
  long long value;
  if (std::fread(&value, sizeof value, 1, file) != 1) std::exit(3);
  return value;
}
void bytes(void* to, std::size_t count) {
  if (count && std::fread(to, 1, count, file) != count) std::exit(3);
}

}  // namespace

int main(int count, char** names) {
  if (count != 3 || !(file = std::fopen(names[1], "rb"))) return 3;
  Launch launch{};
  for (unsigned& extent : launch.grid) extent = unsigned(number());
  for (unsigned& extent : launch.block) extent = unsigned(number());
  launch.shared_bytes = unsigned(number());
  launch.order = int(number());

  std::vector<Tensor> tensors(number());
  for (Tensor& tensor : tensors) {
    tensor.bytes = number();
    tensor.argument = int(number());
    const std::size_t lead = number();  // past an alignment boundary, as the tensor itself
    void* block;
    if (posix_memalign(&block, 256, lead + tensor.bytes)) return 3;
    tensor.base = static_cast<char*>(block) + lead;
    bytes(tensor.base, tensor.bytes);
  }
  std::vector<void*> arguments(number());
  for (void*& argument : arguments) {
    const long long tensor = number(), offset = number(), pointer_at = number(), size = number();
    if (posix_memalign(&argument, 64, size)) return 3;
    bytes(argument, size);
    if (tensor >= 0) {
      char* pointer = static_cast<char*>(tensors[tensor].base) + offset;
      std::memcpy(static_cast<char*>(argument) + pointer_at, &pointer, sizeof pointer);
    }
  }
  std::fclose(file);

  char message[16384] = "";
  launch.tensor_count = int(tensors.size());
  launch.tensors = tensors.data();
  launch.arguments = arguments.data();
  launch.message = message;
  launch.message_bytes = sizeof message;
  if (emulator_launch(&launch)) {
    std::fprintf(stderr, "%s\n", message);
    return 1;
  }
  if (!(file = std::fopen(names[2], "wb"))) return 3;
  for (const Tensor& tensor : tensors) std::fwrite(tensor.base, 1, tensor.bytes, file);
  return std::fclose(file) ? 3 : 0;
}
