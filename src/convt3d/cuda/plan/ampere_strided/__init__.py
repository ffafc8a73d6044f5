"""Plans of ``ampere/strided``: layout, cost, plan and candidates."""

from convt3d.cuda.plan.ampere_strided.candidates import (
    MAX_ACCUMULATORS,
    least_cost,
    ranked,
    refusal,
)
from convt3d.cuda.plan.ampere_strided.layout import Shape, Tile, axes_of, live_slots
from convt3d.cuda.plan.ampere_strided.plan import StridedPlan

__all__ = [
    "MAX_ACCUMULATORS",
    "Shape",
    "StridedPlan",
    "Tile",
    "axes_of",
    "least_cost",
    "live_slots",
    "ranked",
    "refusal",
]
