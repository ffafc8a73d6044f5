"""Facts about the machine and its software, for benchmark records and ``convt3d doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment(known_commit: str | None = None) -> dict[str, Any]:
    """Versions, processor and, where there is one, the GPU with its clocks; ready for JSON.

    ``known_commit`` is the source's where that is not a git checkout, or one that lags behind.
    """
    facts: dict[str, Any] = {
        "convt3d": package_version("convt3d"),
        "commit": known_commit or commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cuda_core": package_version("cuda-core"),
        "nvrtc": nvrtc_version(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = properties.name
        facts["capability"] = [properties.major, properties.minor]
        facts |= nvidia_smi()
    return facts


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nvrtc_version() -> str | None:
    """Version of the NVRTC that cuda.core would use; None if it or the bindings are absent."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # a missing library raises errors of several unrelated types
        return None
    return f"{major}.{minor}" if int(status) == 0 else None


def nvidia_smi(device: int | None = None) -> dict[str, Any]:
    """Driver, clocks (MHz), power (W) and temperature of the current GPU; {} without nvidia-smi."""
    query = {
        "driver": "driver_version",
        "clock_sm": "clocks.sm",
        "clock_memory": "clocks.mem",
        "clock_sm_max": "clocks.max.sm",
        "power": "power.draw",
        "power_limit": "power.limit",
        "temperature": "temperature.gpu",
    }
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    index = torch.cuda.current_device() if device is None else device
    try:
        # UUID, because CUDA_VISIBLE_DEVICES renumbers the devices that torch sees.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except AttributeError:  # before torch 2.5
        uuid = str(index)
    command = [
        tool, f"--id={uuid}", f"--query-gpu={','.join(query.values())}",
        "--format=csv,noheader,nounits",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(query, values, strict=False))


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Commit of the source tree that is imported, with ``-dirty`` if files differ; else None."""
    git = shutil.which("git")
    if git is None:
        return None
    here = Path(__file__).resolve().parent

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                [git, "-C", str(here), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Only a checkout that tracks this file counts: a wheel may lie inside somebody's repository.
    if ask("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    revision = ask("rev-parse", "HEAD")
    return f"{revision}-dirty" if revision and ask("status", "--porcelain", "--", ".") else revision


def directory_size(path: Path) -> tuple[int, int]:
    """Number of files below a folder and their bytes; (0, 0) if there is none."""
    count = size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
            except OSError:  # removed meanwhile by another process
                continue
            count += 1
    return count, size


def python_line() -> str:
    """Python's version and where it runs from."""
    return f"{platform.python_version()} ({sys.executable})"
