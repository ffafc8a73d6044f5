"""From a problem to its plan: a module for each kernel family, and ``choose`` among them."""

from convt3d.cuda.plan.choose import (
    MODELS,
    ON_TRIAL,
    classes,
    decide,
    plan_as_given,
    plan_for,
    plan_problem,
    problem_for,
    ranked_plans,
    refusal,
)

__all__ = [
    "MODELS",
    "ON_TRIAL",
    "classes",
    "decide",
    "plan_as_given",
    "plan_for",
    "plan_problem",
    "problem_for",
    "ranked_plans",
    "refusal",
]
