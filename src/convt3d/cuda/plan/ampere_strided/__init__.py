"""Plans of ``ampere/strided``: layout, cost, plan and candidates."""

from convt3d.cuda.plan.ampere_strided.candidates import (
    MAX_ACCUMULATORS,
    least_cost,
    ranked,
    refusal,
    weights_may_come_first,
)
from convt3d.cuda.plan.ampere_strided.layout import CHAIN, Shape, Tile, axes_of, live_slots
from convt3d.cuda.plan.ampere_strided.plan import StridedPlan

__all__ = [
    "CHAIN",
    "MAX_ACCUMULATORS",
    "Shape",
    "StridedPlan",
    "Tile",
    "axes_of",
    "least_cost",
    "live_slots",
    "ranked",
    "refusal",
    "weights_may_come_first",
]
