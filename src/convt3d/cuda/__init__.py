"""The CUDA backend: plans, compilation, launches and the kernels themselves."""
