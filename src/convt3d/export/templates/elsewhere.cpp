
// PyTorch's own operator, for what these kernels were not generated for; differentiable by itself.
Tensor ${function}_elsewhere(const Tensor& input, const Tensor& weight,
$indent                  const std::optional<Tensor>& bias) {
  auto& context = at::globalContext();
  struct Restored {
    at::Context& context;
    bool before;
    ~Restored() { context.setDeterministicCuDNN(before); }
  } const restored{context, context.deterministicCuDNN()};
  context.setDeterministicCuDNN(true);  // the same bits on every run, as from these kernels
  return at::$function(input, weight, bias, $parameters);
}
