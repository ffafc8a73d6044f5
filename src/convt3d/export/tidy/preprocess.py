"""The preprocessor's work on kernel text, done for given macros; comments stay."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

_OPTIONAL = re.compile(r"^#ifndef (\w+)\n#define \1\b", re.MULTILINE)
_KEPT = re.compile(r"^#define (CONVT3D_(?:DEVICE|CONSTEXPR)) (.*)\n", re.MULTILINE)
_STRINGS = re.compile(r'"(?:\\.|[^"\\\n])*"(?:[ \t]+"(?:\\.|[^"\\\n])*")+')
_BLANK = "//@blank"


def qualifiers(text: str) -> dict[str, str]:
    """Macros that only stand for qualifiers of functions: they stay, by their names."""
    return dict(_KEPT.findall(text))


def preprocess(text: str, macros: Mapping[str, str], architecture: int, choose: bool = True) -> str:
    """The text with macros expanded and conditions decided; without the qualifiers' definitions.

    Args:
        text: of kernels, headers inlined.
        macros: numbers and names of the plan.
        architecture: value of ``__CUDA_ARCH__``.
        choose: take what the last file chooses where a header lets its includers choose.
    """
    import pcpp

    # What a header lets its includers choose, to compile faster, the last of them chooses for
    # all, or none does.
    for name in set(_OPTIONAL.findall(text)):
        own = rf"(?<!#ifndef {name}\n)^#define {name}\b.*\n"
        found = re.findall(own, text, flags=re.MULTILINE)
        text = re.sub(rf"^#undef {name}\b.*\n", "", re.sub(own, "", text, flags=re.M), flags=re.M)
        if found and choose:
            text = found[-1] + text
    text = _KEPT.sub("", text)
    text = re.sub(r"^[ \t]*$", _BLANK, text, flags=re.MULTILINE)

    class Preprocessor(pcpp.Preprocessor):
        def on_comment(self, token: object) -> bool:
            return True

        def on_error(self, file: str, line: int, message: str) -> None:
            raise ValueError(f"{file}:{line}: {message}")

    run = Preprocessor()
    run.line_directive = None
    for name, value in macros.items():
        run.define(f"{name} {value}")
    run.define(f"__CUDA_ARCH__ {architecture}")
    run.parse(text, "kernels.cu")
    out = io.StringIO()
    run.write(out)
    # Directives leave blank lines, which are told from those of the text.
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    made = "\n".join("" if line == _BLANK else line for line in lines) + "\n"
    made = re.sub(r"(?<!^)" + re.escape(_BLANK), "", made)
    return re.sub(r"\n{3,}", "\n\n", _merged(made)).rstrip() + "\n"


def _merged(text: str) -> str:
    """The text with neighbouring strings of a line as one."""
    return _STRINGS.sub(lambda m: '"' + re.sub(r'"[ \t]+"', "", m.group(0)[1:-1]) + '"', text)
