"""A progress bar on stderr, where the library for it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextlib.contextmanager
def steps(total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar of ``total`` steps; a call of what this gives advances it, with the step's name.

    Without ``rich`` (the extra ``cli`` brings it), or where it is not to be ``shown``, steps are
    silent.
    """
    bar = _bar() if shown and total else None
    if bar is None:
        yield lambda label: None
        return
    with bar:
        task = bar.add_task("starting", total=total)
        yield lambda label: bar.update(task, advance=1, description=label)


def _bar() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
    except ModuleNotFoundError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    return Progress(*columns, console=Console(stderr=True), transient=True)
