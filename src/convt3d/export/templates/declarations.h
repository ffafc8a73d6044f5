// What the launcher offers to the binding: plain pointers and extents, no PyTorch.
#include <cuda_runtime.h>

#include <functional>

namespace convt3d::host {

struct Tensors {
  float *source, *weight, *bias, *target;
  long long weight_stride_in, weight_stride_out, weight_stride_d, weight_stride_h, weight_stride_w;
};
struct Extents {
  long long batch, in_d, in_h, in_w, out_d, out_h, out_w;
};
/// Device memory that lives until the launches that use it are queued, by size in bytes.
using Allocate = std::function<void*(long long)>;

$operands
cudaError_t forward(bool tf32, const Tensors&, const Extents&, const Allocate&, cudaStream_t);
cudaError_t grad_input(bool tf32, const Tensors&, const Extents&, const Allocate&, cudaStream_t);
cudaError_t grad_weight(bool tf32, const Tensors&, const Extents&, const Allocate&, cudaStream_t);

}  // namespace convt3d::host
