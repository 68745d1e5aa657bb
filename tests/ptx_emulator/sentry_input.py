"""Makes SentryWard's ``input.json`` for one launch of a kernel, as the kernel's host code asked for it.

The format (``spverify.kernel-input/v1``, SentryWard 0.1.1) is not documented in the wheel. It was found from the
verifier's error messages:

- ``launch``: grid, block, dynamic shared memory.
- ``declarations``: every field of the parameter block that the PTX reads, by parameter and offset, with a name and a
  type; pointers name the object that they point to. ``arguments``: the values of the other fields.
- ``tma_descriptors``: parameters that are tensor maps.
- ``shape_arrays``: contents of small integer tensors, which may decide branches; the kernel must not write them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptx_emulator.ptx import SIZES, Entry, Parameter
from ptx_emulator.report import NamedTensor
from ptx_emulator.subjects import Launch
from ptx_emulator.tensor_map import decode_tensor_map

SCHEMA = "spverify.kernel-input/v1"
TENSOR_MAP_BYTES = 128
MAP_FORMATS = {0: "u8", 3: "s32", 6: "f16", 7: "f32", 10: "bf16"}
_LOAD = re.compile(r"\bld\.param(?:\.v(\d))?\.(\w+)\s+[^\[]*\[([\w$]+)(?:\+(\d+))?\]")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the parameter block that the kernel reads."""

    parameter: Parameter
    offset: int
    size: int

    @property
    def name(self) -> str:
        """Unique in the kernel."""
        return f"{self.parameter.name}_at_{self.offset}"


def find_fields(entry: Entry) -> list[Field]:
    """The fields that ``ld.param`` instructions read, each once, in order."""
    parameters = {parameter.name: parameter for parameter in entry.parameters}
    fields = {}
    for statement in entry.statements:
        for count, kind, name, offset in _LOAD.findall(statement.text):
            for i in range(int(count or 1)):
                field = Field(parameters[name], int(offset or 0) + i * SIZES[kind], SIZES[kind])
                fields[field.name] = field
    return sorted(fields.values(), key=lambda field: (field.parameter.offset_bytes, field.offset))


def find_tensor_maps(entry: Entry) -> list[Parameter]:
    """Parameters of 128 bytes whose address the kernel takes: tensor maps."""
    text = "\n".join(statement.text for statement in entry.statements)
    return [
        parameter
        for parameter in entry.parameters
        if parameter.size_bytes == TENSOR_MAP_BYTES
        and re.search(rf"\bmov\.[bu]64\s+\S+\s+{re.escape(parameter.name)}\b", text)
    ]


def find_types(ptx: str, entry: Entry) -> dict[str, str]:
    """PTX types of the kernel's parameters, as the text declares them."""
    start = re.search(rf"\.entry\s+{re.escape(entry.name)}\s*\(", ptx)
    header = ptx[start.end() : ptx.index("{", start.end())] if start else ""
    declared = r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:[^,)]*\s)?([\w$]+)(?:\[\d+\])?\s*[,)]"
    return {name: kind for kind, name in re.findall(declared, header)}


def delete_statement(ptx: str, line: int, text: str) -> str:
    """The PTX without one statement; a wait on an mbarrier becomes a predicate that is true.

    Args:
        ptx: the module.
        line: on which the statement begins, from 1.
        text: the statement, white space apart.

    Raises:
        ValueError: it does not stand there.
    """
    at = sum(len(row) + 1 for row in ptx.split("\n")[: line - 1])
    pattern = r"\s*".join(re.escape(part) for part in re.findall(r"\w+|\W", text) if not part.isspace()) + r"\s*;"
    found = re.compile(pattern).search(ptx, at)
    if found is None or ptx.count("\n", at, found.start()) > 1:
        raise ValueError(f"line {line}: {text!r} expected")
    wait = re.match(r"(@!?\S+\s+)?mbarrier\.(?:try|test)_wait\S*\s+([^\s,]+)", text)
    instead = f"{wait.group(1) or ''}setp.eq.u32 {wait.group(2)}, 0, 0;" if wait else ""
    return ptx[: found.start()] + instead + ptx[found.end() :]


