#if CONVT3D_HOPPER
#include <cuda.h>

#include <initializer_list>
#include <string_view>

namespace convt3d::host {

/// Encode how TMA sees a tensor: lists innermost first, strides in bytes of all but the innermost.
inline cudaError_t describe(TensorMap& map, std::string_view element, void* address,
                            std::initializer_list<unsigned long long> extents,
                            std::initializer_list<unsigned long long> strides,
                            std::initializer_list<unsigned> box,
                            std::initializer_list<unsigned> steps, int swizzle) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) == 64, "");
  // Asked of the driver by name, so that nothing links against it.
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return found;
  }();
  if (!encode) return cudaErrorNotSupported;
  const auto type = element == "float32"    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : element == "tfloat32" ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                    : element == "float16"  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t sizes[5] = {}, bytes[5] = {16};
  int rank = 0, stride = 0;
  for (const unsigned long long n : extents) sizes[rank++] = n;
  for (const unsigned long long n : strides) bytes[stride++] = n;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      reinterpret_cast<CUtensorMap*>(&map), type, rank, address, sizes, bytes, box.begin(),
      steps.begin(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
      : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                      : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace convt3d::host
#endif

