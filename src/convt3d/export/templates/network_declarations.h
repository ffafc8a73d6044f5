// What the launcher offers to the binding: plain pointers, no PyTorch.
#include <cuda_runtime.h>

#include <functional>

namespace convt3d::host {

struct Tensors {
  float *source, *weight, *bias, *target;
  long long weight_stride_in, weight_stride_out, weight_stride_d, weight_stride_h, weight_stride_w;
  const void *operand0, *operand1, *operand2, *operand3;  // of steps in the epilogue
};
struct Extents {
  long long batch, in_d, in_h, in_w, out_d, out_h, out_w;
};
/// Device memory that lives until the launches that use it are queued, by size in bytes.
using Allocate = std::function<void*(long long)>;

/// Inputs, then parameters and buffers, then the output.
cudaError_t network(void* const* tensors, const Allocate& allocate, cudaStream_t stream);

}  // namespace convt3d::host
