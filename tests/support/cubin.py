"""Reads what a cubin says about its kernels: code, registers, stack, shared memory, instructions.

A cubin is an ELF file of 64 bits. The code of a kernel is the section ``.text.<entry>``; the
sections ``.nv.info`` have its resources as a list of attributes. Every instruction of the supported
architectures (8.0 to 9.0) has 16 bytes, and the lowest 12 bits are its operation and the kinds of
its operands.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
OPCODES: dict[str, tuple[int, ...]] = {
    "hgmma": (0x9F0, 0xDF0),  # A in shared memory, A in registers
    "hmma": (0x23C,),
    "ldgsts": (0xFAE,),
    "utmaldg": (0x5B4,),
    "ublkcp": (0x3BA,),
}
"""The lowest 12 bits of the instructions that are counted, as nvdisasm names them."""

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4  # format of an attribute whose payload follows its header
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes whose payload is the number of a symbol and a value


@dataclass(frozen=True)
class Section:
    """A section of an ELF file; ``data`` is empty where the file holds none."""

    name: str
    size: int
    data: bytes


@dataclass(frozen=True)
class Kernel:
    """One entry point. ``stack`` and ``shared`` are in bytes, of a thread and of a CTA."""

    code: str
    registers: int
    stack: int
    shared: int
    instructions: int
    counts: dict[str, int]


def sections(cubin: bytes) -> list[Section]:
    """The sections of an ELF file, in order."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF file of 64 bits")
    *_, offset, _, _, _, _, size, count, names_at = _HEADER.unpack_from(cubin)
    headers = [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]
    names = cubin[headers[names_at][4] :]
    found = []
    for name, kind, _, _, at, length, *_ in headers:
        data = b"" if kind in (0, 8) else cubin[at : at + length]  # no section; zeros, not stored
        found.append(Section(_text(names, name), length, data))
    return found


def kernels(cubin: bytes) -> dict[str, Kernel]:
    """The entry points of a cubin by name.

    The hash of a kernel's code covers its instructions, its relocations without the names of what
    they refer to, functions that are called, and tables in constant memory. It does not cover the
    bank of addresses (``.nv.constant4``) nor the variables those point at: the compiler puts all
    static members there, in an order that depends on their names, and no instruction reads them.
    """
    found = sections(cubin)
    by_name = {section.name: section for section in found}
    names = [s.name.removeprefix(".nv.info.") for s in found if s.name.startswith(".nv.info.")]
    entries = [name for name in names if f".nv.constant0.{name}" in by_name]
    texts = {s.name: s for s in found if s.name.startswith(".text.")}
    called = sorted(
        _code(by_name, s.name)
        for s in texts.values()
        if s.name.removeprefix(".text.") not in entries
    )
    attributes = dict(_attributes(by_name))
    result = {}
    for entry in sorted(entries):
        text = texts[f".text.{entry}"].data
        digest = hashlib.sha256(_code(by_name, f".text.{entry}"))
        for part in called:
            digest.update(part)
        for bank in (1, 2, 3):
            for name in (f".nv.constant{bank}", f".nv.constant{bank}.{entry}"):
                digest.update(by_name[name].data if name in by_name else b"")
        opcodes = Counter(word & 0xFFF for word, _ in struct.iter_unpack("<QQ", text))
        shared = by_name.get(f".nv.shared.{entry}")
        result[entry] = Kernel(
            code=digest.hexdigest()[:16],
            registers=attributes[entry, _REGISTERS],
            stack=attributes[entry, _FRAME],
            shared=shared.size if shared else 0,
            instructions=len(text) // INSTRUCTION_BYTES,
            counts={name: sum(opcodes[code] for code in codes) for name, codes in OPCODES.items()},
        )
    return result


def _code(by_name: dict[str, Section], name: str) -> bytes:
    """Instructions of a section and its relocations: where, of which kind, with which offset."""
    relocations = by_name[f".rela{name}"].data if f".rela{name}" in by_name else b""
    kinds = b"".join(
        struct.pack("<QIq", at, info & 0xFFFFFFFF, offset)
        for at, info, offset in _RELOCATION.iter_unpack(relocations)
    )
    return by_name[name].data + kinds


def _attributes(by_name: dict[str, Section]) -> Iterator[tuple[tuple[str, int], int]]:
    """Values of (entry, attribute) from the section about all kernels."""
    symbols = [row[0] for row in _SYMBOL.iter_unpack(by_name[".symtab"].data)]
    names, info = by_name[".strtab"].data, by_name[".nv.info"].data
    at = 0
    while at < len(info):
        kind, attribute, size = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        if kind == _SIZED:
            if attribute in (_REGISTERS, _FRAME):
                symbol, value = struct.unpack_from("<II", info, at)
                yield (_text(names, symbols[symbol]), attribute), value
            at += size


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
