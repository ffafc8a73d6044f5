"""What is installed, what is missing, and what will be accelerated on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convt3d import backends, environment, reference
from convt3d.geometry import Geometry


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok`` is None where there is nothing to judge."""

    name: str
    text: str
    ok: bool | None = None


def examine() -> list[Finding]:
    """All findings, the verdict last. Initialises CUDA where there is a GPU."""
    facts = environment.environment()
    findings = [
        Finding("convt3d", _known(facts["convt3d"], facts["commit"])),
        Finding("Python", environment.python_line()),
        Finding("PyTorch", f"{facts['torch']}, built for CUDA {facts['torch_cuda'] or 'none'}"),
        Finding("CPU", f"{facts['cpu']}, {facts['cpu_threads']} threads"),
        _gpu(facts),
    ]
    if facts["gpu"]:
        findings.append(Finding("driver", str(facts.get("driver", "unknown: no nvidia-smi"))))
    findings += [
        Finding("cuDNN", str(facts["cudnn"] or "none")),
        Finding("cuda-core", facts["cuda_core"] or "not installed", bool(facts["cuda_core"])),
        Finding("NVRTC", facts["nvrtc"] or "not found", bool(facts["nvrtc"])),
        _cache(),
        _self_test(),
    ]
    findings += _verdict(facts)
    return findings


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """The report as plain values."""
    return {f.name: {"text": f.text, "ok": f.ok} for f in findings}


def _known(version: str | None, commit: str | None) -> str:
    return (version or "not installed, run from its source") + (f", {commit}" if commit else "")


def _gpu(facts: dict[str, Any]) -> Finding:
    if facts["gpu"] is None:
        if torch.version.cuda is None:
            return Finding("GPU", "none: this PyTorch is built without CUDA", None)
        return Finding("GPU", "none that PyTorch can use", None)
    major, minor = facts["capability"]
    text = f"{facts['gpu']}, compute capability {major}.{minor}"
    return Finding("GPU", text, (major, minor) >= (8, 0))


def _cache() -> Finding:
    from convt3d.cuda.compiler import cache_directory, unwritable

    path = cache_directory()
    if path.exists() and (reason := unwritable()) is not None:
        return Finding("kernel cache", reason, False)
    files, size = environment.directory_size(path)
    return Finding("kernel cache", f"{path}, {files} files, {size / 1e6:.1f} MB")


def _self_test() -> Finding:
    """A small layer, forward and gradients, against the float64 definition."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = Geometry(6, 4, (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), (1, 2, 1), 2)
    size = (3, 4, 5)
    x = torch.randn(2, g.in_channels, *size, device=device)
    w = torch.randn(g.weight_size, device=device)
    gy = torch.randn(2, g.out_channels, *g.output_size(size), device=device)
    try:
        pairs = (
            (backends.forward(x, w, None, g, False), reference.forward(x, w, None, g)),
            (backends.grad_input(gy, w, g, size, False), reference.grad_input(gy, w, g, size)),
            (backends.grad_weight(x, gy, g, False), reference.grad_weight(x, gy, g)),
        )
    except Exception as error:  # whatever it is, the user is to see it here
        return Finding("self-test", f"failed on {device}: {error}", False)
    worst = max(float((mine - wanted).norm() / wanted.norm()) for mine, wanted in pairs)
    ok = worst < 2e-3  # TF32 stays below 1e-3, a wrong kernel is off by its whole size
    return Finding("self-test", f"largest relative error {worst:.1e} on {device}", ok)


def _verdict(facts: dict[str, Any]) -> list[Finding]:
    if backends.DISABLED:
        text = "nothing: CONVT3D_DISABLE is set, so PyTorch's operator runs every call"
        return [Finding("accelerated here", text, False)]
    on_cpu = "float32 on CPU where another form measured faster"
    if facts["gpu"] is None:
        missing = "no usable GPU: on CPU, PyTorch's other operators run instead of the kernels"
        return [Finding("missing", missing), Finding("accelerated here", on_cpu, True)]
    from convt3d.cuda import backend

    device = torch.device("cuda", torch.cuda.current_device())
    sample = Geometry(16, 16, (3, 3, 3))
    reason = backend.refusal("forward", sample, torch.float32, device)
    if reason is not None:
        return [Finding("missing", reason, False), Finding("accelerated here", on_cpu, None)]
    text = f"float32, float16 and bfloat16 on {facts['gpu']}; {on_cpu}"
    return [Finding("accelerated here", text, True)]
