"""Plans of ``sweep/kernel.cu``: products and lines, cost, plan and candidates."""

from convt3d.cuda.plan.sweep.candidates import ranked, refusal
from convt3d.cuda.plan.sweep.plan import WgmmaSweepPlan
from convt3d.cuda.plan.sweep.products import SweepTile

__all__ = ["SweepTile", "WgmmaSweepPlan", "ranked", "refusal"]
