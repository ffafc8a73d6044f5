"""Records what every intrinsic does on a GPU: inputs and raw outputs of probes.cu
and, where the package uses its instructions, probes_hopper.cu.

    PYTHONPATH=src:tests python -m emulator.record_vectors

writes tests/emulator/vectors.npz, against which test_emulator_intrinsics.py checks the emulator.
Needs a CUDA device, torch and cuda-core.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convt3d.cuda import compiler

from . import probes
from .build import KERNELS
from .probes import Probe
from .probes_hopper import PROBES

#: Committed with the tests, so kept small.
_MAX_BYTES = 420_000


@functools.cache
def _code(text: str) -> Any:
    from cuda.core import Program, ProgramOptions

    target = compiler.architecture(torch.cuda.get_device_capability())
    return Program(text, "c++", ProgramOptions(arch=target, std="c++17")).compile("cubin")


def _can_record(probe: Probe) -> bool:
    """Whether the package has the instructions, and this GPU too."""
    missing = [name for name in probe.headers if not (KERNELS / name).exists()]
    hopper = torch.cuda.get_device_capability()[0] == 9
    return not missing and (hopper or "device/wgmma.cuh" not in probe.headers)


def _run(probe: Probe, words: np.ndarray, stream: Any) -> np.ndarray:
    from cuda.core import LaunchConfig, launch

    kernel = _code(probes.device_text(probe)).get_kernel(f"probe_{probe.name}")
    blocks = probes.blocks(probe, words)
    source = torch.from_numpy(words.view(np.int32)).cuda()
    result = torch.full((blocks * probe.output_words,), -1, dtype=torch.int32, device="cuda")
    config = LaunchConfig(grid=blocks, block=probe.threads)
    launch(stream, config, kernel, source.data_ptr(), result.data_ptr())
    torch.cuda.synchronize()
    return result.cpu().numpy().view(np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "vectors.npz")
    output: Path = parser.parse_args().output

    from cuda.core import Device, Stream

    torch.cuda.init()
    Device(0).set_current()
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    arrays: dict[str, np.ndarray] = {"device": np.array(torch.cuda.get_device_name())}
    for probe in filter(_can_record, PROBES):
        words = probes.inputs_of(probe)
        got = _run(probe, words, stream)
        model = probe.model(words)
        wrong = probes.differences(probe, words, got, model)
        print(f"{probe.name:28s} {got.size:6d} words, {wrong.size} differ from the model")
        for position in wrong[:5]:
            print(f"    word {position}: {got[position]:#010x}, model {model[position]:#010x}")
        arrays[f"{probe.name}.in"], arrays[f"{probe.name}.out"] = words, got
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output, **arrays)
    size = output.stat().st_size
    print(f"{output}: {size} bytes")
    if size > _MAX_BYTES:
        raise SystemExit(f"more than {_MAX_BYTES} bytes: fewer inputs, please")


if __name__ == "__main__":
    main()
