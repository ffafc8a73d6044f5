"""Tidying of kernel text: what goes, what stays, and that nothing passes that changes the PTX."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from convt3d import export
from convt3d.cuda.schedule import Gpu
from convt3d.export import kernels, tidy, writer
from convt3d.export.tidy import text as tidy_text
from convt3d.export.tidy.chunks import Chunk, introduce_once, names_of, ordered
from convt3d.export.tidy.oracle import CompileError, Oracle, compile_ptx, entries, error_lines
from convt3d.export.tidy.preprocess import preprocess
from support.exported import REPOSITORY

pytest.importorskip("cuda.bindings")
needs_packages = pytest.mark.skipif(
    bool(tidy_text.missing_packages()), reason="pip install convt3d[tidy]"
)

HEAD = """#define CONVT3D_DEVICE __device__ __forceinline__
#define CONVT3D_CONSTEXPR __host__ __device__ constexpr
"""
KERNEL = (
    HEAD
    + """
namespace convt3d {

/// Nobody calls this.
CONVT3D_DEVICE int unused(int a) { return a + 1; }

/// Twice what it is given.
CONVT3D_DEVICE float twice(float a) { return 2.f * a; }

template <bool Forward, int Size>
struct Axis {
  static constexpr int size = Size;
  CONVT3D_CONSTEXPR static int at(int i) { return Forward ? i : Size - i; }
};

struct Config {
  using Line = Axis<true, 4>;
  static constexpr bool wide = false;
  static constexpr int parts = 1;
  /// Rows of a tile.
  static constexpr int rows = 4 * 8;
  static constexpr int unread = 3;
  static_assert(rows > 0, "some rows");
};

template <typename C>
CONVT3D_DEVICE void store(float* y, int i) {
  if constexpr (C::wide) {
    y[i] = 0.f;
  } else {
    // Each part in turn.
#pragma unroll
    for (int part = 0; part < C::parts; ++part)
      y[C::Line::at(i) * C::rows + part] = twice(float(i));
  }
}

}  // namespace convt3d

extern "C" __global__ void convt3d_kernel(float* y) {
  convt3d::store<convt3d::Config>(y, threadIdx.x);
}
"""
)


def ptx(text: str) -> dict[str, str]:
    return entries(compile_ptx(text, "sm_90a")[0])


def test_names_make_no_difference_and_code_does() -> None:
    renamed = KERNEL.replace("convt3d", "other").replace("kernel", "entry")
    assert list(ptx(renamed).values()) == list(ptx(KERNEL).values())
    changed = KERNEL.replace("2.f", "3.f")
    assert ptx(changed)["convt3d_kernel"] != ptx(KERNEL)["convt3d_kernel"]


def test_tables_are_part_of_an_entry() -> None:
    table = """
    __constant__ int table[2] = {1, %d};
    extern "C" __global__ void convt3d_kernel(int* y) { *y = table[threadIdx.x]; }
    """
    assert ptx(table % 2) != ptx(table % 3)
    assert ptx(table % 2) == ptx((table % 2).replace("table", "other"))


def test_an_entry_ends_behind_its_assembly() -> None:
    text = """
    extern "C" __global__ void convt3d_kernel(int* y) {
      asm volatile("{\\n.reg .u32 a;\\nmov.u32 a, 1;\\n}" ::: "memory");
      *y = %d;
    }
    """
    assert ptx(text % 2) != ptx(text % 3)


def test_errors_name_their_lines() -> None:
    with pytest.raises(CompileError) as error:
        compile_ptx("struct A {};\nstruct B : C {};\n", "sm_90a")
    assert error_lines(error.value) == [2]


def test_names_of_declarations() -> None:
    for source, names in {
        "template <int N>\nstruct Ring { int stage; };": ("Ring",),
        "struct alignas(64) TensorMap { int a; };": ("TensorMap",),
        "enum class Fill { rows, runs };": ("Fill",),
        "using uint32_t = unsigned int;": ("uint32_t",),
        "inline constexpr int near = 4, far = 5;": ("near", "far"),
        "template <> CONVT3D_DEVICE void product<8>(float (&d)[4]) { f(d); }": ("product",),
        "template <>\nconstexpr bool split<Ieee> = true;": ("split",),
        "CONVT3D_DEVICE float (&part(float* sums))[4] { return g(sums); }": ("part",),
        '/// Note.\nextern "C" __global__ void __launch_bounds__(8) run(int a) {}': ("run",),
    }.items():
        assert names_of(source) == names


@needs_packages
def test_preprocessor_keeps_comments_and_open_macros() -> None:
    text = """// The top.
