"""Runs a benchmark of whole networks: which processes measure what, and the lines of a record."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convt3d.bench import run
from convt3d.bench.network_worker import FUSED, KINDS, OWN, SIDES, Job
from convt3d.bench.record import NetworkRecord

MODULE = "convt3d.bench.network_worker"


@dataclass(frozen=True)
class Request:
    """What to measure, as the command line puts it.

    ``parts`` of each setting: the network as built, converted, and as built again, so that a drift
    of the machine shows; "once" leaves out the third. ``fused`` adds, to compiled settings, the
    converted network compiled with ``backend="convt3d"``. ``cold`` gives the kernels of ours and of
    Inductor an empty cache, so that seconds of first steps are those of a new machine. ``graphs``
    makes CUDA graphs of compiled steps (``mode="reduce-overhead"``).
    """

    networks: Sequence[str]
    modes: Sequence[str] = ("tf32",)
    layouts: Sequence[str] = ("ncdhw",)
    compiled: Sequence[bool] = (False, True)
    cudnn_benchmark: Sequence[bool] = (True,)
    kinds: Sequence[str] = KINDS
    once: bool = False
    optimiser: bool = False
    fused: bool = False
    graphs: bool = False
    tuned: bool = False
    small: bool = False
    cold: bool = False
    device: str = "cpu"
    budget_s: float = 1.0
    registry: str = OWN

    def jobs(self) -> list[Job]:
        """One job per process, those of a setting one after the other."""
        parts = SIDES if self.once else (*SIDES, SIDES[0])
        settings = itertools.product(
            self.networks, self.modes, self.layouts, self.compiled, self.cudnn_benchmark
        )
        return [
            Job(
                *setting,
                side,
                part,
                tuple(kind for kind in KINDS if kind in self.kinds),
                self.optimiser,
                self.graphs and setting[3],
                self.tuned,
                self.small,
                self.device,
                self.budget_s,
                self.registry,
            )
            for setting in settings
            for part, side in enumerate((*parts, FUSED) if self.fused and setting[3] else parts)
        ]


def measure(
    request: Request, record: NetworkRecord, progress: run.Progress = lambda row: None
) -> None:
    """Measure a request into a record, skipping the jobs whose rows it has (not failed ones).

    Raises:
        RuntimeError: measuring processes died; their rows until then, and those of all others, are
            in the record.
    """
    done = {k for k, row in record.rows.items() if "failed" not in row}
    jobs = [job for job in request.jobs() if not done >= set(job.keys())]
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "CONVT3D_CACHE_DIR": str(Path(folder) / "convt3d"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        run.run_isolated(jobs, record, progress, MODULE, caches if request.cold else {})


@dataclass(frozen=True)
class Line:
    """One setting of a record: ours beside the medians of PyTorch's processes, in ms.

    ``before`` are all of PyTorch's in the order of their measurement; the speed-up is by their
    median. ``fused`` is the converted network with the backend that fuses epilogues. ``first_s``
    includes what ``convt3d.warm`` took. None and () where not measured.
    """

    network: str
    mode: str
    layout: str
    compiled: bool
    graphs: bool
    cudnn_benchmark: bool
    kind: str
    optimiser: bool
    before: tuple[float, ...]
    after: float | None
    fused: float | None
    first_s: tuple[float | None, float | None]  # PyTorch's, ours
    peak_mbytes: tuple[float | None, float | None]
    conv_share: tuple[float | None, float | None]
    difference: float | None
    failed: str

    @property
    def pytorch(self) -> float | None:
        """The median of PyTorch's processes, in ms."""
        return statistics.median(self.before) if self.before else None

    @property
    def speedup(self) -> float | None:
        return self.pytorch / self.after if self.pytorch and self.after else None

    @property
    def drift(self) -> float | None:
        """How far PyTorch's own processes lie apart, as a share; None of fewer than two."""
        if len(self.before) < 2:
            return None
        return max(self.before) / min(self.before) - 1


_SETTING = (
    *("network", "mode", "layout", "compiled", "graphs", "cudnn_benchmark", "kind", "optimiser"),
)


def lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """One line for each setting, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        named = NetworkRecord.completed(row)
        groups.setdefault(tuple(named[name] for name in _SETTING), []).append(row)
    return [_line(setting, group) for setting, group in groups.items()]


def _line(setting: tuple[Any, ...], group: Sequence[Mapping[str, Any]]) -> Line:
    ordered = sorted(group, key=lambda row: row["part"])
    # Of PyTorch's processes the first: the second finds caches on disk that the first has filled.
    theirs, ours = (next((r for r in ordered if r["side"] == s), {}) for s in SIDES)

    def both(name: str) -> tuple[float | None, float | None]:
        return theirs.get(name), ours.get(name)

    first, mine = both("first_s")
    if mine is not None:
        mine += ours.get("warm_s") or 0.0
    return Line(
        **dict(zip(_SETTING, setting, strict=True)),
        before=tuple(r["ms"] for r in ordered if r["side"] == SIDES[0] and "ms" in r),
        after=ours.get("ms"),
        fused=next((r.get("ms") for r in ordered if r["side"] == FUSED), None),
        first_s=(first, mine),
        peak_mbytes=both("peak_mbytes"),
        conv_share=both("conv_share"),
        difference=next((r["difference"] for r in group if r.get("difference") is not None), None),
        failed="; ".join(dict.fromkeys(row["failed"] for row in ordered if "failed" in row)),
    )
