"""Training with and without convt3d: the same loss curve, and the time of a step.

    python tools/training_check.py --out docs/results/training-h200.json
    python tools/training_check.py --small --precisions fp32 --steps 10                  (on CPU)

A 3D U-Net of nnU-Net's shape (segmentation, cross entropy and Dice, SGD with Nesterov momentum) and
a 3D-GAN (Adam) learn from synthetic volumes, in every precision from the same seeds:
  pytorch        PyTorch's layers
  other          the same with the other setting of torch.backends.cudnn.benchmark
  deterministic  the same with torch.backends.cudnn.deterministic
  noise          PyTorch's layers, initial weights changed by a rounding error of the precision
  convt3d        the network after convt3d.convert
Each has a process of its own, because PyTorch keeps one cuDNN plan per shape and process. The
distance of two curves is their mean absolute difference. PyTorch's own noise is the largest
distance between two of its first three, which differ in nothing but cuDNN's plans. convt3d's
distance from pytorch may be at most three times the larger of that and the distance of noise; the
record says whether it is within PyTorch's own, too. The share of convolutions is by PyTorch's
profiler. torch.backends.cudnn.benchmark is True, as nnU-Net sets it, unless --cudnn-default; it
tunes our layers too, seconds for each in the first step, unless --no-tuning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import convt3d  # noqa: E402
from convt3d.bench.cases import MODES  # noqa: E402
from convt3d.bench.network_profile import convolution_share  # noqa: E402
from convt3d.bench.network_worker import NETWORK_MODES, autocast, leave_untuned  # noqa: E402
from convt3d.bench.networks import Discriminator3d, Generator3d, UNet3d  # noqa: E402
from convt3d.bench.record import record_text  # noqa: E402
from convt3d.environment import environment  # noqa: E402

PYTORCH = ("pytorch", "other", "deterministic")  # which differ in cuDNN's plans alone
RUNS = (*PYTORCH, "noise", "convt3d")
ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
FACTOR = 3.0  # by which the distance may exceed that of rounding errors and of cuDNN's plans

Step = Callable[[], list[Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="comma-separated")
    parser.add_argument("--precisions", default="tf32,bf16", help=f"of {', '.join(NETWORK_MODES)}")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--patch", type=int, default=96, help="edge of the U-Net's volumes")
    parser.add_argument("--cudnn-default", action="store_true", help="benchmark stays False")
    parser.add_argument("--no-tuning", action="store_true", help="our plans as the models choose")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the tool")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(_run(arguments)))
        return
    rows, facts = [], environment(arguments.commit)
    for row in _rows(arguments):
        rows.append(row)
        if arguments.out:  # at once: a run that is cut off keeps what it has
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            record = {
                "environment": facts,
                "cudnn_benchmark": not arguments.cudnn_default,
                "tuned": not (arguments.cudnn_default or arguments.no_tuning),
                "steps": arguments.steps,
                "rows": rows,
            }
            arguments.out.write_text(record_text(record))
    if not all(row["same_curve"] for row in rows):
        raise SystemExit("a loss curve differs by more than rounding and cuDNN's plans explain")


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in arguments.networks.split(","):
        for precision in arguments.precisions.split(","):
            row = _compare(name, precision)
            report(name, precision, row)
            yield {"network": name, "precision": precision, **row}


def _compare(name: str, precision: str) -> dict[str, Any]:
    """All runs of a network, each in a process with these arguments."""
    found = {}
    for run in RUNS:
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += ["--networks", name, "--precisions", precision, "--run", run]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[run] = json.loads(done.stdout.splitlines()[-1])
    curves = {run: values["losses"] for run, values in found.items()}
    pairs = itertools.combinations(PYTORCH, 2)
    distance = {run: _distance(curves[run], curves["pytorch"]) for run in ("convt3d", "noise")}
    distance["plans"] = max(_distance(curves[a], curves[b]) for a, b in pairs)
    return {
        "input": found["pytorch"]["input"],
        "losses": curves,
        "distance": distance,
        "same_curve": distance["convt3d"] <= FACTOR * max(distance["noise"], distance["plans"]),
        "within_plans": distance["convt3d"] <= distance["plans"],
        "step_ms": {run: values["step_ms"] for run, values in found.items()},
        "conv_share": {run: values["conv_share"] for run, values in found.items()},
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of one network in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, precision = arguments.networks, arguments.precisions
    if arguments.no_tuning:
        leave_untuned()
    benchmark = not arguments.cudnn_default
    torch.backends.cudnn.benchmark = {"other": not benchmark, "deterministic": False}.get(
        arguments.run, benchmark
    )
    torch.backends.cudnn.deterministic = arguments.run == "deterministic"
    with MODES[precision].applied(device):
        torch.manual_seed(0)
        step, trained, sample = NETWORKS[name](precision, device, arguments)
        if arguments.run == "noise":
            _perturb(trained, ROUNDING[precision])
        if arguments.run == "convt3d":
            for module in trained:
                convt3d.convert(module)
        torch.manual_seed(1)
        losses, ms = _train(step, arguments.steps, device)
        share = convolution_share(step, device, arguments.run == "convt3d")
    return {"input": list(sample.shape), "losses": losses, "step_ms": ms, **share}


def _perturb(modules: list[nn.Module], size: float) -> None:
    """Every weight times 1 + a normal random number of this size."""
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.mul_(1 + size * torch.randn_like(parameter))


def _train(step: Step, steps: int, device: torch.device) -> tuple[list[list[float]], float]:
    """Losses of every step, and the median time of a step after the first fifth."""
    losses, times = [], []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        values = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append([float(v.detach()) for v in values])
    return losses, statistics.median(times[steps // 5 :])


def _distance(curve: list[list[float]], other: list[list[float]]) -> float:
    """Mean absolute difference of two curves; not a number makes it infinite."""
    a, b = torch.tensor(curve), torch.tensor(other)
    return float(torch.nan_to_num((a - b).abs(), nan=float("inf")).mean())


# --- Networks: a step that gives its losses, what it trains, an input of it ----------------------


def _volumes(count: int, edge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Smooth random blobs, (N, 1, edge^3), about as large as an eighth of the volume, and noise."""
    coarse = torch.randn(count, 1, 6, 6, 6, device=device)
    blobs = F.interpolate(coarse, (edge, edge, edge), mode="trilinear", align_corners=True)
    return blobs, blobs + 0.3 * torch.randn_like(blobs)


