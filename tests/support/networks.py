"""Networks of other libraries beside the package's own, and what tests compare of them.

Each is built from PyTorch's layers; tests and tools convert it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convt3d.bench import networks
from convt3d.bench.networks import Network


def _monai_unet(small: bool) -> nn.Module:
    from monai.networks.nets import UNet

    channels = (4, 8, 8) if small else (32, 64, 128, 256, 512)
    return UNet(3, 1, 2, channels, (2,) * (len(channels) - 1), num_res_units=2)


def _monai_dynunet(small: bool) -> nn.Module:
    from monai.networks.nets import DynUNet

    n = 3 if small else 6
    strides = [1] + [2] * (n - 1)
    filters = [4, 8, 8] if small else [32, 64, 128, 256, 320, 320]
    return DynUNet(3, 1, 2, [3] * n, strides, strides[1:], filters)


def _monai_basic(small: bool) -> nn.Module:
    from monai.networks.nets import BasicUNet

    features = (4, 4, 8, 8, 8, 4) if small else (32, 32, 64, 128, 256, 32)
    return BasicUNet(3, 1, 2, features)


def _monai_segres(small: bool) -> nn.Module:
    from monai.networks.nets import SegResNet

    if small:
        return SegResNet(3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1))
    return SegResNet(3, 32, 1, 2)


def _monai_unetr(small: bool) -> nn.Module:
    from monai.networks.nets import UNETR

    if small:
        return UNETR(1, 2, (32, 32, 32), 4, hidden_size=24, mlp_dim=24, num_heads=2)
    return UNETR(1, 14, (96, 96, 96))


def _monai_swin(small: bool) -> nn.Module:
    from monai.networks.nets import SwinUNETR

    if small:
        return SwinUNETR(1, 2, feature_size=12, depths=(1, 1, 1, 1), window_size=2)
    return SwinUNETR(1, 14, feature_size=48)


def _monai_vnet(small: bool) -> nn.Module:
    from monai.networks.nets import VNet

    return VNet(out_channels=2)


def _nnunet(small: bool) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    features = (4, 8, 8) if small else (32, 64, 128, 256, 320, 320)
    n = len(features)
    return PlainConvUNet(
        1, n, features, nn.Conv3d, 3, (1, *[2] * (n - 1)), 2, 3, 2, True,
        nn.InstanceNorm3d, {"affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip


def _residual(small: bool) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    features = (4, 8, 8) if small else (32, 64, 128, 256, 320, 320)
    n = len(features)
    kernels = [(1, 3, 3)] + [(3, 3, 3)] * (n - 1)
    strides = [(1, 1, 1), (1, 2, 2)] + [(2, 2, 2)] * (n - 2)
    return ResidualEncoderUNet(
        1, n, features, nn.Conv3d, kernels, strides, (1, 3, 4, 6, 6, 6)[:n], 3, (1,) * (n - 1),
        True, nn.InstanceNorm3d, {"affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip


_DNA = "dynamic_network_architectures"
LIBRARY_NETWORKS = {
    "MONAI UNet": Network(_monai_unet, (2, 1, 96, 96, 96), (2, 1, 8, 8, 8), "monai"),
    "MONAI DynUNet": Network(_monai_dynunet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8), "monai"),
    "MONAI BasicUNet": Network(_monai_basic, (2, 1, 96, 96, 96), (2, 1, 32, 32, 32), "monai"),
    "MONAI SegResNet": Network(_monai_segres, (2, 1, 96, 96, 96), (2, 1, 8, 8, 8), "monai"),
    "MONAI UNETR": Network(_monai_unetr, (2, 1, 96, 96, 96), (1, 1, 32, 32, 32), "monai"),
    "MONAI SwinUNETR": Network(_monai_swin, (1, 1, 96, 96, 96), (1, 1, 64, 32, 32), "monai", True),
    "MONAI VNet": Network(_monai_vnet, (2, 1, 64, 128, 128), (2, 1, 16, 16, 16), "monai", True),
    "nnU-Net PlainConvUNet": Network(_nnunet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8), _DNA),
    "nnU-Net ResidualEncoderUNet, anisotropic": Network(
        _residual, (2, 1, 64, 160, 160), (2, 1, 4, 8, 8), _DNA
    ),
}
NETWORKS = {**networks.NETWORKS, **LIBRARY_NETWORKS}


def parameters_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output of a forward pass, and the gradients of a random projection of it by name.

    The same random numbers in every call, for dropout.
    """
    torch.manual_seed(7)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    generator = torch.Generator().manual_seed(11)
    gy = torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    named = {"the input": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(y, list(named.values()), gy, allow_unused=True)
    return y.detach(), dict(zip(named, gradients, strict=True))
