"""Time of whole networks of MONAI and nnU-Net, and of the package's own, as convt3d bench --model.

    python tools/model_bench.py --out docs/results/networks-libraries-h200.json
    python tools/model_bench.py --small --mode fp32 --out /tmp/networks.json             (on CPU)

The networks are those of tests/support/networks.py; those of libraries that are not installed are
left out. How and what is measured, bench/network_worker.py says: each network as built and as
converted, every setting in a process of its own. The record goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from convt3d.bench import network_command, network_run  # noqa: E402
from convt3d.bench.network_worker import KINDS, NETWORK_MODES  # noqa: E402
from support.networks import NETWORKS  # noqa: E402

REGISTRY = "support.networks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON record; rows that it has are kept")
    parser.add_argument("--networks", help="names or parts of names, comma-separated; default all")
    parser.add_argument("--mode", default="tf32,bf16", help=f"of {', '.join(NETWORK_MODES)}")
    parser.add_argument("--layout", default="ncdhw", help="of ncdhw, ndhwc")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: both")
    parser.add_argument("--cudnn-benchmark", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--optimiser", action="store_true", help="steps of SGD, too")
    parser.add_argument("--fused", action="store_true", help="compiled by backend convt3d, too")
    parser.add_argument("--graphs", action="store_true", help="compiled steps as CUDA graphs")
    parser.add_argument("--tune", action="store_true", help="our plans by timing candidates")
    parser.add_argument("--once", action="store_true", help="PyTorch before ours, not after, too")
    parser.add_argument("--cold", action="store_true", help="empty caches of compiled kernels")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the tool")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    arguments = parser.parse_args()
    request = network_run.Request(
        networks=_present(arguments.networks or ""),
        modes=arguments.mode.split(","),
        layouts=arguments.layout.split(","),
        compiled=(False, True) if arguments.compile is None else (arguments.compile,),
        cudnn_benchmark=(arguments.cudnn_benchmark,),
        kinds=arguments.kinds.split(","),
        once=arguments.once,
        optimiser=arguments.optimiser,
        fused=arguments.fused,
        graphs=arguments.graphs,
        tuned=arguments.tune,
        small=arguments.small,
        cold=arguments.cold,
        device="cuda" if torch.cuda.is_available() else "cpu",
        budget_s=arguments.budget,
        registry=REGISTRY,
    )
    # Where the measuring processes find the registry.
    paths = (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    problem = network_command.measure(request, arguments.out, resume=True, commit=arguments.commit)
    if problem is not None:
        raise SystemExit(problem)


def _present(wanted: str) -> list[str]:
    """Networks by name, else by part of a name; those of missing libraries are left out."""
    parts = [part.strip().lower() for part in wanted.split(",")]
    whole = {name.lower() for name in NETWORKS}
    names = []
    for name, network in NETWORKS.items():
        known = name.lower()
        if not any(known == part if part in whole else part in known for part in parts):
            continue
        if network.missing:
            print(f"{name}: {network.missing}", file=sys.stderr)
        else:
            names.append(name)
    return names


if __name__ == "__main__":
    main()
