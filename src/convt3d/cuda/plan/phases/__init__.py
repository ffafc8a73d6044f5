"""Plans of ``phases/kernel.cu``: tile, products, layout, cost, plan and candidates."""

from convt3d.cuda.plan.phases.candidates import candidates, ranked, refusal, with_ping_pong
from convt3d.cuda.plan.phases.plan import PhasesLaunches, WgmmaPhasesPlan
from convt3d.cuda.plan.phases.tile import PhasesTile

__all__ = [
    "PhasesLaunches",
    "PhasesTile",
    "WgmmaPhasesPlan",
    "candidates",
    "ranked",
    "refusal",
    "with_ping_pong",
]
