"""The package's kernel text, arranged for one file that holds several kernels.

Headers that no macro of a plan reaches are written once (``COMMON``). The rest of a kernel is
written once per set of files and becomes a kernel, or several, when its macros are defined.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convt3d.cuda.compiler import KERNEL_DIRECTORY, flatten, headers, kernel_files, name_of
from convt3d.export.tidy import NAMESPACE, Program, tidied
from convt3d.export.variants import Variant

_INCLUDE = re.compile(r'^#include "[^"]+"\n', re.MULTILINE)
_BIAS = "CONVT3D_BIAS"
_CONDITION = re.compile(r"^#(?:el)?if .*\n", re.MULTILINE)
_TOP_COMMENT = re.compile(r"(?://.*\n)+")


@dataclass(frozen=True)
class Section:
    """The text of some kernel files without the common headers."""

    name: str
    files: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class KernelText:
    """All kernel text of an exported file.

    ``numbers`` are the macros that make a section's text the kernels of a variant; ``of`` names
    the section of each variant.
    """

    common: str
    sections: tuple[Section, ...]
    of: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, str]]


def arrange(variants: Sequence[Variant]) -> KernelText:
    """The files of variants as they are: variants of the same files share a section."""
    macros = {name for v in variants for name in v.macros}
    sets = list(dict.fromkeys(v.files for v in variants))
    every = sorted([*headers(), *kernel_files()])
    dependent = [name for name in every if not macros.isdisjoint(_words(name))]
    # An override that holds nothing but a file's own includes drops its text and keeps theirs.
    only_includes = {name: "".join(_includes(name)) for name in dependent}
    roots = dict.fromkeys(name for files in sets for name in files)
    common = flatten("all", only_includes | {"all": _include(roots)})
    dropped = dict.fromkeys((name for name in every if name not in dependent), "")
    sections = tuple(
        Section(_section_name(files), files, flatten("all", dropped | {"all": _include(files)}))
        for files in sets
    )
    if len({section.name for section in sections}) < len(sections):
        raise AssertionError(f"sections of {sets} share a name")
    names = {section.files: section.name for section in sections}
    return KernelText(
        common,
        sections,
        {v.name: names[v.files] for v in variants},
        {v.name: v.macros for v in variants},
    )


def tidy(variants: Sequence[Variant], open_bias: bool) -> KernelText:
    """What variants need of their files (:mod:`convt3d.export.tidy`).

    A section for those that run the same files, in which the numbers stay open that are not the
    same in them.

    Args:
        variants: with the GPU's architecture that each runs on in its ``target``.
        open_bias: leave the macro that gives the forward pass a bias.
    """
    groups = _groups(variants)
    programs = [_program(group, open_bias) for group in groups]
    made = tidied(programs, always=["TensorMap"])  # which the launcher names
    sections = []
    of: dict[str, str] = {}
    numbers: dict[str, Mapping[str, str]] = {}
    for group, program, text in zip(groups, programs, made.texts, strict=True):
        first = group[0]
        intro = "" if first.operation == "forward" else top_comment(program.files[-1]) + "\n"
        entries = "".join(f"using {NAMESPACE}::{entry};\n" for entry in first.entries)
        before = [variant.operation for variant in group[:-1]]
        section = "_and_".join([*before, group[-1].name]).upper()
        sections.append(Section(section, program.files, intro + text + entries))
        for variant in group:
            of[variant.name] = section
            left = {name for name, _ in program.builds[0]}
            if variant.operation == "forward":
                left -= {_BIAS}  # which the file sets
            numbers[variant.name] = {k: v for k, v in variant.macros.items() if k in left}
    return KernelText(made.common, tuple(sections), of, numbers)


def _groups(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants that run the same kernels with other numbers, none of which chooses text."""
    groups: dict[object, list[Variant]] = {}
    for v in variants:
        conditions = "".join(_CONDITION.findall("".join(map(flatten, v.files))))
        choosing = set(re.findall(r"\w+", conditions))
        choices = frozenset((k, n) for k, n in v.macros.items() if k in choosing)
        key = (v.files, v.entries, v.target, v.arithmetic, frozenset(v.macros), choices)
        groups.setdefault(key, []).append(v)
    return list(groups.values())


def _program(group: Sequence[Variant], open_bias: bool) -> Program:
    """The kernels of a group; numbers that are not the same in all of its variants stay open."""
    first = group[0].macros
    left = {name for name in first if len({v.macros[name] for v in group}) > 1}
    if open_bias and any(v.operation == "forward" for v in group):
        left |= {_BIAS}
    builds = []
    for variant in group:
        either = _BIAS in left and variant.operation == "forward"
        for bias in ("0", "1") if either else (variant.macros.get(_BIAS, "0"),):
            numbers = {**variant.macros, _BIAS: bias}
            builds.append(tuple((name, numbers[name]) for name in sorted(left)))
    macros = tuple(item for item in first.items() if item[0] not in left)
    return Program(group[0].files, macros, tuple(builds), group[0].target)


def top_comment(file: str) -> str:
    """The comment that opens a kernel file: what it computes, its picture and its pipeline."""
    match = _TOP_COMMENT.match((KERNEL_DIRECTORY / file).read_text())
    return match.group(0) if match else ""


def _section_name(files: Sequence[str]) -> str:
    """After the file that comes last, which is the product's."""
    return name_of(files[-1]).upper()


def _include(names: Sequence[str] | dict[str, None]) -> str:
    return "".join(f'#include "{name}"\n' for name in names)


def _includes(name: str) -> list[str]:
    return _INCLUDE.findall((KERNEL_DIRECTORY / name).read_text())


@functools.cache
def _words(name: str) -> frozenset[str]:
    """All names and numbers in a kernel file and what it includes."""
    return frozenset(re.findall(r"\w+", flatten(name)))
