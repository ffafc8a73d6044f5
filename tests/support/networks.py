"""Networks whose decoders are made of ConvTranspose3d: our own small ones, and those of libraries.

Each is built from PyTorch's layers; tests and tools convert it. Sizes follow the publications:
nnU-Net's full-resolution 3D U-Net, 3D-GAN, the patch recovery of Pangu-Weather.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class UNet3d(nn.Module):
    """nnU-Net's PlainConvUNet: two convolutions a stage, strided down, kernel == stride up."""

    def __init__(self, features: Sequence[int] = (32, 64, 128, 256, 320, 320), classes: int = 3):
        super().__init__()
        self.encoder = nn.ModuleList(
            _stage(features[i - 1] if i else 1, f, 2 if i else 1) for i, f in enumerate(features)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(features[i + 1], features[i], 2, 2)
            for i in reversed(range(len(features) - 1))
        )
        self.decoder = nn.ModuleList(
            _stage(2 * features[i], features[i], 1) for i in reversed(range(len(features) - 1))
        )
        self.head = nn.Conv3d(features[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, D, H, W), extents divisible by 2^(stages - 1), to (N, classes, D, H, W)."""
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        for up, stage in zip(self.up, self.decoder, strict=True):
            x = stage(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(2):
        layers += [
            nn.Conv3d(channels if i else in_channels, channels, 3, 1 if i else stride, 1),
            nn.InstanceNorm3d(channels, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*layers)


class Generator3d(nn.Sequential):
    """3D-GAN's generator: (N, latent, 1, 1, 1) to (N, 1, 4 * 2^n, ...), n = len(features)."""

    def __init__(self, latent: int = 200, features: Sequence[int] = (512, 256, 128, 64)):
        layers: list[nn.Module] = [nn.ConvTranspose3d(latent, features[0], 4, 1, 0, bias=False)]
        for a, b in zip(features, (*features[1:], 1), strict=True):
            layers += [nn.BatchNorm3d(a), nn.ReLU(True)]
            layers += [nn.ConvTranspose3d(a, b, 4, 2, 1, bias=b == 1)]
        super().__init__(*layers, nn.Sigmoid())


class Discriminator3d(nn.Sequential):
    """Its mirror image with strided convolutions: (N, 1, ...) to (N, 1, 1, 1, 1), logits."""

    def __init__(self, features: Sequence[int] = (64, 128, 256, 512)):
        layers: list[nn.Module] = []
        for a, b in zip((1, *features[:-1]), features, strict=True):
            layers += [nn.Conv3d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        super().__init__(*layers, nn.Conv3d(features[-1], 1, 4))


class PatchRecovery(nn.Module):
    """Pangu-Weather's last layer: tokens of 2x4x4 patches back to a grid, padding cut off."""

    def __init__(
        self, tokens: Sequence[int] = (7, 181, 360), channels: int = 384, variables: int = 5
    ):
        super().__init__()
        self.tokens = tuple(tokens)
        self.recover = nn.ConvTranspose3d(channels, variables, (2, 4, 4), (2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, channels) to (N, variables, 2 D - 1, 4 H - 3, 4 W)."""
        y = self.recover(x.transpose(1, 2).unflatten(2, self.tokens))
        return y[:, :, :-1, :-3]


@dataclass(frozen=True)
class Network:
    """How to build a network and what to feed it, in a size for tests and in that of its users."""

    build: Callable[[bool], nn.Module]  # argument: small
    size: tuple[int, ...]
    small: tuple[int, ...]
    library: str | None = None  # that it comes from, by its import name
    heavy: bool = False  # even the small one takes seconds

    @property
    def missing(self) -> str | None:
        """Why it cannot be built here."""
        if self.library is None or importlib.util.find_spec(self.library):
            return None
        return f"{self.library} is not installed"

    def input(self, small: bool, device: torch.device | str = "cpu") -> Tensor:
        return torch.randn(self.small if small else self.size, device=device)


def _unet(small: bool) -> nn.Module:
    return UNet3d((4, 8, 8)) if small else UNet3d()


def _generator(small: bool) -> nn.Module:
    return Generator3d(6, (8, 6, 4)) if small else Generator3d()


def _recovery(small: bool) -> nn.Module:
    return PatchRecovery((2, 3, 4), 6) if small else PatchRecovery()


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
NETWORKS = {
    "U-Net of nnU-Net's shape": Network(_unet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8)),
    "3D-GAN generator": Network(_generator, (32, 200, 1, 1, 1), (2, 6, 1, 1, 1)),
    "Pangu-style recovery": Network(_recovery, (1, 7 * 181 * 360, 384), (2, 24, 6)),
    "MONAI UNet": Network(_monai_unet, (2, 1, 96, 96, 96), (2, 1, 8, 8, 8), "monai"),
    "MONAI DynUNet": Network(_monai_dynunet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8), "monai"),
    "MONAI UNETR": Network(_monai_unetr, (2, 1, 96, 96, 96), (1, 1, 32, 32, 32), "monai"),
    "MONAI SwinUNETR": Network(_monai_swin, (1, 1, 96, 96, 96), (1, 1, 64, 32, 32), "monai", True),
    "MONAI VNet": Network(_monai_vnet, (2, 1, 64, 128, 128), (2, 1, 16, 16, 16), "monai", True),
    "nnU-Net PlainConvUNet": Network(_nnunet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8), _DNA),
    "nnU-Net ResidualEncoderUNet, anisotropic": Network(
        _residual, (2, 1, 64, 160, 160), (2, 1, 4, 8, 8), _DNA
    ),
}


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
