"""Which plans of a ranking are looked at where there are too many of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from convt3d.cuda.schedule import Plan


def spread(plans: Sequence[Plan], most: int) -> Iterator[Plan]:
    """At most so many plans of every family, from its first to its last."""
    families: dict[type, list[Plan]] = defaultdict(list)
    for one in plans:
        families[type(one)].append(one)
    for found in families.values():
        n = min(most, len(found))
        yield from (found[i * (len(found) - 1) // max(1, n - 1)] for i in range(n))
