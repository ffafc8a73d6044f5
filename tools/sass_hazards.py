"""Looks for writes to registers of products in flight in the machine code of warpgroup kernels.

    python tools/sass_hazards.py                every warpgroup kernel of tests/ledger.jsonl
    python tools/sass_hazards.py --nvcc PATH    by the ptxas of another CUDA toolkit

Needs nvcc, whose ptxas compiles the kernels, and nvdisasm on the PATH or as --nvdisasm (package
nvidia-cuda-nvdisasm). See tests/support/sass.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from convt3d.cuda import compiler  # noqa: E402
from support.sass import functions, hazards  # noqa: E402


def programs() -> list[dict[str, Any]]:
    """The warpgroup kernels of the ledger, for sm_90a."""
    lines = (ROOT / "tests" / "ledger.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    return [
        row
        for row in rows
        if row["target"] == "sm_90a" and "wgmma.mma_async" in compiler.flatten(row["file"])
    ]


def check(row: dict[str, Any], nvcc: str, nvdisasm: str) -> list[str]:
    """Hazards of one program."""
    pairs = [macro.split("=", 1) for macro in row["macros"].split()]
    defines = "".join(f"#define CONVT3D_{name} {value}\n" for name, value in pairs)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.cu")
        cubin = source.with_suffix(".cubin")
        source.write_text(defines + compiler.flatten(row["file"]))
        target = "-gencode=arch=compute_90a,code=sm_90a"
        command = [nvcc, "-cubin", target, "-std=c++17", "-o", str(cubin), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        listing = subprocess.run(
            [nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    return [text for _, body in functions(listing) for text in hazards(body)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = programs()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda row: check(row, arguments.nvcc, arguments.nvdisasm), rows)
        bad = 0
        for row, found in zip(rows, results, strict=True):
            if found:
                bad += 1
                print(f"{row['file']}, {row['case']}: {len(found)}, first {found[0]}")
    print(f"{len(rows)} programs, {bad} with hazards")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
