namespace convt3d::host {

/// Queue one kernel; arguments are converted to the types of its parameters. One that overlaps may
/// start while the launch before it runs, and waits in the kernel for what it needs of that.
template <bool overlaps, typename... Parameters, typename... Arguments>
cudaError_t queue(void (*kernel)(Parameters...), long long grid, int block, int shared_bytes,
                  cudaStream_t stream, Arguments... arguments) {
  if (grid > 2147483647) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
#if CONVT3D_HOPPER
  if (overlaps) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(grid);
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  }
#endif
  kernel<<<static_cast<unsigned>(grid), block, shared_bytes, stream>>>(
      static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

template <typename Kernel, typename... Arguments>
cudaError_t launch(Kernel kernel, Arguments... arguments) {
  return queue<false>(kernel, arguments...);
}
template <typename Kernel, typename... Arguments>
cudaError_t launch_overlapping(Kernel kernel, Arguments... arguments) {
  return queue<true>(kernel, arguments...);
}

}  // namespace convt3d::host
