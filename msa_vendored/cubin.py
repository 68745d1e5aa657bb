"""What a compiled kernel uses, read from its cubin and PTX with nothing but this file: no nvcc, no GPU.

A cubin is an ELF file. Register count and local memory stand in its ``.nv.info`` section, the number of barriers in
the kernel's own (sm_100) or in the flags of its ``.text`` section (sm_90). A spill is a register kept in local memory,
and so is an array that the compiler could not keep in registers; 0 bytes of local memory therefore means 0 bytes of
spills. Names and numbers of the attributes are those that ``cuobjdump -elf`` prints.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from msa_vendored.errors import MSAVendoredError

REGISTERS_PER_LANE = 512
"""Registers of one lane of a sub-partition: 65,536 of an SM over 4 sub-partitions of 32 lanes."""

_NAMED_TEXT = re.compile(rb"\.text\.(.+)")
_EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT, _EIATTR_NUM_BARRIERS = 0x11, 0x2F, 0x4C
_EIFMT_SVAL = 4
"""Format of an attribute whose value follows, its size in the two bytes before; in the others those are the value."""


class CubinError(MSAVendoredError, ValueError):
    """A cubin or PTX text is not what this reader knows."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of one kernel, as compiled.

    Attributes:
        kernel: symbol.
        registers: per thread, as allocated at launch.
        local_bytes: stack frame per thread: spills and arrays not kept in registers.
        barriers: named barriers, ``bar.sync 0`` included.
    """

    kernel: str
    registers: int
    local_bytes: int
    barriers: int


@dataclass(frozen=True, slots=True)
class Text:
    """What the PTX of one kernel says about its resources.

    Attributes:
        kernel: symbol.
        threads: threads of a CTA, the product of ``.reqntid`` or ``.maxntid``; None if neither is there.
        setmaxnreg: values of ``setmaxnreg``, sorted, each once.
        tmem_columns: sum over ``tcgen05.alloc``.
        static_shared_bytes: of ``.shared`` variables that are not ``extern``.
    """

    kernel: str
    threads: int | None
    setmaxnreg: tuple[int, ...]
    tmem_columns: int
    static_shared_bytes: int


def read_cubin(cubin: bytes) -> tuple[Footprint, ...]:
    """Footprints of the kernels in a cubin, in the order of their code.

    Raises:
        CubinError: not a 64-bit little-endian ELF file, or a kernel lacks its register count.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise CubinError("not a cubin", expected="a 64-bit little-endian ELF file", got=repr(cubin[:6]))
    sections = {name: (header, body) for name, header, body in _iter_sections(cubin)}
    symbols = _symbol_names(sections)
    counts: dict[int, dict[str, int]] = {_EIATTR_REGCOUNT: {}, _EIATTR_FRAME_SIZE: {}}
    for attribute, value in _iter_attributes(sections.get(b".nv.info", ((), b""))[1]):
        if attribute in counts:
            symbol, number = struct.unpack("<II", value)
            counts[attribute][symbols[symbol]] = number
    found = []
    for name, (header, _) in sections.items():
        if (match := _NAMED_TEXT.fullmatch(name)) is not None:
            kernel = match[1].decode()
            if kernel not in counts[_EIATTR_REGCOUNT]:
                raise CubinError("a kernel has no register count", where=kernel, expected="EIATTR_REGCOUNT")
            registers, frame = (counts[a].get(kernel, 0) for a in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE))
            own = dict(_iter_attributes(sections.get(b".nv.info." + match[1], ((), b""))[1]))
            barriers = max(header[2] >> 20 & 0x7F, own.get(_EIATTR_NUM_BARRIERS, b"\0")[0])
            found.append(Footprint(kernel, registers, frame, barriers))
    return tuple(found)


def _iter_sections(elf: bytes) -> Iterator[tuple[bytes, tuple[int, ...], bytes]]:
    """Name, header (name, type, flags, address, offset, size, link, info, alignment, entry size) and content."""
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * entry_size) for i in range(count)]
    names = elf[headers[names_index][4] :]
    for header in headers:
        name = names[header[0] : names.index(b"\0", header[0])]
        no_bits = header[1] == 8
        yield name, header, b"" if no_bits else elf[header[4] : header[4] + header[5]]


