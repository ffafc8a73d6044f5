"""``convt3d.warm`` on a GPU: after it, a step plans and compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process import run_python

STEP = """
import contextlib, sys, torch, convt3d
from convt3d.cuda import compiler
from convt3d.cuda.plan import choose
from support.networks import NETWORKS

name, last, half = "unet", {last}, {half}
network = NETWORKS[name]
model = convt3d.convert(network.build(True)).cuda()
x = network.input(True, "cuda")
if last:
    model = model.to(memory_format=torch.channels_last_3d)
    x = x.contiguous(memory_format=torch.channels_last_3d)
counts = dict(compiled=[], planned=[])

def counted(module, function, count):
    original = getattr(module, function)
    def spy(*arguments, **options):
        counts[count].append(str(arguments[0]))
        return original(*arguments, **options)
    setattr(module, function, spy)

counted(compiler, "_compile", "compiled")
counted(choose, "ranked_plans", "planned")
autocast = torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
used = torch.cuda.memory_allocated()
state = torch.cuda.get_rng_state()
with autocast:
    warmed = convt3d.warm(model, x, progress=False)
assert torch.cuda.memory_allocated() == used
assert torch.equal(torch.cuda.get_rng_state(), state)
assert warmed.operations > 0, warmed
assert all("cuDNN" in note for note in warmed.notes), warmed
assert warmed.compiled == len(counts["compiled"])
print(warmed.compiled, warmed.cached)
counts.update(compiled=[], planned=[])
with autocast:
    y = model(x)
y.backward(torch.ones_like(y))
torch.cuda.synchronize()
# Fake tensors tell another memory format of some channels_last results than kernels give.
assert max(map(len, counts.values())) <= (25 if last else 0), counts
"""


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_after_warm_a_step_compiles_nothing(last: bool, half: bool, tmp_path: Path) -> None:
    code = STEP.format(last=last, half=half)
    first = [int(n) for n in run_python(code, CONVT3D_CACHE_DIR=str(tmp_path)).split()]
    again = [int(n) for n in run_python(code, CONVT3D_CACHE_DIR=str(tmp_path)).split()]
    assert first[0] > 0 and first[1] == 0
    assert again == [0, first[0]]


def test_a_first_call_compiles_its_gradients(tmp_path: Path) -> None:
    code = """
import time, torch, convt3d
from convt3d.cuda import compiler
layer = convt3d.ConvTranspose3d(40, 24, 3, device="cuda")
x = torch.randn(1, 40, 9, 9, 9, device="cuda", requires_grad=True)
y = layer(x)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    jobs = list(compiler._requests.values())
    if len({key[0] for key in compiler._requests}) > 1 and all(j.future.done() for j in jobs):
        break
    time.sleep(0.1)
time.sleep(1)
compile_program, late = compiler._compile, []
compiler._compile = lambda *arguments: late.append(arguments[0]) or compile_program(*arguments)
y.backward(torch.ones_like(y))
torch.cuda.synchronize()
assert not late, late
"""
    run_python(code, CONVT3D_CACHE_DIR=str(tmp_path))
