// Tensors in, tensors out: checks, output memory, the current device and stream.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <string>
#include <vector>

namespace {

using torch::Tensor;

enum Kind { input, parameter, buffer, counter };
struct Expected {
  const char* name;
  Kind kind;
  std::vector<int64_t> size;
};

const std::vector<Expected>& expected() {
  static const std::vector<Expected> list = {
$expected  };
  return list;
}

// Messages are strings, not streams: an extension may be linked with a C++ library of its own, whose
// streams know nothing of the locale of the process.
std::string text(c10::IntArrayRef size) {
  std::string list;
  for (const int64_t n : size) list += (list.empty() ? "" : ", ") + std::to_string(n);
  return "(" + list + ")";
}

/// A dense tensor as the kernels take it, or an error that says what came instead.
Tensor checked(const Tensor& tensor, const Expected& wanted, const Tensor& first) {
  const std::string name = wanted.name;
  const auto type = wanted.kind == counter ? at::kLong : at::kFloat;
  TORCH_CHECK(tensor.device() == first.device(), name + " must be on " + first.device().str() +
              ", but is on " + tensor.device().str());
  TORCH_CHECK(tensor.scalar_type() == type, name + " must be " + c10::toString(type) +
              ", but is " + c10::toString(tensor.scalar_type()));
  TORCH_CHECK(tensor.sizes() == c10::IntArrayRef(wanted.size),
              "these kernels were generated for " + name + " of size " + text(wanted.size) +
              ", not " + text(tensor.sizes()));
  if (wanted.kind == buffer || wanted.kind == counter) {
    TORCH_CHECK(tensor.is_contiguous(), name + " must be contiguous, as calls update it");
    return tensor;
  }
  const Tensor dense = tensor.contiguous();
  // Tensor maps and vectors begin at multiples of 16 bytes.
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 ? dense.clone() : dense;
}

}  // namespace

Tensor network_forward(const std::vector<Tensor>& given) {
  TORCH_CHECK(given.size() == expected().size(), "another number of tensors than expected");
  const c10::cuda::CUDAGuard guard(given[0].device());
  std::vector<Tensor> kept;
  std::vector<void*> addresses;
  for (size_t i = 0; i < given.size(); ++i) {
    kept.push_back(checked(given[i], expected()[i], given[0]));
    addresses.push_back(kept.back().data_ptr());
  }
  const Tensor output = at::empty({$result}, kept[0].options());
  addresses.push_back(output.data_ptr());
  const auto allocate = [&](long long bytes) {
    kept.push_back(at::empty({bytes}, output.options().dtype(at::kByte)));
    return kept.back().data_ptr();
  };
  const cudaError_t status = convt3d::host::network(
      addresses.data(), allocate, c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(status == cudaSuccess, std::string("launching kernels failed: ") +
              cudaGetErrorString(status));
  return output;
}
