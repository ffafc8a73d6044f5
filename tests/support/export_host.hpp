// Stands in for the CUDA runtime and the kernel launches of an exported file: what would be queued
// is written down as text. Pointers are numbers that the test knows.
#pragma once
#include <initializer_list>
#include <string>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };

namespace convt3d {

struct TensorMap {
  long long id;
};

}  // namespace convt3d

namespace recorded {

inline std::string text;

inline long long number(long long value) { return value; }
inline long long number(const void* pointer) { return reinterpret_cast<long long>(pointer); }
inline long long number(const convt3d::TensorMap& map) { return map.id; }

}  // namespace recorded

namespace convt3d::host {

using Numbers = std::initializer_list<long long>;

inline cudaError_t describe(TensorMap& map, const char* element, const void* address,
                            Numbers extents, Numbers strides, Numbers box, Numbers steps,
                            int swizzle) {
  static long long maps = 0;
  map.id = (7ll << 50) + maps++;
  recorded::text += "map " + std::to_string(map.id) + " " + element + " " +
                    std::to_string(recorded::number(address)) + " " + std::to_string(swizzle);
  for (const Numbers& list : {extents, strides, box, steps}) {
    recorded::text += " " + std::to_string(list.size());
    for (const long long n : list) recorded::text += " " + std::to_string(n);
  }
  recorded::text += "\n";
  return cudaSuccess;
}

template <typename... Arguments>
cudaError_t record(const char* how, const char* kernel, long long grid, int block, int shared_bytes,
                   cudaStream_t, Arguments... arguments) {
  recorded::text += std::string(how) + " " + kernel;
  for (const long long n : {grid, static_cast<long long>(block),
                            static_cast<long long>(shared_bytes), recorded::number(arguments)...})
    recorded::text += " " + std::to_string(n);
  recorded::text += "\n";
  return cudaSuccess;
}

template <typename... Arguments>
cudaError_t launch(Arguments... arguments) {
  return record("launch", arguments...);
}
template <typename... Arguments>
cudaError_t launch_overlapping(Arguments... arguments) {
  return record("launch_overlapping", arguments...);
}

}  // namespace convt3d::host
