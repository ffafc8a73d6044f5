"""What a compilation fused, and what it did not: for the log and for ``report``."""

from __future__ import annotations

from dataclasses import dataclass

from convt3d.log import log_once

_MOST_SITES = 10_000
_sites: list[Site] = []


@dataclass(frozen=True)
class Site:
    """One convolution in one compiled graph.

    Args:
        name: the module that called it, or the node of the graph.
        layer: the operator, and the geometry of the transposed layer whose operations run.
        fused: the kinds of the steps in its epilogue, in order; "bias" and "cat", too.
        stopped: what ended its tail, in a few words.
    """

    name: str
    layer: str
    fused: tuple[str, ...]
    stopped: str

    def __str__(self) -> str:
        what = ", ".join(self.fused) or "nothing"
        why = f": {self.stopped}" if self.stopped else ""
        return f"the epilogue of {self.name} ({self.layer}) runs {what}{why}"


def record(site: Site) -> None:
    """Keep a site, and log it at level INFO once."""
    if len(_sites) < _MOST_SITES:
        _sites.append(site)
    log_once(str(site))


def report(clear: bool = False) -> list[Site]:
    """What was fused in the graphs that this process compiled, in order.

    A graph that Inductor found in its cache was not compiled, so it is not listed.

    Args:
        clear: forget them, so that the next call lists what is compiled from now on.
    """
    found = list(_sites)
    if clear:
        _sites.clear()
    return found
