"""Plans of ``ndhwc/kernel.cu``: layout, cost, plan and candidates."""

from convt3d.cuda.plan.ndhwc.candidates import candidates, ranked, refusal
from convt3d.cuda.plan.ndhwc.layout import NdhwcTile
from convt3d.cuda.plan.ndhwc.plan import WgmmaNdhwcPlan

__all__ = ["NdhwcTile", "WgmmaNdhwcPlan", "candidates", "ranked", "refusal"]
