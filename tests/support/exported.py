"""Exported files on a machine without a GPU: their module loaded, their launcher recorded."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
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


class Binding:
    """The binding of an exported file, compiled by g++ for CPU tensors.

    Args:
        names: of the file.
        function: PyTorch's name of the layer's function.
        run: stands in for the launcher: (operation, whether in TF32, the addresses of the tensors
            and the weight's strides by name, extents).
    """

    def __init__(
        self, names: Mapping[str, Any], function: str, folder: Path, run: Callable[..., None]
    ) -> None:
        self.library = f"convt3d_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        stubs = folder / "stubs"
        (stubs / "c10" / "cuda").mkdir(parents=True)
        for header, text in _STUBS.items():
            (stubs / header).write_text(f"#pragma once\n{text}")
        cpp = folder / "binding.cpp"
        cpp.write_text(
            "#include <ATen/core/Tensor.h>\n#include <torch/library.h>\n"
            + "".join(f"#include <ATen/ops/{name}.h>\n" for name in _OPERATORS)
            + "namespace torch { using at::Tensor; }\n"
            + names["DECLARATIONS"]
            + names["BINDING"].replace("tensor.is_cuda()", "true")
            + Template(_REGISTERED).substitute(library=self.library, function=function)
        )
        shared, package = cpp.with_suffix(".so"), Path(torch.__file__).parent
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS"]
        command += [f"-I{stubs}", f"-I{package / 'include'}", str(cpp), "-o", str(shared)]
        subprocess.run([*command, f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
        torch.ops.load_library(str(shared))
        self.run = run
        self.error: Exception | None = None
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_longlong)
        )
        self.callback = kind(self._called)
        ctypes.CDLL(str(shared)).set_callback(self.callback)

    def __call__(self, operation: str, *arguments: Any) -> torch.Tensor:
        """The result of an operation on what the file's module gives it."""
        result = None
        try:
            result = getattr(getattr(torch.ops, self.library), operation)(*arguments)
        except RuntimeError:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error
        return result

    def _called(self, operation: int, tf32: int, numbers: Any) -> int:
        names = ("source", "weight", "bias", "target", *WEIGHT_STRIDES)
        try:
            values = dict(zip(names, numbers[:9], strict=True))
            self.run(OPERATIONS[operation], bool(tf32), values, numbers[9:16])
        except Exception as error:  # which would be lost on the way through C++
            self.error = error
            return 1
        return 0


#: The operators that a binding calls. The headers of all operators take twice as long to compile.
_OPERATORS = ("conv3d", "conv_transpose3d", "empty")

_STUBS = {
    "c10/cuda/CUDAGuard.h": """namespace c10::cuda {
struct CUDAGuard {
  template <typename Device>
  explicit CUDAGuard(const Device&) {}
};
}
""",
    "c10/cuda/CUDAStream.h": """namespace c10::cuda {
struct Stream {
  void* stream() const { return nullptr; }
};
inline Stream getCurrentCUDAStream() { return {}; }
}
""",
    "cuda_runtime.h": """using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
inline const char* cudaGetErrorString(cudaError_t) { return "see the error of the callback"; }
""",
}

_REGISTERED = """
namespace convt3d::host {
using Callback = int (*)(int, int, const long long*);
static Callback callback;
static cudaError_t call(int operation, bool tf32, const Tensors& t, const Extents& e) {
  const auto address = [](const float* p) { return reinterpret_cast<long long>(p); };
  const long long numbers[] = {
      address(t.source), address(t.weight), address(t.bias), address(t.target),
      t.weight_stride_in, t.weight_stride_out, t.weight_stride_d, t.weight_stride_h,
      t.weight_stride_w, e.batch, e.in_d, e.in_h, e.in_w, e.out_d, e.out_h, e.out_w};
  return callback(operation, tf32, numbers) ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t forward(bool tf32, const Tensors& t, const Extents& e, const Allocate&, cudaStream_t) {
  return call(0, tf32, t, e);
}
cudaError_t grad_input(bool tf32, const Tensors& t, const Extents& e, const Allocate&,
                       cudaStream_t) {
  return call(1, tf32, t, e);
}
cudaError_t grad_weight(bool tf32, const Tensors& t, const Extents& e, const Allocate&,
                        cudaStream_t) {
  return call(2, tf32, t, e);
}
}  // namespace convt3d::host
extern "C" void set_callback(convt3d::host::Callback c) { convt3d::host::callback = c; }
TORCH_LIBRARY($library, library) {
  using at::Tensor;
  library.def("forward", [](const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
                            bool tf32) { return ${function}_forward(x, w, b, tf32); });
  library.def("grad_input", [](const Tensor& gy, const Tensor& w, at::IntArrayRef size, bool tf32) {
    return ${function}_grad_input(gy, w, size.vec(), tf32);
  });
  library.def("grad_weight", [](const Tensor& x, const Tensor& gy, bool tf32) {
    return ${function}_grad_weight(x, gy, tf32);
  });
}
"""


# --- Rules, compilers ----------------------------------------------------------------------------


def strip_comments(text: str) -> str:
    """As the checker does it: what follows # or // on a line is a comment, strings or not."""
    return "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in text.split("\n"))


FORBIDDEN = {
    "a try block": r"\btry\s*:",
    "an except clause": r"\bexcept\s*:|\bexcept\s+\w+",
    "the word pass": r"\bpass\b",
    "a torch.nn layer": r"torch\.nn\.(?!(Module|Parameter|init)\b)",
    "a layer through nn": r"\bnn\.(?!(Module|Parameter|init)\b)\w+",
    "a functional": r"\bnn\.functional\b|\bF\.\w+|torch\.conv|aten\.|ops\.",
    "a matrix product": r"torch\.(mm|bmm|matmul|einsum|addmm)\b",
    "threads": r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures|PoolExecutor",
    "streams": r"cuda\.Stream\s*\(|\.wait_stream\s*\(|\.record_stream\s*\(|cuda\.stream\b",
    "a tensor subclass": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|Tensor\.__new__",
    "timing functions": r"cuda\.Event|cuda\.synchronize|perf_counter|time\.time",
    "half precision": r"__float2half|static_cast\s*<\s*(__half|half)\s*>|\.half\s*\(",
}


def check_static_rules(file: str) -> None:
    """KernelBench's static rules, its warnings included."""
    text = strip_comments(file)
    found = [what for what, pattern in FORBIDDEN.items() if re.search(pattern, text)]
    assert found == []
    assert "__global__" in text
    assert re.search(r"\bthreadIdx\.", text)
    calls = [
        node
        for node in ast.walk(ast.parse(file))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_inline"
    ]
    assert len(calls) == 1, "exactly one genuine call of load_inline"


def nvcc() -> str:
    """The one on PATH, else that of the extra `test`."""
    path = shutil.which("nvcc")
    for folder in sys.path:
        packaged = Path(folder) / "nvidia" / "cu13" / "bin" / "nvcc"
        if path is None and packaged.exists():
            path = str(packaged)
    if path is None:
        pytest.skip("no nvcc: install the CUDA toolkit or PyPI's nvidia-cuda-nvcc")
    return path


def cuda_headers() -> Path:
    compiler = Path(nvcc()).resolve()
    candidates = [os.environ.get("CUDA_HOME", ""), compiler.parent.parent, "/usr/local/cuda"]
    for folder in map(Path, filter(None, candidates)):
        if (folder / "include" / "cuda_runtime.h").exists():
            return folder / "include"
    pytest.skip("no cuda_runtime.h: install the CUDA toolkit")


def check_binding(names: Mapping[str, Any], folder: Path) -> None:
    """Compile a file's binding against PyTorch's headers.

    A build of PyTorch without CUDA lacks one generated header; a macro says not to want it.
    """
    include = Path(torch.__file__).parent / "include"
    source = folder / "main.cpp"
    # torch/extension.h adds only pybind11 to this, and takes a minute more.
    source.write_text(
        "#include <ATen/ATen.h>\nnamespace torch { using at::Tensor; }\n"
        + names["DECLARATIONS"]
        + names["BINDING"]
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-DC10_USING_CUSTOM_GENERATED_MACROS"]
    command += ["-I", str(include), "-I", str(cuda_headers()), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "main.cpp" not in done.stderr, done.stderr
