"""Converts a MONAI network in place; output and gradients stay what they were.

pip install monai
python examples/convert_monai.py
"""

from __future__ import annotations

import copy

import torch

import convt3d

try:
    from monai.networks.nets import UNet
except ImportError:
    UNet = None


def main() -> None:
    if UNet is None:
        print("skipped: MONAI is not installed (pip install monai)")
        return
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    original = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
    ).to(device)
    model = convt3d.convert(copy.deepcopy(original))
    layers = [name for name, m in model.named_modules() if isinstance(m, convt3d.ConvTranspose3d)]
    print(f"converted: {', '.join(layers)}")
    assert len(layers) == 2

    x = torch.randn(2, 1, 16, 16, 16, device=device)
    outputs, gradients = [], []
    for net in (original, model):
        y = net(x)
        y.square().mean().backward()
        outputs.append(y.detach())
        gradients.append([parameter.grad for parameter in net.parameters()])
    # TF32 on a GPU rounds operands to 10 bits; on a CPU only the order of sums differs.
    tolerance = 5e-3 if device == "cuda" else 1e-5
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)
    model.load_state_dict(original.state_dict())  # one state_dict for both
    print("output and gradients equal the original's")


if __name__ == "__main__":
    main()
