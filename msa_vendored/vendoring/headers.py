"""Patch headers: DEP-3 fields, and four of our own: ``Kind``, ``Drop-When``, ``Test``, ``Fails-With``.

One field a line, ``Name: value``; a line that starts with a blank continues the value, and `` .`` stands for an
empty line in it. Names are spelt exactly as here; unknown, missing and repeated fields are errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import PurePosixPath
from typing import Literal, cast, get_args

from msa_vendored.vendoring.errors import PatchError

PatchKind = Literal["numerical", "build"]
"""``numerical``: changes how results are computed; ``build``: changes only whether and where kernels build."""

MAX_SUBJECT_CHARS = 72

_REQUIRED = (
    "Description",
    "Author",
    "Origin",
    "Forwarded",
    "Last-Update",
    "Kind",
    "Drop-When",
    "Test",
    "Fails-With",
)
_OPTIONAL = ("Bug", "Applied-Upstream")
_FIELD_LINE = re.compile(r"([!-9;-~]+):(?: (.*))?")
_FORMS = {
    "Origin": (
        r"(upstream|backport|vendor|other)(, .+)?|https?://\S+",
        "upstream, backport, vendor or other, or a URL",
    ),
    "Forwarded": (r"no|not-needed|https?://\S+", "no, not-needed or a URL"),
    "Kind": ("|".join(get_args(PatchKind)), " or ".join(get_args(PatchKind))),
    "Test": (r"(?!/)[\w./-]+\.py(::[^:\s]+)+", "a pytest node id, FILE.py::NAME"),
    "Bug": (r"https?://\S+", "a URL"),
}


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """What a patch says about itself.

    Attributes:
        description: a subject of at most 72 characters, then on the following lines why the patch is needed.
        author: who wrote it.
        origin: where the change comes from: ``upstream``, ``backport``, ``vendor`` or ``other``, a comma and details.
        forwarded: ``no``, ``not-needed`` or the URL where upstream was told.
        last_update: day of the last change.
        kind: ``numerical`` or ``build``.
        drop_when: how to see that upstream no longer needs it.
        test: pytest node id of the test that fails without it.
        fails_with: text in the output of that failing test.
        bug: URL of upstream's report.
        applied_upstream: version or commit of upstream that has it.
    """

    description: str
    author: str
    origin: str
    forwarded: str
    last_update: date
    kind: PatchKind
    drop_when: str
    test: str
    fails_with: str
    bug: str | None = None
    applied_upstream: str | None = None

    @property
    def subject(self) -> str:
        """The first line of the description."""
        return self.description.partition("\n")[0]


def parse_header(text: bytes, where: str) -> PatchHeader:
    """Read the text above a patch's first diff; empty lines at its end do not count.

    Raises:
        PatchError: with all problems of the header, each naming its field or line; ``where`` names the patch.
    """
    problems: list[str] = []
    fields = _read_fields(_decode(text, where), problems)
    problems += [f"missing field {name}" for name in _REQUIRED if name not in fields]
    for name, value in fields.items():
        problems += [f"field {name}: {fault}" for fault in _find_faults(name, value)]
    if problems:
        raise PatchError(
            "the patch header is refused",
            where=where,
            expected=f"fields {', '.join(_REQUIRED)}; optional {', '.join(_OPTIONAL)}",
            got="; ".join(problems),
            next_command=f"edit the lines above the diff in {where}",
        )
    return PatchHeader(
        description=fields["Description"],
        author=fields["Author"],
        origin=fields["Origin"],
        forwarded=fields["Forwarded"],
        last_update=date.fromisoformat(fields["Last-Update"]),
        kind=cast("PatchKind", fields["Kind"]),
        drop_when=fields["Drop-When"],
        test=fields["Test"],
        fails_with=fields["Fails-With"],
        bug=fields.get("Bug"),
        applied_upstream=fields.get("Applied-Upstream"),
    )


def dump_header(header: PatchHeader) -> bytes:
    """The header as text, without the empty line that may stand between it and the diff.

    Raises:
        PatchError: :func:`parse_header` would refuse it or read something else.
    """
    values = {
        "Description": header.description,
        "Author": header.author,
        "Origin": header.origin,
        "Forwarded": header.forwarded,
        "Applied-Upstream": header.applied_upstream,
        "Bug": header.bug,
        "Last-Update": header.last_update.isoformat(),
        "Kind": header.kind,
        "Drop-When": header.drop_when,
        "Test": header.test,
        "Fails-With": header.fails_with,
    }
    text = "".join(_format_field(name, value) for name, value in values.items() if value is not None).encode()
    if parse_header(text, header.subject) != header:
        raise PatchError(
            "the patch header cannot be written so that it is read back equal",
            where=header.subject,
            expected=repr(header),
            got=repr(parse_header(text, header.subject)),
            next_command="remove blanks at the start and end of its values",
        )
    return text


def _format_field(name: str, value: str) -> str:
    first, *rest = value.split("\n")
    return "".join([f"{name}: {first}\n", *(f" {line or '.'}\n" for line in rest)])


def _decode(text: bytes, where: str) -> str:
    if b"\r" in text:
        raise PatchError(
            "the patch itself was converted to CRLF: its header contains CR",
            where=_point_at(text, text.index(b"\r"), where),
            next_command=f"rm {where} && git -c core.autocrlf=false checkout -- {where}",
        )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise PatchError(
            "the patch header is not UTF-8",
            where=_point_at(text, error.start, where),
            got=f"byte 0x{text[error.start]:02x}",
            next_command=f"write the header of {where} in UTF-8",
        ) from error


def _point_at(text: bytes, position: int, where: str) -> str:
    number = text.count(b"\n", 0, position) + 1
    return f"{where}:{number}"


def _read_fields(text: str, problems: list[str]) -> dict[str, str]:
    """Fields by name, in order; what cannot be one is added to ``problems``."""
    fields: dict[str, list[str]] = {}
    current: list[str] | None = None
    text = text.rstrip("\n")
    for number, line in enumerate(text.split("\n") if text else (), 1):
        match = _FIELD_LINE.fullmatch(line)
        if line != line.rstrip():
            problems.append(f"line {number}: blanks at the end")
        elif line.startswith(" ") and current is not None:
            current.append("" if line == " ." else line[1:])
        elif match is None:
            problems.append(f"line {number}: {line!r} is neither 'Name: value' nor indented by one blank")
        else:
            name, current = match[1], [match[2] or ""]
            if name not in _REQUIRED + _OPTIONAL:
                problems.append(f"line {number}: unknown field {name}")
            elif name in fields:
                problems.append(f"line {number}: field {name} a second time")
            else:
                fields[name] = current
    return {name: "\n".join(lines) for name, lines in fields.items()}


def _find_faults(name: str, value: str) -> list[str]:
    """What is wrong with the value of a known field."""
    lines = value.split("\n")
    if not lines[0] or not lines[-1]:
        return ["empty, or starts or ends with an empty line"]
    if lines[0] != lines[0].lstrip():
        return ["more than one blank before the value"]
    if name == "Description":
        subject = [f"subject of {len(lines[0])} characters, at most {MAX_SUBJECT_CHARS}"]
        return subject * (len(lines[0]) > MAX_SUBJECT_CHARS) + ["no line says why"] * (len(lines) == 1)
    if name == "Last-Update":
        return [] if _is_iso_date(value) else [f"expected YYYY-MM-DD, got {value!r}"]
    if name in _FORMS and not re.fullmatch(_FORMS[name][0], value):
        return [f"expected {_FORMS[name][1]}, got {value!r}"]
    if name == "Test" and ".." in PurePosixPath(value.partition("::")[0]).parts:
        return [f"expected a path without '..', got {value!r}"]
    return []


def _is_iso_date(value: str) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False
