"""Plans of ``ampere/gather``: layout, cost, plan and candidates."""

from convt3d.cuda.plan.ampere_gather.candidates import ranked, refusal
from convt3d.cuda.plan.ampere_gather.layout import Tile
from convt3d.cuda.plan.ampere_gather.plan import GatherPlan

__all__ = ["GatherPlan", "Tile", "ranked", "refusal"]
