"""What a GPU is given of a compiled kernel: its instructions and constants, without names, line tables and notes.

A cubin is an ELF file. Two that differ only in what their sources call things, or in where these lie, hold the same
sections of code. The sections' meaning is NVIDIA's; what is read here is what `cuobjdump -elf` shows of them.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

NO_BITS = 8  # type of a section that takes room and holds nothing
REGISTERS, FRAME = 0x2F, 0x11  # attributes in `.nv.info`, of a symbol each
STACK = (0x387, 0x983)  # operations STL and LDL, which store to and load from the stack
BANK_4 = 0x01000000  # of an operand c[0x4][...], by which code finds the addresses of variables


class Section(NamedTuple):
    """One section; `data` is empty where it only takes room."""

    name: str
    flags: int
    size: int
    data: bytes


def sections(cubin: bytes) -> list[Section]:
    """All sections of a 64-bit ELF file. Raises ValueError where it is none."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"machine code must be a 64-bit ELF file, got one that begins with {cubin[:5]!r}")
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]  # name, type, flags, ...

    def name(at: int) -> str:
        begin = heads[names][4] + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    return [
        Section(name(at), flags, length, b"" if kind == NO_BITS else cubin[begin : begin + length])
        for at, kind, flags, _, begin, length in heads
    ]


@lru_cache(maxsize=1024)
def code_hash(cubin: bytes, kernel: str) -> str:
    """Hash of a kernel's instructions, of the constants they read, and of what a launch must provide: registers, stack,
    static shared memory, barriers. ValueError where the file holds no such kernel."""
    found = {section.name: section for section in sections(cubin)}
    text = found.get(f".text.{kernel}")
    if text is None:
        raise ValueError(f"kernel must be in the file, which has {', '.join(n for n in found if '.text' in n)}")
    shared = found.get(f".nv.shared.{kernel}")
    facts = [text.flags, text.size, shared.size if shared else 0, *_attributes(found, kernel)]
    digest = hashlib.sha256(struct.pack(f"<{len(facts)}Q", *facts) + without_slots(text.data))
    for bank in (2, 3):  # literals, and what is declared __constant__; bank 0 holds the arguments
        for name in (f".nv.constant{bank}", f".nv.constant{bank}.{kernel}"):
            digest.update(found[name].data if name in found else b"")
    called = sorted(without_slots(s.data) for n, s in found.items() if n.startswith(".text.") and n != text.name)
    if called and found.get(f".rela.text.{kernel}", text._replace(size=0)).size:  # functions that were not inlined
        digest.update(b"".join(called))
    if reads_variables(text.data):
        digest.update(b"".join(found[name].data for name in (".nv.global.init",) if name in found))
    return digest.hexdigest()


def without_slots(text: bytes) -> bytes:
    """Instructions without the places on the stack at which registers are spilled: ptxas deals these out otherwise from
    run to run, of one PTX with the same options, and changes nothing else."""
    masked = bytearray(text)
    for at in range(0, len(text) - 15, 16):
        if (text[at] | text[at + 1] << 8) & 0xFFF in STACK:
            masked[at + 5 : at + 8] = b"\0\0\0"  # bits 40 to 63: the offset
    return bytes(masked)


def reads_variables(text: bytes) -> bool:
    """Whether an instruction may read the address of a variable. Constants that the compiler has put into instructions
    are there as variables too, which nothing reads."""
    return any(word & 0xFFC000FF == BANK_4 for (word,) in struct.iter_unpack("<4xI8x", text))


def _attributes(found: dict[str, Section], kernel: str) -> list[int]:
    """Registers a thread and bytes of stack, from `.nv.info`, which names kernels by their place among the symbols."""
    info, at = found[".nv.info"].data if ".nv.info" in found else b"", 0
    facts = {REGISTERS: 0, FRAME: 0}
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value itself, not the size of what follows
            continue
        if attribute in facts and value == 8:
            symbol, fact = struct.unpack_from("<II", info, at)
            if _symbol(found, symbol) == kernel:
                facts[attribute] = fact
        at += value
    return list(facts.values())


def _symbol(found: dict[str, Section], index: int) -> str:
    (at,) = struct.unpack_from("<I", found[".symtab"].data, 24 * index)
    names = found[".strtab"].data
    return names[at : names.index(b"\0", at)].decode()
