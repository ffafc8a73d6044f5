"""Records what every intrinsic does on a GPU: inputs and raw outputs of probes.cu.

    PYTHONPATH=src:tests python -m emulator.record_vectors

writes tests/emulator/vectors.npz, against which test_emulator_intrinsics.py checks the emulator.
Needs a CUDA device, torch and cuda-core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from . import probes
from .probes import PROBES, Probe

#: Committed with the tests, so kept small.
_MAX_BYTES = 300_000


def _compile(names: list[str]) -> dict[str, object]:
    from cuda.core import Program, ProgramOptions

    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}" + ("a" if major == 9 else "")
    options = ProgramOptions(arch=target, std="c++17")
    program = Program(probes.device_text(), "c++", options)
    code = program.compile("cubin")
    return {name: code.get_kernel(f"probe_{name}") for name in names}


def _run(kernel: object, probe: Probe, words: np.ndarray, stream: object) -> np.ndarray:
    from cuda.core import LaunchConfig, launch

    blocks = probes.blocks(probe, words)
    source = torch.from_numpy(words.view(np.int32)).cuda()
    result = torch.full((blocks * probe.output_words,), -1, dtype=torch.int32, device="cuda")
    config = LaunchConfig(grid=blocks, block=32)
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
    kernels = _compile([probe.name for probe in PROBES])
    arrays: dict[str, np.ndarray] = {"device": np.array(torch.cuda.get_device_name())}
    for probe in PROBES:
        words = probes.inputs_of(probe)
        got = _run(kernels[probe.name], probe, words, stream)
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
