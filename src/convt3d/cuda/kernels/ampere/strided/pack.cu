// Packs the weights of a strided kernel. Runs before every product: weights are never stale.
#include "ampere/strided/config.cuh"
#include "pack/fragments.cuh"

extern "C" __global__ void __launch_bounds__(256)
    convt3d_ampere_strided_pack(const convt3d::StridedConfig::Storage* weight, convt3d::uint32_t* packed,
                                convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                                convt3d::int64_t stride0, convt3d::int64_t stride1,
                                convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  if constexpr (convt3d::StridedConfig::forward)
    convt3d::pack(convt3d::Packer<convt3d::StridedConfig>{weight, stride_in, stride_out, stride0,
                                                          stride1, stride2},
                  packed);
  else
    convt3d::pack(convt3d::Packer<convt3d::StridedExchangedConfig>{weight, stride_in, stride_out,
                                                                   stride1, stride0, stride2},
                  packed);
}
