"""The package's kernel text, arranged for one file that holds several kernels.

Headers that no macro of a plan reaches are written once (``COMMON``). The rest of a kernel is
written once per set of files and becomes a kernel, or several, when its macros are defined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from convt3d.cuda.compiler import KERNEL_DIRECTORY, flatten, headers, kernel_files, name_of

_INCLUDE = re.compile(r'^#include "[^"]+"\n', re.MULTILINE)
_TOP_COMMENT = re.compile(r"(?://.*\n)+")


@dataclass(frozen=True)
class Section:
    """The text of some kernel files without the common headers."""

    name: str
    files: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class KernelText:
    """All kernel text of an exported file."""

    common: str
    sections: tuple[Section, ...]

    def section_of(self, files: Sequence[str]) -> Section:
        return next(s for s in self.sections if s.files == tuple(files))


def arrange(file_sets: Sequence[Sequence[str]], macros: set[str]) -> KernelText:
    """Kernel text for these sets of files; each set shares its macros.

    Args:
        file_sets: files that run together, such as ``("phases/pack.cu", "phases/kernel.cu")``.
        macros: every macro that any plan sets.
    """
    sets = list(dict.fromkeys(tuple(files) for files in file_sets))
    every = sorted([*headers(), *kernel_files()])
    dependent = [name for name in every if _mentions(flatten(name), macros)]
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
    return KernelText(common, sections)


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


def _mentions(text: str, macros: set[str]) -> bool:
    return not macros.isdisjoint(re.findall(r"\w+", text))
