// Packs the weights of a gather kernel. Runs before every product: weights are never stale.
#include "ampere/gather/config.cuh"
#include "pack/fragments.cuh"

extern "C" __global__ void __launch_bounds__(256)
    convt3d_ampere_gather_pack(const convt3d::GatherConfig::Storage* weight, convt3d::uint32_t* packed, convt3d::int64_t stride_in,
                               convt3d::int64_t stride_out, convt3d::int64_t stride0, convt3d::int64_t stride1, convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::GatherConfig> packer{weight,  stride_in, stride_out,
                                                      stride0, stride1,   stride2};
  convt3d::pack(packer, packed);
}
