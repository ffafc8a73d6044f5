"""Inductor with convt3d's graph passes: as a Dynamo backend, and as options for Inductor's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from convt3d.compile.masks import MasksOfResults
from convt3d.compile.passes import FuseTails

SLOTS: dict[str, Callable[[], CustomGraphPass]] = {
    "post_grad_custom_pre_pass": FuseTails,
    "joint_custom_pre_pass": MasksOfResults,
}
"""Where Inductor calls the passes."""

_TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class Chain(CustomGraphPass):
    """Several passes as one, for a PyTorch whose slots hold one."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any | None:
        """All of theirs; None, so that nothing is cached, if one of them has none."""
        found = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in found else tuple(found)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)


if _InferenceAware is not None:

    class InferenceAwareChain(Chain, _InferenceAware):
        """The same where one of them wants to know whether gradients are taken."""

        def __call__(self, graph: Graph, is_inference: bool = False) -> None:
            for each in self.passes:
                if isinstance(each, _InferenceAware):
                    each(graph, is_inference)
                else:
                    each(graph)


def compile_options(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of Inductor with convt3d's graph passes, for ``torch.compile(..., options=...)``.

    Args:
        options: others, which are kept. Passes in the slots that are needed run before ours; where
            there is none, those that ``torch._inductor.config`` has now do.

    Returns:
        ``options`` with ``post_grad_custom_pre_pass`` and ``joint_custom_pre_pass``.
    """
    result = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    for slot, ours in SLOTS.items():
        theirs = result.get(slot, getattr(config, slot))
        result[slot] = _joined(theirs, ours())
    return result


def _joined(theirs: Any, ours: CustomGraphPass) -> Any:
    """What a slot holds so that the passes that are there run, and ours once."""
    if theirs is None:
        return ours
    passes = list(theirs) if isinstance(theirs, (list, tuple)) else [theirs]
    if isinstance(passes[-1] if passes else None, Chain):
        passes = list(passes[-1].passes)
    passes = [each for each in passes if each != ours]
    if not passes:
        return ours
    if _TAKES_LISTS:
        return [*passes, ours]
    if _InferenceAware is not None and any(isinstance(each, _InferenceAware) for each in passes):
        return InferenceAwareChain([*passes, ours])
    return Chain([*passes, ours])


def convt3d(
    module: GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The backend of ``torch.compile(model, backend="convt3d")``: Inductor with our graph passes.

    Args:
        module: the graph that Dynamo captured.
        inputs: its inputs, fake tensors.
        mode: as Inductor's.
        options: as Inductor's.

    Raises:
        RuntimeError: a mode or an option that Inductor does not know.
    """
    from torch._inductor.compile_fx import compile_fx

    # The class that torch.compile hands its arguments to for Inductor: it checks them.
    settings = torch._TorchCompileInductorWrapper(mode, dict(options or {}), None)
    return compile_fx(module, inputs, config_patches=compile_options(settings.config))


def _reset() -> None:
    """What torch._dynamo.reset() has to do here: forget CUDA graphs, as Inductor does."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


convt3d.reset = _reset  # type: ignore[attr-defined]