def _unet(precision: str, device: torch.device, arguments: argparse.Namespace) -> Any:
    small = arguments.small
    edge = 16 if small else arguments.patch
    model = (UNet3d((4, 8, 8)) if small else UNet3d()).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5
    )
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def step() -> list[Tensor]:
        blobs, x = _volumes(2, edge, device)
        labels = (blobs[:, 0] > 0.3).long() + (blobs[:, 0] > 0.8).long()
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision, device):
            y = model(x)
        y = y.float()
        loss = F.cross_entropy(y, labels) - _dice(y, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        scaler.step(optimizer)
        scaler.update()
        return [loss]

    return step, [model], torch.randn(2, 1, edge, edge, edge, device=device)


def _dice(logits: Tensor, labels: Tensor) -> Tensor:
    """Soft Dice over the classes but the background, mean."""
    p = logits.softmax(1)[:, 1:]
    wanted = F.one_hot(labels, logits.shape[1]).movedim(-1, 1)[:, 1:].to(p.dtype)
    axes = (0, 2, 3, 4)
    both = (p * wanted).sum(axes)
    return ((2 * both + 1) / (p.sum(axes) + wanted.sum(axes) + 1)).mean()


def _gan(precision: str, device: torch.device, arguments: argparse.Namespace) -> Any:
    small = arguments.small
    batch, latent = (4, 6) if small else (32, 200)
    features = (8, 6) if small else (512, 256, 128, 64)
    generator = Generator3d(latent, features).to(device)
    discriminator = Discriminator3d(tuple(reversed(features))).to(device)
    edge = 4 * 2 ** len(features)
    models = (generator, discriminator)
    optimizers = [torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in models]
    scalers = [torch.amp.GradScaler(device.type, enabled=precision == "fp16") for _ in models]

    def update(index: int, loss: Tensor) -> None:
        optimizers[index].zero_grad(set_to_none=True)
        scalers[index].scale(loss).backward()
        scalers[index].step(optimizers[index])
        scalers[index].update()

    def judge(volumes: Tensor, real: bool) -> Tensor:
        with autocast(precision, device):
            logits = discriminator(volumes).float().flatten()
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def step() -> list[Tensor]:
        real = torch.sigmoid(8 * _volumes(batch, edge, device)[0])
        z = torch.randn(batch, latent, 1, 1, 1, device=device)
        with autocast(precision, device):
            made = generator(z)
        loss_d = judge(real, True) + judge(made.detach(), False)
        update(1, loss_d)
        loss_g = judge(made, True)
        update(0, loss_g)
        return [loss_d, loss_g]

    sample = torch.randn(batch, latent, 1, 1, 1, device=device)
    return step, list(models), sample


NETWORKS: dict[str, Callable[..., Any]] = {"unet": _unet, "gan": _gan}


def report(name: str, precision: str, row: dict[str, Any]) -> None:
    step, share, far = (row[k] for k in ("step_ms", "conv_share", "distance"))
    print(f"{name}, {precision}, input {row['input']}")
    for run in ("pytorch", "convt3d"):
        curve = row["losses"][run]
        points = [[round(v, 4) for v in curve[i]] for i in (0, len(curve) // 2, -1)]
        print(f"  losses {run}: first {points[0]}, middle {points[1]}, last {points[2]}")
    shares = ["?" if share[run] is None else f"{share[run]:.0%}" for run in ("pytorch", "convt3d")]
    verdict = "the same" if row["same_curve"] else "NOT THE SAME"
    within = "within" if row["within_plans"] else "beyond"
    print(
        f"  distance {far['convt3d']:.2e}, of rounding noise {far['noise']:.2e}, of cuDNN's plans "
        f"{far['plans']:.2e} ({within}): {verdict}\n"
        f"  step {step['pytorch']:.2f} -> {step['convt3d']:.2f} ms "
        f"({step['pytorch'] / step['convt3d']:.2f}x); convolutions {' -> '.join(shares)}"
    )


if __name__ == "__main__":
    main()