def replace_reductions(ptx: str) -> str:
    """The PTX with stores in place of reductions to global memory, which the verifier does not take.

    A store conflicts with more than a reduction does, so that this can only make it reject more.
    """
    pattern = r"\bred\.(?:\w+\.)*?global\.(?:\w+\.)*?add\.(?:noftz\.)?(v[24]\.)?(f32|[su]32|[su]64|bf16x2|f16x2)\b"
    return re.sub(pattern, lambda m: f"st.global.{m.group(1) or ''}b{64 if '64' in m.group(2) else 32}", ptx)


def find_object(address: int, tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, int] | None:
    """The tensor that holds an address, and the offset in it."""
    for tensor in tensors:
        if tensor.base <= address < tensor.base + max(1, tensor.size_bytes):
            return tensor, address - tensor.base
    return None


def build_input(ptx: str, entry: Entry, launch: Launch, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of ``input.json``.

    Args:
        ptx: the module that the kernel is in.
        entry: of the kernel.
        launch: as recorded.
        settings: further top-level fields, such as ``assumptions``.

    Raises:
        ValueError: a tensor map starts outside all tensors.
    """
    values = dict(zip((p.name for p in entry.parameters), launch.values, strict=True))
    maps = find_tensor_maps(entry)
    config: dict[str, Any] = {
        "schema": SCHEMA,
        "entry": entry.name,
        "launch": {
            "grid_dim": list(launch.grid),
            "block_dim": list(launch.block),
            "dynamic_shared_bytes": launch.dynamic_shared_bytes,
        },
        "declarations": [],
        "arguments": [],
        "tma_descriptors": [_descriptor(p, values[p.name], launch.tensors) for p in maps],
        "shape_arrays": [],
        **settings,
    }
    types = find_types(ptx, entry)
    for field in find_fields(entry):
        if field.parameter not in maps:
            data = values[field.parameter.name][field.offset : field.offset + field.size]
            _declare(config, field, data, types[field.parameter.name], launch)
    return config


def _declare(config: dict[str, Any], field: Field, data: bytes, parameter_type: str, launch: Launch) -> None:
    """Add one field of the parameter block: a pointer to the start of a tensor, or a number."""
    place = {"parameter": field.parameter.name, "offset": field.offset}
    found = find_object(int.from_bytes(data, "little"), launch.tensors) if field.size == 8 else None
    if found is not None and found[1] == 0:
        name = found[0].name
        config["declarations"].append(
            {**place, "name": field.name, "type": "pointer", "space": "global", "object": name}
        )
        if name in launch.integers:
            words = [value & 0xFFFFFFFF for value in launch.integers[name]]
            config["shape_arrays"].append({**place, "element_type": "u32", "shapes": [words]})
        return
    scalar = field.size == field.parameter.size_bytes == SIZES[parameter_type]
    kind = parameter_type.replace("b", "u") if scalar else f"u{8 * field.size}"
    config["declarations"].append({**place, "name": field.name, "type": kind})
    config["arguments"].append({"field": field.name, "value": _number(kind, data)})


def _number(kind: str, data: bytes) -> int | float:
    if kind == "f32":
        return float(struct.unpack("<f", data)[0])
    return int.from_bytes(data, "little", signed=kind.startswith("s"))


def _descriptor(parameter: Parameter, data: bytes, tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    decoded = decode_tensor_map(data)
    found = find_object(decoded.base, tensors)
    if found is None:
        raise ValueError(f"{parameter.name}: its base is in no tensor of the launch")
    tensor, offset = found
    rank = len(decoded.sizes)
    return {
        "parameter": parameter.name,
        "object": tensor.name,
        "element_type": MAP_FORMATS[decoded.format],
        "rank": rank,
        "global_shape": list(decoded.sizes),
        "global_strides_bytes": list(decoded.strides_bytes),
        "box_shape": list(decoded.box),
        "element_strides": [1] * rank,
        "swizzle": f"{decoded.swizzle_bytes}B" if decoded.swizzle_bytes else "none",
        "interleave": "none",
        "oob_fill": "zero",
        "base_byte_offset": offset,
    }
