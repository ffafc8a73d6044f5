// Tensors in, tensors out: checks, output memory, the current device and stream.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
using Size = std::array<int64_t, 3>;
namespace host = convt3d::host;

constexpr int64_t in_channels = $in_channels, out_channels = $out_channels, groups = $groups;
constexpr Size kernel_size = {$kernel_size};
constexpr Size stride = {$stride};
constexpr Size padding = {$padding};
${output_padding}constexpr Size dilation = {$dilation};

Size output_size(const Size& input) {
  Size size;
$output_size
  return size;
}

// Messages are strings, not streams: an extension may be linked with a C++ library of its own, whose
// streams know nothing of the locale of the process.
std::string text(c10::IntArrayRef size) {
  std::string list;
  for (const int64_t n : size) list += (list.empty() ? "" : ", ") + std::to_string(n);
  return "(" + list + ")";
}

/// A dense float32 tensor on the GPU, or an error that says what came instead.
Tensor dense(const Tensor& tensor, const std::string& name) {
  TORCH_CHECK(tensor.is_cuda(), name + " must be a CUDA tensor, but is on " + tensor.device().str());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name + " must be float32, but is " +
              c10::toString(tensor.scalar_type()) +
              "; these kernels were generated for float32 alone");
  $dense
}

void check_sizes(const Tensor& tensor, const std::string& name, c10::IntArrayRef size) {
  TORCH_CHECK(tensor.sizes() == size,
              name + " must have size " + text(size) + ", but has " + text(tensor.sizes()));
}

Size input_size_of(const Tensor& input) {
  TORCH_CHECK(input.dim() == 5 && input.size(1) == in_channels, "input must be (N, " +
              std::to_string(in_channels) + ", D, H, W), but has size " + text(input.sizes()));
  const Size input_size = {input.size(2), input.size(3), input.size(4)};
  for (const int64_t n : output_size(input_size))
    TORCH_CHECK(n > 0, "input of size " + text(input.sizes()) +
                " is too small: its output would be empty");
  return input_size;
}

host::Extents extents_of(int64_t batch, const Size& in, const Size& out) {
  // Kernels count the positions of one sample in 32 bits.
  TORCH_CHECK(in[0] * in[1] * in[2] < int64_t(1) << 31 && out[0] * out[1] * out[2] < int64_t(1) << 31,
              "a sample has more than 2^31 positions");
  return {batch, in[0], in[1], in[2], out[0], out[1], out[2]};
}

host::Tensors tensors_of(const Tensor& source, const Tensor& weight, const Tensor& target) {
  return {source.data_ptr<float>(), weight.data_ptr<float>(), nullptr, target.data_ptr<float>(),
          weight.stride(0), weight.stride(1), weight.stride(2), weight.stride(3), weight.stride(4)};
}

${flipped}using Operation = decltype(host::forward);

void run(Operation& operation, bool tf32, const host::Tensors& tensors,
         const host::Extents& extents, const Tensor& like) {
  std::vector<Tensor> scratch;
  const auto allocate = [&](long long bytes) {
    scratch.push_back(at::empty({bytes}, like.options().dtype(at::kByte)));
    return scratch.back().data_ptr();
  };
  const cudaError_t status = operation(tf32, tensors, extents, allocate,
                                       c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(status == cudaSuccess, std::string("launching a $convolution failed: ") +
              cudaGetErrorString(status));
}

}  // namespace

Tensor ${function}_forward(const Tensor& input_, const Tensor& weight_,
$indent                const std::optional<Tensor>& bias_, bool tf32) {
  const Tensor input = dense(input_, "input"), weight = dense(weight_, "weight");
  const c10::cuda::CUDAGuard guard(input.device());
  const Size in = input_size_of(input), out = output_size(in);
  check_sizes(weight, "weight", {$weight_channels, kernel_size[0], kernel_size[1],
                                 kernel_size[2]});
  const Tensor output =
      at::empty({input.size(0), out_channels, out[0], out[1], out[2]}, input.options());
  if (output.numel() == 0) return output;
  host::Tensors tensors = $output_tensors;
  Tensor bias;
  if (bias_) {
    bias = dense(*bias_, "bias");
    check_sizes(bias, "bias", {out_channels});
    tensors.bias = bias.data_ptr<float>();
  }
  run(host::forward, tf32, tensors, extents_of(input.size(0), $output_extents), input);
  return output;
}

Tensor ${function}_grad_input(const Tensor& grad_output_, const Tensor& weight_,
$indent                   const std::vector<int64_t>& input_size, bool tf32) {
  const Tensor gradient = dense(grad_output_, "grad_output"), weight = dense(weight_, "weight");
  const c10::cuda::CUDAGuard guard(gradient.device());
  const Tensor result = at::empty(input_size, gradient.options());
  const Size in = input_size_of(result), out = output_size(in);
  check_sizes(gradient, "grad_output", {result.size(0), out_channels, out[0], out[1], out[2]});
  if (result.numel() > 0)
    run(host::grad_input, tf32, tensors_of(gradient, weight, result),
        extents_of(result.size(0), $gradient_extents), gradient);
  return result;
}

Tensor ${function}_grad_weight(const Tensor& input_, const Tensor& grad_output_, bool tf32) {
  const Tensor input = dense(input_, "input"), gradient = dense(grad_output_, "grad_output");
  const c10::cuda::CUDAGuard guard(input.device());
  const Size in = input_size_of(input), out = output_size(in);
  check_sizes(gradient, "grad_output", {input.size(0), out_channels, out[0], out[1], out[2]});
  const Tensor result = at::empty({$weight_channels, kernel_size[0],
                                   kernel_size[1], kernel_size[2]}, input.options());
  if (input.numel() == 0) return result.zero_();
  run(host::grad_weight, tf32, tensors_of($weight_operands),
      extents_of(input.size(0), $gradient_extents), input);
  return result;
}
