"""A package of AOTInductor, made here and run in a process that knows only it and convt3d."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.process import run_python


def check_package(model: nn.Module, samples: list[Tensor], folder: Path, tolerance: float) -> None:
    """The package gives what the model gives, for inputs of any batch and even extents.

    The package calls our operator through the dispatcher, so the process imports convt3d.
    """
    if torch.__version__ < "2.6":
        pytest.skip("packages since torch 2.6")
    reason = _no_compiler()
    if reason:
        pytest.skip(reason)
    model = model.eval()
    n, d, h, w = (torch.export.Dim(name, min=2, max=64) for name in "ndhw")
    program = torch.export.export(
        model, (samples[0],), dynamic_shapes=({0: n, 2: 2 * d, 3: 2 * h, 4: 2 * w},)
    )
    with torch.no_grad(), torch._inductor.config.patch({"cpp.cxx": (_compiler(folder),)}):
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "net.pt2")
        )
        torch.save([(x, model(x)) for x in samples], folder / "samples.pt")
    code = f"""
import torch, convt3d
net = torch._inductor.aoti_load_package({path!r})
for x, want in torch.load({str(folder / "samples.pt")!r}, weights_only=True):
    torch.testing.assert_close(net(x), want, atol={tolerance}, rtol={tolerance})
print("same")
"""
    assert run_python(code).split()[-1] == "same"


def _compiler(folder: Path) -> str:
    """The compiler, with the C++ library of this process where it would link a copy of it.

    A compiler without a shared libstdc++ links the archive into the package, and the package of any
    model that uses std::regex crashes as it is loaded: two such libraries do not share a locale.
    """
    from torch._inductor import cpp_builder

    compiler = cpp_builder.get_cpp_compiler()
    ask = [compiler, "-print-file-name=libstdc++.so"]
    shared = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    loaded = re.search(r"/\S*libstdc\+\+\.so\S*", Path("/proc/self/maps").read_text())
    if Path(shared).is_absolute() or loaded is None:
        return compiler
    script = folder / "c++"
    script.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -shared "*) set -- "$@" {loaded.group()} ;; esac\n'
        f'exec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def _no_compiler() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        return f"no C++ compiler: {error}"
    return None
