"""From a problem to its plan: a module for each kernel family, and ``choose`` among them."""

from convt3d.cuda.plan.choose import (
    MODELS,
    decide,
    plan_as_given,
    plan_for,
    plan_problem,
    problem_for,
    refusal,
)
from convt3d.cuda.plan.families import PLANS, gains_by_tensors, ranked_plans

__all__ = [
    "MODELS",
    "PLANS",
    "decide",
    "gains_by_tensors",
    "plan_as_given",
    "plan_for",
    "plan_problem",
    "problem_for",
    "ranked_plans",
    "refusal",
]
