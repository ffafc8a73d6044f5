"""Every intrinsic of the emulator against an independent model, and against a GPU's own results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from emulator import build, harness, probes
from emulator.probes import Probe
from emulator.probes_hopper import PROBES

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

VECTORS = Path(harness.__file__).parent / "vectors.npz"


def run_probe(probe: Probe, words: np.ndarray, **options: object) -> np.ndarray:
    blocks = probes.blocks(probe, words)
    out = np.empty(blocks * probe.output_words, np.uint32)
    harness.poison(out)
    harness.launch(
        f"probe_{probe.name}",
        probes.emulated_text(probe),
        {},
        blocks,
        probe.threads,
        0,
        [words, out],
        **options,
    )
    return out


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_model(probe: Probe) -> None:
    words = probes.inputs_of(probe)
    got = run_probe(probe, words)
    assert probes.differences(probe, words, got, probe.model(words)).size == 0


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_recorded_on_a_gpu(probe: Probe) -> None:
    if not VECTORS.exists():
        pytest.skip("no recorded vectors: python -m emulator.record_vectors makes them on a GPU")
    with np.load(VECTORS) as recorded:
        if f"{probe.name}.in" not in recorded:
            pytest.skip(f"{probe.name} is not among the recorded vectors")
        words, wanted = recorded[f"{probe.name}.in"], recorded[f"{probe.name}.out"]
    assert probes.differences(probe, words, run_probe(probe, words), wanted).size == 0


@pytest.mark.parametrize("order", [1, 12345])
def test_results_do_not_depend_on_the_order_of_threads(order: int) -> None:
    for probe in PROBES:
        words = probes.inputs_of(probe)
        np.testing.assert_array_equal(run_probe(probe, words), run_probe(probe, words, order=order))


def test_every_intrinsic_is_emulated_with_its_signature() -> None:
    """The replaced header declares the functions of the real one, parameter for parameter."""

    def signatures(path: Path) -> set[str]:
        text = re.sub(r"//[^\n]*", "", path.read_text())
        text = re.sub(r",\s*emulator::Site site = emulator::Site::here\(\)", "", text)
        found = set()
        for match in re.finditer(
            r"(template <[^>]*>\s*)?CONVT3D_DEVICE\s+([\w:]+)\s+(\w+)\(([^{;]*)\)\s*\{", text
        ):
            found.add(re.sub(r"\s+", " ", " ".join(part or "" for part in match.groups())).strip())
        return found

    real = signatures(build.KERNELS / "device/ptx.cuh")
    assert len(real) > 20
    header = build.HERE / "device/ptx.cuh"
    mma = {s for s in real if " mma_" in s}  # made by a macro in the emulator
    for name in (re.search(r"(mma_\w+)", s).group(1) for s in mma):  # type: ignore[union-attr]
        assert f"({name}," in header.read_text()
    assert real - mma <= signatures(header)
