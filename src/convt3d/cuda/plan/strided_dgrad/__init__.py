"""Plans of ``strided_dgrad/mainloop.cuh``: plan and candidates."""

from convt3d.cuda.plan.strided_dgrad.candidates import candidates, ranked, refusal
from convt3d.cuda.plan.strided_dgrad.plan import DgradTile, WgmmaStridedDgradPlan

__all__ = ["DgradTile", "WgmmaStridedDgradPlan", "candidates", "ranked", "refusal"]
