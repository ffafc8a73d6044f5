"""What decides whether an edit is kept: the PTX that NVRTC makes of the text. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_VARIABLE = re.compile(r"([A-Za-z_$][\w$]*)(?:\[\d*\])*\s*[=;]")
_SYMBOL = re.compile(r"\b_Z\w+|\b_INTERNAL\w+")
_ERROR_LINE = re.compile(r"^kernels\.cu\((\d+)\): error", re.MULTILINE)
_UNREFERENCED = r'^kernels\.cu\((\d+)\): warning #177-D: variable "(\w+)"'
_UNREAD = r'^kernels\.cu\((\d+)\): warning #550-D: variable "(\w+)"'
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_VERSION = re.compile(r"^(?://.*|\.version.*|\.target.*|\.address_size.*|)\n", re.MULTILINE)


class CompileError(RuntimeError):
    """NVRTC refused a text; the message is its log."""


def compile_ptx(
    text: str, target: str, macros: Sequence[tuple[str, str]] = (), *options: str
) -> tuple[str, str]:
    """The PTX of a text for an architecture such as ``"sm_90a"``, and the compiler's log.

    Raises:
        CompileError: the compiler refused the text.
        ImportError: there is no NVRTC.
    """
    from cuda.bindings import nvrtc

    flags = [f"--gpu-architecture={target.replace('sm_', 'compute_')}", "--std=c++17", *options]
    flags += [f"-D{name}={value}" for name, value in macros]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.rstrip(b"\0").decode()
        if int(status):
            raise CompileError(said)
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(size)
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.rstrip(b"\0").decode(), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def error_lines(error: CompileError) -> list[int]:
    """The lines that the compiler complains of."""
    return [int(line) for line in _ERROR_LINE.findall(str(error))]


def entries(ptx: str) -> dict[str, str]:
    """The PTX of each entry point, with what it refers to, in names of its own.

    Two programs whose entries are equal here are the same machine code: mangled names, which
    depend on namespaces, and the entry's own name are replaced by the order of their appearance.
    """
    ptx = _VERSION.sub("", ptx)
    starts = list(_ENTRY.finditer(ptx))
    found = {}
    head = ptx[: starts[0].start()] if starts else ""
    for i, match in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(ptx)
        body = ptx[match.start() : end]
        # Tables and functions stand before the entries, between them, or after the last one.
        close = _end(body)
        body, rest = body[:close], body[close:]
        head += rest
        found[match.group(1)] = body
    statements = _declared(head)
    return {name: _canonical(name, body, statements) for name, body in found.items()}


def _end(body: str) -> int:
    """Where an entry ends: at the first closing brace that stands alone, outside of assembly."""
    for match in re.finditer(r"^}\n", body, re.MULTILINE):
        before = body[: match.start()]
        if before.count("// begin inline asm") == before.count("// end inline asm"):
            return match.end()
    return len(body)


def _declared(head: str) -> dict[str, str]:
    """Declarations of a module by the symbol they declare."""
    declared = {}
    for statement in re.split(r"(?<=;)\n|(?<=^})\n", head, flags=re.MULTILINE):
        match = _SYMBOL.search(statement) or _VARIABLE.search(statement)
        if match:
            declared[match.group(match.lastindex or 0)] = statement.strip()
    return declared


def _canonical(name: str, body: str, declared: dict[str, str]) -> str:
    body = re.sub(rf"\b{name}(?=\b|_param)", "ENTRY", body)
    body = re.sub(r"\$L__BB\d+_", "$L__BB_", body)  # numbered by functions of the module
    used: dict[str, str] = {}
    pending = [body]
    while pending:
        for word in _WORD.findall(pending.pop(0)):
            if word not in used and (word in declared or _SYMBOL.fullmatch(word)):
                used[word] = f"SYMBOL{len(used)}"
                if word in declared:
                    pending.append(declared[word])
    text = "\n".join([*(declared[s] for s in used if s in declared), body])
    return _WORD.sub(lambda m: used.get(m.group(0), m.group(0)), text)


Macros = tuple[tuple[str, str], ...]


@dataclass
class Oracle:
    """Tells whether a text still compiles to the PTX that it is to have.

    Attributes:
        target: an architecture such as ``"sm_90a"``.
        want: the entries of each build, by the macros that the text leaves open.
        compiled: how many programs were compiled.
        hasty: look at the last build alone.
    """

    target: str
    want: Mapping[Macros, dict[str, str]]
    compiled: int = 0
    hasty: bool = False
    _known: dict[tuple[str, bool], bool] = field(default_factory=dict)

    def accepts(self, text: str) -> bool:
        """Whether the text gives the very entries that are wanted, in every build."""
        key = (text, self.hasty)
        if key not in self._known:
            builds = list(self.want)[-1:] if self.hasty else self.want
            self._known[key] = all(self._same(text, macros) for macros in builds)
        return self._known[key]

    def _same(self, text: str, macros: Macros) -> bool:
        self.compiled += 1
        try:
            return entries(compile_ptx(text, self.target, macros)[0]) == self.want[macros]
        except CompileError:
            return False

    def unreferenced(self, text: str) -> set[tuple[int, str]]:
        """Lines and names of variables that no build refers to, as the compiler warns."""
        return self._warned(text, _UNREFERENCED)

    def unread(self, text: str) -> set[tuple[int, str]]:
        """Lines and names of variables that are set and that no build reads."""
        return self._warned(text, _UNREAD)

    def _warned(self, text: str, pattern: str) -> set[tuple[int, str]]:
        self.compiled += len(self.want)
        logs = [compile_ptx(text, self.target, macros)[1] for macros in self.want]
        found = [re.findall(pattern, log, re.MULTILINE) for log in logs]
        return set.intersection(*({(int(line), name) for line, name in one} for one in found))

    def ptx(self, text: str) -> list[str]:
        """The PTX of every build.

        Raises:
            CompileError: one of them is refused.
        """
        self.compiled += len(self.want)
        return [compile_ptx(text, self.target, macros)[0] for macros in self.want]