#define SUM(a, b) add_##a("x" #b ", y")
#if MODE == 2
// In mode 2.
int a = SIZE;
#else
int b;
#endif

int c = OPEN;  // is not known
SUM(1, 2);
"""
    made = preprocess(text, {"MODE": "2", "SIZE": "7", "OPEN": "OPEN"}, 900)
    assert made == (
        "// The top.\n// In mode 2.\nint a = 7;\n\nint c = OPEN;  // is not known\n"
        'add_1("x2, y");\n'
    )


@needs_packages
def test_what_nothing_needs_goes_and_the_rest_stays() -> None:
    from convt3d.export.tidy.shaker import Shaker

    made = Shaker(KERNEL, Oracle("sm_90a", {(): ptx(KERNEL)}), lambda line: None).run()
    assert ptx(made) == ptx(KERNEL)
    for word in (
        "unused",
        "Nobody",
        "wide",
        "unread",
        "static_assert",
        "template",
        "parts",
        "for (",
    ):
        assert word not in made, word
    for left in ("Twice what", "Rows of a tile", "rows = 32", "Each part", "twice(float(i))"):
        assert left in made, left


@needs_packages
def test_what_one_of_several_builds_needs_stays() -> None:
    from convt3d.export.tidy.shaker import Shaker

    text = KERNEL.replace("wide = false", "wide = CONVT3D_WIDE")
    builds = [(("CONVT3D_WIDE", value),) for value in ("0", "1")]
    want = {build: entries(compile_ptx(text, "sm_90a", build)[0]) for build in builds}
    made = Shaker(text, Oracle("sm_90a", want), lambda line: None).run()
    for build in builds:
        assert entries(compile_ptx(made, "sm_90a", build)[0]) == want[build]
    assert "CONVT3D_WIDE" in made
    assert "= 0.f" in made
    assert "twice(float(i))" in made


CHOSEN = (
    HEAD
    + """
namespace convt3d {

template <bool Condition, typename Yes, typename No>
struct Select { using Type = Yes; };
template <typename Yes, typename No>
struct Select<false, Yes, No> { using Type = No; };

struct Config {
  static constexpr bool wide = false;
};
using Kernel = Config;

template <typename C>
struct Narrow;

template <typename C>
struct Base {
  struct Unread { int a; };
  float scale = 3.f;
};

template <typename C>
struct Wide : Base<C> {
  using Base<C>::scale;
  CONVT3D_DEVICE float at(int i) const { return i + scale; }
};

template <typename C>
struct Narrow : Base<C> {
  using Base<C>::scale;
  CONVT3D_DEVICE float at(int i) const { return i * scale; }
};

template <typename C>
using Store = typename Select<C::wide, Wide<C>, Narrow<C>>::Type;

}  // namespace convt3d

