"""The networks that ``convt3d bench --model`` measures, made of PyTorch's layers alone.

Sizes follow the publications: nnU-Net's full-resolution 3-D U-Net, plain and with a residual
encoder (Isensee et al., 2021 and 2024), the generator of 3D-GAN (Wu et al., 2016), and the patch
recovery of Pangu-Weather (Bi et al., 2023).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NNUNET_FEATURES = (32, 64, 128, 256, 320, 320)


class UNet3d(nn.Module):
    """nnU-Net's PlainConvUNet: two convolutions a stage, strided down, kernel == stride up."""

    decoder_convolutions = 2  # of a stage

    def __init__(self, features: Sequence[int] = NNUNET_FEATURES, classes: int = 3) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            self.down(features[i - 1] if i else 1, f, 2 if i else 1, i)
            for i, f in enumerate(features)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(features[i + 1], features[i], 2, 2)
            for i in reversed(range(len(features) - 1))
        )
        self.decoder = nn.ModuleList(
            _stage(2 * features[i], features[i], 1, self.decoder_convolutions)
            for i in reversed(range(len(features) - 1))
        )
        self.head = nn.Conv3d(features[0], classes, 1)

    def down(self, in_channels: int, channels: int, stride: int, index: int) -> nn.Module:
        """The stage of the encoder with this index."""
        return _stage(in_channels, channels, stride, 2)

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


def _stage(in_channels: int, channels: int, stride: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(convolutions):
        layers += [
            nn.Conv3d(channels if i else in_channels, channels, 3, 1 if i else stride, 1),
            nn.InstanceNorm3d(channels, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut: average pooling where strided, 1x1x1 to new channels."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(in_channels, channels, 3, stride, 1),
            nn.InstanceNorm3d(channels, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv3d(channels, channels, 3, 1, 1),
            nn.InstanceNorm3d(channels, affine=True),
        )
        shortcut: list[nn.Module] = []
        if stride != 1:
            shortcut.append(nn.AvgPool3d(stride, stride))
        if in_channels != channels:
            shortcut.append(nn.Conv3d(in_channels, channels, 1, bias=False))
            shortcut.append(nn.InstanceNorm3d(channels, affine=True))
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.body(x) + self.shortcut(x), 0.01, inplace=True)


class ResidualUNet3d(UNet3d):
    """nnU-Net's ResidualEncoderUNet: residual blocks down, one convolution a stage up."""

    decoder_convolutions = 1
    blocks = (1, 3, 4, 6, 6, 6)  # of each stage of the encoder

    def down(self, in_channels: int, channels: int, stride: int, index: int) -> nn.Module:
        blocks = [ResidualBlock(in_channels, channels, stride)]
        blocks += [ResidualBlock(channels, channels, 1) for _ in range(self.blocks[index] - 1)]
        return nn.Sequential(*blocks)


class Generator3d(nn.Sequential):
    """3D-GAN's generator: (N, latent, 1, 1, 1) to (N, 1, 4 * 2^n, ...), n = len(features)."""

    def __init__(self, latent: int = 200, features: Sequence[int] = (512, 256, 128, 64)) -> None:
        layers: list[nn.Module] = [nn.ConvTranspose3d(latent, features[0], 4, 1, 0, bias=False)]
        for a, b in zip(features, (*features[1:], 1), strict=True):
            layers += [nn.BatchNorm3d(a), nn.ReLU(True)]
            layers += [nn.ConvTranspose3d(a, b, 4, 2, 1, bias=b == 1)]
        super().__init__(*layers, nn.Sigmoid())


class Discriminator3d(nn.Sequential):
    """Its mirror image with strided convolutions: (N, 1, ...) to (N, 1, 1, 1, 1), logits."""

    def __init__(self, features: Sequence[int] = (64, 128, 256, 512)) -> None:
        layers: list[nn.Module] = []
        for a, b in zip((1, *features[:-1]), features, strict=True):
            layers += [nn.Conv3d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        super().__init__(*layers, nn.Conv3d(features[-1], 1, 4))


class PatchRecovery(nn.Module):
    """Pangu-Weather's last layer: tokens of 2x4x4 patches back to a grid, padding cut off."""

    def __init__(
        self, tokens: Sequence[int] = (7, 181, 360), channels: int = 384, variables: int = 5
    ) -> None:
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


def _residual_unet(small: bool) -> nn.Module:
    return ResidualUNet3d((4, 8, 8)) if small else ResidualUNet3d()


def _generator(small: bool) -> nn.Module:
    return Generator3d(6, (8, 6, 4)) if small else Generator3d()


def _recovery(small: bool) -> nn.Module:
    return PatchRecovery((2, 3, 4), 6) if small else PatchRecovery()


NETWORKS = {
    "unet": Network(_unet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8)),
    "residual-unet": Network(_residual_unet, (2, 1, 128, 128, 128), (2, 1, 8, 8, 8)),
    "gan": Network(_generator, (32, 200, 1, 1, 1), (2, 6, 1, 1, 1)),
    "pangu-recovery": Network(_recovery, (1, 7 * 181 * 360, 384), (2, 24, 6)),
}
"""By the names that the command line takes."""
