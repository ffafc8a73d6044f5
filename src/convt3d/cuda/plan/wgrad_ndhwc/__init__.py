"""Plans of ``wgrad_ndhwc/kernel.cu``: layout, cost, plan and candidates."""

from convt3d.cuda.plan.wgrad_ndhwc.candidates import candidates, ranked, refusal
from convt3d.cuda.plan.wgrad_ndhwc.layout import Tile
from convt3d.cuda.plan.wgrad_ndhwc.plan import WgmmaWgradNdhwcPlan

__all__ = ["Tile", "WgmmaWgradNdhwcPlan", "candidates", "ranked", "refusal"]
