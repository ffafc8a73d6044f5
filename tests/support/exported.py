"""Exported files on a machine without a GPU: their module loaded, their launcher recorded."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch

from convt3d.cuda.schedule import OPERATIONS, WEIGHT_STRIDES, TensorMap

REPOSITORY = Path(__file__).parent.parent.parent


def problem_names() -> list[str]:
    """Names of the problems under ``kernelbench/problems``."""
    return sorted(path.stem for path in (REPOSITORY / "kernelbench" / "problems").glob("*.py"))


def load(text: str, context: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names of an exported file, executed in ``context``; nothing is compiled."""
    names = {} if context is None else context
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        exec(compile(text, "exported", "exec"), names)
    return names


class Launcher:
    """The launcher of an exported file, compiled by g++ with launches that are only recorded."""

    POINTERS: ClassVar = {"source": 1 << 50, "weight": 2 << 50, "bias": 3 << 50, "target": 4 << 50}
    STRIDES: ClassVar = {name: (5 << 50) + i for i, name in enumerate(WEIGHT_STRIDES)}
    SCRATCH = 6 << 50

    def __init__(self, names: Mapping[str, Any], folder: Path, hopper: bool = False) -> None:
        entries = [
            f"{variant}_{entry}"
            for variant, (_, short_names, _) in names["KERNELS"].items()
            for entry in short_names
        ]
        (folder / "cuda_runtime.h").write_text(
            (Path(__file__).parent / "export_host.hpp").read_text()
        )
        source = folder / "host.cpp"
        source.write_text(
            f"#define CONVT3D_HOPPER {hopper:d}\n"
            + names["DECLARATIONS"]
            + "".join(f'static const char* {entry} = "{entry}";\n' for entry in entries)
            + names["HOST"]
            + _DRIVER
        )
        library = folder / "host.so"
        command = ["g++", "-std=c++17", "-Wall", "-shared", "-fPIC", f"-I{folder}"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self.record = ctypes.CDLL(str(library)).record
        self.record.restype = ctypes.c_char_p
        self.record.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_longlong)]

    def schedule(self, operation: str, tf32: bool, extents: Sequence[int]) -> Recorded:
        """What the launcher queues for (batch, in_d, in_h, in_w, out_d, out_h, out_w)."""
        numbers = [*self.POINTERS.values(), *self.STRIDES.values(), *extents, self.SCRATCH]
        packed = (ctypes.c_longlong * len(numbers))(*numbers)
        text = self.record(OPERATIONS.index(operation), int(tf32), packed).decode()
        named: dict[int, Any] = {v: k for k, v in (self.POINTERS | self.STRIDES).items()}
        recorded = Recorded([], [])
        for line in text.splitlines():
            kind, first, *rest = line.split()
            if kind == "allocate":
                named[self.SCRATCH + len(recorded.workspaces)] = f"scratch {first}"
                recorded.workspaces.append(int(first))
            elif kind == "map":
                element, *parts = rest
                address, swizzle, *numbers = map(int, parts)
                lists = []
                while numbers:
                    count = numbers.pop(0)
                    lists.append([numbers.pop(0) for _ in range(count)])
                extents, strides, box, steps = lists
                named[int(first)] = TensorMap(
                    named[address], element, extents, strides, box, swizzle, steps
                )
            else:
                grid, block, shared_bytes, *arguments = map(int, rest)
                values = [named.get(a, a) for a in arguments]
                overlaps = kind == "launch_overlapping"
                recorded.launches.append((first, grid, block, shared_bytes, values, overlaps))
        return recorded


class Recorded(NamedTuple):
    """Launches as (kernel, grid, block, shared bytes, arguments, whether they may start before the
    one before has ended), and bytes of scratch memory."""

    launches: list[tuple[str, int, int, int, list[Any], bool]]
    workspaces: list[int]


_DRIVER = """
extern "C" const char* record(int operation, int tf32, const long long* n) {
  using namespace convt3d::host;
  recorded::text.clear();
  const auto pointer = [&](int i) { return reinterpret_cast<float*>(n[i]); };
  const Tensors tensors{pointer(0), pointer(1), pointer(2), pointer(3),
                        n[4], n[5], n[6], n[7], n[8]};
  const Extents extents{n[9], n[10], n[11], n[12], n[13], n[14], n[15]};
  long long scratch = n[16];
  const Allocate allocate = [&](long long bytes) {
    recorded::text += "allocate " + std::to_string(bytes) + "\\n";
    return reinterpret_cast<void*>(scratch++);
  };
  const auto run = operation == 0 ? forward : operation == 1 ? grad_input : grad_weight;
  run(tf32 != 0, tensors, extents, allocate, nullptr);
  return recorded::text.c_str();
}
"""
