"""The ledger: frozen kernels compile to the machine code that they had. No GPU is needed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convt3d.cuda import compiler
from support import cubin, ledger
from support.ledger import Change, Facts, Program

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC's bindings are not installed")

KNOWN = ledger.read()
IN_EVERY_RUN = 36  # programs, one of every kernel file among them
MOST_BYTES = 300_000
SERIALISED = 3  # programs with a warning C75xx; no more may come


def lines() -> list[Any]:
    return list(_lines())


def _lines() -> Iterator[Any]:
    quick = {program for program, _ in ledger.sample(KNOWN.lines, IN_EVERY_RUN)}
    for program, facts in KNOWN.lines:
        marks = () if program in quick else pytest.mark.more
        yield pytest.param(program, facts, marks=marks, id=program.label)


@pytest.mark.parametrize("program, facts", lines())
def test_a_program_compiles_to_the_same(program: Program, facts: Facts) -> None:
    found = ledger.measure(program)
    same = KNOWN.nvrtc == ledger.nvrtc_version()
    changes = ledger.compare(program, facts, found, same_compiler=same)
    assert not changes, "see tools/ledger.py; its changes:\n" + "\n".join(map(str, changes))


def test_every_kernel_file_is_in_the_ledger() -> None:
    files = {program.today.file for program, _ in KNOWN.lines}
    assert files == set(compiler.kernel_files())
    quick = ledger.sample(KNOWN.lines, IN_EVERY_RUN)
    assert {program.today.file for program, _ in quick} == files
    assert ledger.PATH.stat().st_size < MOST_BYTES
    labels = [program.label for program, _ in KNOWN.lines]
    assert len(set(labels)) == len(labels)


def test_ptxas_serialises_no_more_warpgroup_products() -> None:
    found = [
        p.label for p, facts in KNOWN.lines if any(w.startswith("C75") for w in facts.warnings)
    ]
    assert len(found) <= SERIALISED, found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.write(reversed(KNOWN.lines), path)
    assert ledger.read(path).lines == KNOWN.lines


# ---------------------------------------------------------------- the reader of cubins

SPEC = compiler.KernelSpec("test.cu", "", (("CONVT3D_UNUSED", "0"),))
PLAIN = """
struct Scale { int by; };
template <class T> __device__ int scaled(T s, int i) { return i % 7 * s.by; }
extern "C" __global__ void first(int* out, Scale s) { out[threadIdx.x] = scaled(s, out[9]); }
"""


def facts(text: str, target: str = "sm_90a") -> dict[str, Any]:
    return ledger.facts_of(*ledger.compiled(text, SPEC, target)).entries


def test_names_and_comments_leave_the_hash_alone() -> None:
    (before,) = facts(PLAIN).values()
    renamed = PLAIN.replace("Scale", "AnotherStruct").replace("scaled", "a").replace("by", "factor")
    renamed = "// A comment.\n\n" + renamed.replace("first", "convt3d_other")
    assert facts(renamed) == {"convt3d_other": before}
    (after,) = facts(PLAIN.replace("% 7", "% 11")).values()
    assert after["code"] != before["code"]


def test_names_in_a_kernel_of_ours_leave_the_hash_alone() -> None:
    program = next(p for p, _ in ledger.sample(KNOWN.lines, 1))
    text = compiler.flatten(program.today.file)
    renamed = re.sub(r"\bStaticAxis\b", "AxisOfAnotherName", text)
    renamed = re.sub(r"\bconvt3d(?=\b|_)", "aa", renamed)
    renamed = re.sub(r"//.*", "", renamed)
    assert renamed != text
    plain, other = (
        ledger.facts_of(*ledger.compiled(t, program.today, program.target)).entries
        for t in (text, renamed)
    )
    assert list(plain.values()) == list(other.values())
    assert plain.keys() != other.keys()


def test_resources_are_those_that_the_compiler_says() -> None:
    text = """
    extern "C" __global__ void __launch_bounds__(1024) spilling(const float* in, float* out) {
        float v[96];
        #pragma unroll
        for (int i = 0; i < 96; i++) v[i] = in[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 96; i++) out[i * 1024 + threadIdx.x] = v[i] * v[95 - i] + v[i / 2];
    }
    extern "C" __global__ void plain(float* out) {
        __shared__ float shared[500];
        shared[threadIdx.x] = out[threadIdx.x];
        __syncthreads();
        out[threadIdx.x] = shared[threadIdx.x ^ 1];
    }
    """
    code, log = ledger.compiled(text, SPEC, "sm_80")
    found = ledger.facts_of(code, log).entries
    assert found["spilling"]["spills"] > 0 and found["spilling"]["stack"] > 0
    assert (found["plain"]["spills"], found["plain"]["stack"]) == (0, 0)
    assert (found["spilling"]["shared"], found["plain"]["shared"]) == (0, 2000)
    used = dict(re.findall(r"'(\w+)' for 'sm_80'(?:.|\n)*?Used (\d+) registers", log))
    assert {name: str(values["registers"]) for name, values in found.items()} == used


ASSEMBLY = {
    "hmma": 'asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 '
    '{%0,%0,%0,%0},{%1,%1,%1,%1},{%1,%1},{%2,%2,%2,%2};" : "=f"(f) : "r"(n), "f"(g));',
    "ldgsts": 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(n), "l"(p));',
    "ublkcp": 'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes '
    '[%0], [%1], 16, [%2];" :: "r"(n), "l"(p), "r"(n));',
    "utmaldg": 'asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile'
    '.mbarrier::complete_tx::bytes [%0], [%1, {%0}], [%0];" :: "r"(n), "l"(p));',
    "hgmma": 'asm volatile("wgmma.fence.sync.aligned;\\n'
    "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0,%1,%2,%3}, %4, %4, 1, 1, 1;\\n"
    'wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;"'
    ' : "+f"(f), "+f"(g), "+f"(h), "+f"(k) : "l"(d));',
}


@pytest.mark.parametrize("name", ASSEMBLY)
def test_instructions_are_counted(name: str) -> None:
    text = f"""extern "C" __global__ void one(float* p, int n, unsigned long long d) {{
        float f = 0, g = 1, h = 2, k = 3; {ASSEMBLY[name]} p[threadIdx.x] = f + g + h + k;
    }}"""
    found = facts(text)["one"]
    assert {key: found[key] for key in cubin.OPCODES} == {
        key: int(key == name) for key in cubin.OPCODES
    }


# ---------------------------------------------------------------- what counts as a change

PROGRAM = Program("a case", "ampere/gather/kernel.cu", "sm_90a", ())
OLD = Facts({"entry": {**dict.fromkeys(ledger.FIELDS, 8), "code": "00"}}, ("C7510",))


@pytest.mark.parametrize("same", [True, False])
def test_changes(same: bool) -> None:
    def fields(new: Facts) -> set[str]:
        return {c.field for c in ledger.compare(PROGRAM, OLD, new, same_compiler=same)}

    assert not fields(OLD)
    entry = OLD.entries["entry"]
    more = dataclasses.replace(OLD, entries={"entry": {**entry, "code": "01", "spills": 12}})
    assert fields(more) == ({"code", "spills"} if same else {"spills"})
    less = dataclasses.replace(OLD, entries={"entry": {**entry, "hgmma": 7, "stack": 0}})
    assert fields(less) == ({"hgmma", "stack"} if same else set())
    assert fields(dataclasses.replace(OLD, warnings=())) == ({"warnings"} if same else set())
    assert fields(dataclasses.replace(OLD, warnings=("C7510", "C7512"))) == {"warnings"}
    injected = fields(dataclasses.replace(OLD, warnings=("C7510", "C7519")))
    assert injected == ({"warnings"} if same else set())
    assert fields(dataclasses.replace(OLD, entries={"other": entry})) == {"entry"}


def test_a_renamed_program_is_compiled_by_its_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Program("a case", "old.cu", "sm_90a", (("SIZE", "3"), ("KIND", "Old")))
    monkeypatch.setitem(ledger.RENAMES, "files", {"old.cu": "folder/new.cu"})
    monkeypatch.setitem(ledger.RENAMES, "macros", {"SIZE": "EXTENT"})
    monkeypatch.setitem(ledger.RENAMES, "values", {"Old": "New"})
    monkeypatch.setitem(ledger.RENAMES, "entries", {"entry": "other"})
    monkeypatch.setitem(ledger.ADDED, "folder/new.cu", {"EXTRA": "0"})
    macros = (("CONVT3D_EXTENT", "3"), ("CONVT3D_KIND", "New"), ("CONVT3D_EXTRA", "0"))
    assert old.today == compiler.KernelSpec("folder/new.cu", "", macros)
    assert old.label == "folder_new a case, sm_90a"
    new = dataclasses.replace(OLD, entries={"other": OLD.entries["entry"]})
    assert not ledger.compare(PROGRAM, OLD, new, same_compiler=True)


def test_warnings_are_known_by_their_codes() -> None:
    code, log = ledger.compiled(PLAIN, SPEC, "sm_90a")
    log += (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining registers\n"
        'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n'
        'test.cu(3): warning #177-D: variable "x" was declared but never referenced\n'
    )
    found = ledger.facts_of(code, log)
    assert found.warnings == ("#177-D", "C7510") and len(found.messages) == 2
    missing = ledger.compare(PROGRAM, Facts(found.entries, ()), found, same_compiler=False)
    assert missing == [Change(PROGRAM.label, "warnings", "", "#177-D C7510")]
