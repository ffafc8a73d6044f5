"""Trains a small 3D U-Net to segment balls in noisy synthetic volumes, with convt3d's up layers.

    python examples/train_unet.py

Checks itself: the loss falls, the segmentation overlaps with the truth, and PyTorch's own layers
give the same logits from the trained weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import convt3d

SIZE, STEPS = 16, 40


class UNet(nn.Module):
    """Two levels; the up path is nn.ConvTranspose3d, as in nnU-Net."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = block(1, width)
        self.down = nn.Conv3d(width, 2 * width, 2, stride=2)
        self.middle = block(2 * width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.leave = block(2 * width, width)
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        x = self.up(self.middle(self.down(skip)))
        return self.head(self.leave(torch.cat([x, skip], 1)))


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU()
    )


def volumes(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Noisy volumes with one bright ball each, (count, 1, SIZE, SIZE, SIZE), and their masks."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(SIZE)] * 3, indexing="ij")).to(device)
    centres = torch.randint(5, SIZE - 5, (count, 3, 1, 1, 1), device=device)
    radii = 3 + 2 * torch.rand(count, 1, 1, 1, device=device)
    masks = ((grid - centres).square().sum(1) < radii.square()).float().unsqueeze(1)
    return masks + 0.7 * torch.randn(masks.shape, device=device), masks


def dice(logits: Tensor, masks: Tensor) -> float:
    """Overlap of the segmentation with the masks, between 0 and 1."""
    found = (logits > 0).float()
    return float(2 * (found * masks).sum() / (found.sum() + masks.sum()))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = convt3d.convert(UNet()).to(device)
    assert isinstance(model.up, convt3d.ConvTranspose3d)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        images, masks = volumes(4, device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3}: loss {losses[-1]:.3f}")
    images, masks = volumes(8, device)
    with torch.no_grad():
        ours = model(images)
        theirs = convt3d.revert(model)(images)
    score = dice(ours, masks)
    print(f"loss {losses[-1]:.3f}, Dice score {score:.3f}")
    assert losses[-1] < 0.4 * losses[0]
    assert score > 0.8
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


if __name__ == "__main__":
    main()
