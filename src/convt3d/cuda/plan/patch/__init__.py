"""Plans of ``patch/kernel.cu``: layout, tensor maps, cost, plan and candidates."""

from convt3d.cuda.plan.patch.candidates import ranked, refusal
from convt3d.cuda.plan.patch.layout import Tile
from convt3d.cuda.plan.patch.plan import WgmmaPatchPlan

__all__ = ["Tile", "WgmmaPatchPlan", "ranked", "refusal"]
