"""Plans of ``wgrad/kernel.cu``, the gradient by weight of contiguous tensors on wgmma.

A ``Kernel`` is what a CTA multiplies, a ``Call`` a kernel at some extents, a ``Layout`` its shared
memory where the gradient comes in one way, and a ``Work`` the steps of a call with one tile of
positions: how CTAs share them, and how long they take. The plan takes the best of all these.
"""

from convt3d.cuda.plan.wgrad.call import Fill
from convt3d.cuda.plan.wgrad.plan import WgmmaWgradPlan
from convt3d.cuda.plan.wgrad.search import candidates, ranked, refusal

__all__ = ["Fill", "WgmmaWgradPlan", "candidates", "ranked", "refusal"]
