"""One step of a 3D GAN with a penalty on slopes, which differentiates the layers twice.

    python examples/gan_step.py

Checks itself: the losses and all gradients equal those of the same step with PyTorch's layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import convt3d

LATENT = 16


def generator(width: int = 8) -> nn.Sequential:
    """Latent vectors (N, LATENT, 1, 1, 1) to volumes (N, 1, 16, 16, 16), as in 3D-GAN."""
    return nn.Sequential(
        nn.ConvTranspose3d(LATENT, 2 * width, 4, bias=False),  # the norm takes its mean away
        nn.BatchNorm3d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose3d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm3d(width),
        nn.ReLU(),
        nn.ConvTranspose3d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def critic(width: int = 8) -> nn.Sequential:
    """Volumes to scores, (N, 1)."""
    return nn.Sequential(
        nn.Conv3d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv3d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 4**3, 1),
    )


def step(make: nn.Module, judge: nn.Module, real: Tensor, noise: Tensor) -> list[Tensor]:
    """Both losses, then the gradient of each parameter.

    The generator is also penalised for the slope of the score by the latent vector. The gradient of
    that penalty needs second derivatives of every layer.
    """
    noise = noise.clone().requires_grad_()
    fake = make(noise)
    score = judge(fake)
    (slope,) = torch.autograd.grad(score.sum(), noise, create_graph=True)
    generator_loss = softplus(-score).mean() + slope.square().mean()
    critic_loss = softplus(judge(fake.detach())).mean() + softplus(-judge(real)).mean()
    parameters = [list(make.parameters()), list(judge.parameters())]
    return [
        generator_loss.detach(),
        critic_loss.detach(),
        *torch.autograd.grad(generator_loss, parameters[0]),
        *torch.autograd.grad(critic_loss, parameters[1]),
    ]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make, judge = generator().to(device), critic().to(device)
    real = torch.rand(4, 1, 16, 16, 16, device=device)
    noise = torch.randn(4, LATENT, 1, 1, 1, device=device)
    wanted = step(make, judge, real, noise)
    found = step(convt3d.convert(make), judge, real, noise)
    print(f"generator loss {float(found[0]):.4f}, critic loss {float(found[1]):.4f}")
    tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32 rounds operands to 10 bits
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.abs().max() > 0
        difference = (mine - theirs).norm() / theirs.norm()
        assert difference < tolerance, float(difference)
    print("losses and gradients, second derivatives included, equal PyTorch's")


if __name__ == "__main__":
    main()