extern "C" __global__ void convt3d_kernel(float* y) {
  y[threadIdx.x] = convt3d::Store<convt3d::Kernel>().at(threadIdx.x);
}
"""
)


@needs_packages
def test_selected_types_are_chosen_and_templates_of_one_type_are_plain() -> None:
    from convt3d.export.tidy.shaker import Shaker

    made = Shaker(CHOSEN, Oracle("sm_90a", {(): ptx(CHOSEN)}), lambda line: None).run()
    assert ptx(made) == ptx(CHOSEN)
    for word in ("Select", "Wide", "Unread", "template", "using Base", "struct Narrow;"):
        assert word not in made, word
    assert "struct Narrow : Base {" in made


@needs_packages
def test_parameters_take_numbers_that_types_inherit() -> None:
    from convt3d.export.tidy.specialise import instances, specialised
    from convt3d.export.tidy.syntax import parse

    text = b"""namespace convt3d {
struct Layer {
  static constexpr int kernel0 = 3;
  static constexpr int kernel1 = div_up(3, 2);
  static constexpr bool forward = true;
};
template <int Kernel, bool Forward>
struct Axis {
  static constexpr int kernel = Forward ? Kernel : 1;
};
template <int Kernel>
struct Other {
  static constexpr int kernel = Kernel;
};
struct Config : Layer {
  using Axis0 = Axis<kernel0, forward>;
  using Axis1 = Other<kernel1>;
};
}  // namespace convt3d
"""
    assert instances(text, parse(text)) == {"Axis": "Axis<3, true>"}
    made = specialised(text).decode()
    assert "static constexpr int kernel = true ? 3 : 1;" in made
    assert "using Axis0 = Axis;" in made and "using Axis1 = Other<kernel1>;" in made
    local = text.replace(
        b"using Axis0 = Axis<kernel0, forward>;",
        b"int f() { constexpr int kernel0 = g(); return Axis<kernel0, forward>::kernel; }",
    )
    assert instances(local, parse(local)) == {}
    hidden = text.replace(
        b"struct Config : Layer {",
        b"struct Config : Layer {\n  static constexpr int kernel0 = g();",
    )
    assert instances(hidden, parse(hidden)) == {}
    outside = text.replace(b"struct Config : Layer {", b"struct Config {")
    assert instances(outside, parse(outside)) == {}


@needs_packages
def test_variables_that_nothing_reads_go_with_what_sets_them() -> None:
    from convt3d.export.tidy.shaker import Shaker

    text = """extern "C" __global__ void convt3d_kernel(float* y) {
  bool first = true;
  for (int i = 0; i < 2; ++i) {
    y[i] = 1.f;
    first = false;
  }
}
"""
    shaker = Shaker(text, Oracle("sm_90a", {(): ptx(text)}), lambda line: None)
    shaker.drop_unread()
    assert shaker.text.decode() == "".join(
        line for line in text.splitlines(True) if "first" not in line
    )


@needs_packages
def test_edits_that_change_the_ptx_are_refused() -> None:
    from convt3d.export.tidy.shaker import Shaker
    from convt3d.export.tidy.syntax import Edit

    shaker = Shaker(KERNEL, Oracle("sm_90a", {(): ptx(KERNEL)}), lambda line: None)
    places = [KERNEL.index("2.f"), KERNEL.index("a + 1"), KERNEL.index("4 * 8")]
    edits = [Edit(at, at + 1, b"7") for at in places]
    assert shaker.keep(edits) == 1
    assert "return 7 + 1;" in shaker.text.decode()
    assert "2.f * a" in shaker.text.decode()


@needs_packages
def test_alike_declarations_of_programs_stand_once(tmp_path: Path) -> None:
    other = KERNEL.replace("4 * 8", "5 * 8").replace("convt3d_kernel", "convt3d_other")
    made = tidy_text._shared([KERNEL, other], always={"Axis"})
    assert "float twice(" in made.common
    assert "struct Axis" in made.common
    assert "void store(" in made.common  # a template, which names no Config
    for text, rows, entry in zip(
        made.texts, ("4 * 8", "5 * 8"), ("convt3d_kernel", "convt3d_other"), strict=True
    ):
        assert rows in text
        assert entry in text
        assert "float twice(" not in text
        assert "struct Config" in text  # which is not alike
        assert entry in ptx(made.common + text)


def test_a_member_is_no_function_of_its_name() -> None:
    texts = {
        "run": "void run(Config c) { sweep<Config>(c); }",
        "sweep": "template <typename C>\nvoid sweep(C c) { Config d; }",
        "Config": "struct Config { static constexpr bool sweep = false; };",
    }
    made = ordered([Chunk(text, names_of(text)) for text in texts.values()])
    assert [c.names for c in made] == [("Config",), ("sweep",), ("run",)]


def test_a_header_is_introduced_once() -> None:
    text = "// Copies.\n//\n//   picture\n//\n"
    chunks = [Chunk(f"{text}/// {c}.\nint {c};", (c,)) for c in "ab"]
    chunks.append(Chunk("// Sums.\nint c;", ("c",)))
    introduce_once(chunks)
    assert [c.text for c in chunks] == [
        f"{text}/// a.\nint a;",
        "/// b.\nint b;",
        "// Sums.\nint c;",
    ]


def test_kernels_with_other_numbers_share_a_text() -> None:
    """The gradient by input of problem 61 is its forward kernel; a bias is for the latter alone."""
    layer = export.from_problem(REPOSITORY / "kernelbench" / "problems" / "kb61.py")
    variants = writer._variants(layer, "problem", ("sm_90a",), Gpu())
    both, weight = kernels._groups(variants)
    assert [v.operation for v in both] == ["forward", "grad_input"]
    program = kernels._program(both, open_bias=True)
    builds = [dict(build) for build in program.builds]
    numbers = [(b["CONVT3D_FORWARD"], b["CONVT3D_BIAS"]) for b in builds]
    assert numbers == [("1", "0"), ("1", "1"), ("0", "0")]
    assert all(dict(program.macros) | build == v.macros | build
               for build, v in zip(builds, [both[0], *both], strict=True))  # fmt: skip
    assert kernels._program(weight, open_bias=True).builds == ((),)


def test_missing_packages_are_named() -> None:
    with (
        mock.patch.object(tidy_text, "missing_packages", return_value=["pcpp"]),
        pytest.raises(ImportError, match=r"needs pcpp: pip install convt3d\[tidy\]"),
    ):
        tidy.tidied([])