def _symbol_names(sections: dict[bytes, tuple[tuple[int, ...], bytes]]) -> list[str]:
    table, strings = sections[b".symtab"][1], sections[b".strtab"][1]
    starts = [entry[0] for entry in struct.iter_unpack("<IBBHQQ", table)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _iter_attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _EIFMT_SVAL:
            yield attribute, info[position : position + size]
            position += size
        else:
            yield attribute, size.to_bytes(2, "little")


_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_SETMAXNREG = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)")
_ALLOC = re.compile(r"tcgen05\.alloc\.[\w:.]+\s+\[[^\]]+\]\s*,\s*([%\w$]+)")
_SHARED = re.compile(r"^\s*\.shared\s+(?:\.align\s+\d+\s+)?\.([bfsu])(\d+)\s+[\w$]+(?:\[(\d+)\])?", re.MULTILINE)


def read_ptx(ptx: str) -> tuple[Text, ...]:
    """What each kernel of a PTX module states, in order. Static shared memory of the module counts for each.

    Raises:
        CubinError: the size of a ``tcgen05.alloc`` is not a constant.
    """
    starts = [match.start() for match in _ENTRY.finditer(ptx)]
    shared = sum(int(bits) // 8 * int(count or 1) for _, bits, count in _SHARED.findall(ptx))
    return tuple(
        _read_entry(ptx[start:end], shared) for start, end in zip(starts, [*starts[1:], len(ptx)], strict=True)
    )


def _read_entry(body: str, shared_bytes: int) -> Text:
    kernel = _ENTRY.match(body)[1]  # type: ignore[index]  # bodies are cut where it matches
    threads = None
    if (match := _THREADS.search(body)) is not None:
        x, y, z = (int(part or 1) for part in match.groups())
        threads = x * y * z
    values = sorted({int(value) for value in _SETMAXNREG.findall(body)})
    columns = sum(_constant(kernel, body, operand) for operand in _ALLOC.findall(body))
    return Text(kernel, threads, tuple(values), columns, shared_bytes)


def _constant(kernel: str, body: str, operand: str) -> int:
    if not operand.startswith("%"):
        return int(operand, 0)
    defined = re.findall(rf"mov\.[bu]32\s+{re.escape(operand)}\s*,\s*([%\w]+)", body)
    if len(defined) != 1 or defined[0].startswith("%"):
        raise CubinError(
            "the size of a tcgen05.alloc is not a constant", where=kernel, expected="a number", got=", ".join(defined)
        )
    return int(defined[0], 0)


def lane_registers(text: Text, footprint: Footprint, declared: tuple[int, ...] | None = None) -> int:
    """Registers of one lane of a sub-partition that the CTA holds at most: the sum over its warpgroups.

    Each warpgroup has one warp on each of the four sub-partitions. Without ``setmaxnreg`` each holds what it is
    launched with. With it, PTX says which values there are but not which warpgroup takes which.

    Args:
        text: of :func:`read_ptx`.
        footprint: of :func:`read_cubin`.
        declared: the kernel module's own list, one value a warpgroup. Without it every value is taken once and the
            largest by all other warpgroups: an upper bound.

    Raises:
        CubinError: the kernel does not fix its number of threads, or ``declared`` differs from the code.
    """
    if text.threads is None:
        raise CubinError("a kernel does not fix its number of threads", where=text.kernel, expected=".reqntid")
    warpgroups = -(-text.threads // 128)
    if not text.setmaxnreg:
        return footprint.registers * warpgroups
    if declared is None:
        rest = warpgroups - len(text.setmaxnreg)
        return sum(text.setmaxnreg) + max(rest, 0) * text.setmaxnreg[-1]
    if set(declared) != set(text.setmaxnreg) or len(declared) != warpgroups:
        raise CubinError(
            "the registers that the module declares are not those in the code",
            where=text.kernel,
            expected=f"{warpgroups} values out of {text.setmaxnreg}",
            got=str(declared),
        )
    return sum(declared)
