namespace convt3d::host {

/// Queue one kernel; arguments are converted to the types of its parameters.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), long long grid, int block, int shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  if (grid > 2147483647) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  kernel<<<static_cast<unsigned>(grid), block, shared_bytes, stream>>>(
      static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

}  // namespace convt3d::host
