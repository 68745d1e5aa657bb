"""What a run returns: launches with their counts, and findings that name both sides and the place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ptx_emulator.bindings import RawFinding
from ptx_emulator.program import SHARED_BASE, Program

SHARED, GLOBAL, TMEM = 1, 2, 3
AGENTS = (
    "warp {}",
    "tensor pipe of warp {}",
    "asynchronous load of warp {}",
    "asynchronous store of warp {}",
    "wgmma of warp {}",
)


@dataclass(frozen=True, slots=True)
class Place:
    """One instruction: its line in the PTX, its text, and the line of its source if the PTX has ``.loc``."""

    line: int
    text: str
    source: str | None

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line}: {self.text[:110]}{source}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with how often it was seen.

    Attributes:
        kind: ``shared-race``, ``missing-proxy-fence``, ... (docs/emulator.md lists them all).
        text: what happened, in words.
        place: the instruction at which it was noticed; None if there is none.
        agent: who executed it.
        other_place: the earlier instruction that it conflicts with.
        other_agent: who executed that.
        address: in coordinates of the tensor, of shared memory or of tensor memory; empty if there is none.
        kernel: entry name.
        cta: linear index of the CTA.
        count: occurrences at these two places in the launch.
        fatal: the launch ended here.
    """

    kind: str
    text: str
    place: Place | None
    agent: str | None
    other_place: Place | None
    other_agent: str | None
    address: str
    kernel: str
    cta: int
    count: int
    fatal: bool

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.text}"]
        if self.address:
            lines.append(f"  address:  {self.address}")
        if self.place or self.agent:
            lines.append(f"  here:     {self.agent or ''}, CTA {self.cta}, {self.place or ''}")
        if self.other_place or self.other_agent:
            lines.append(f"  earlier:  {self.other_agent or 'another CTA'}, {self.other_place or ''}")
        lines.append(f"  kernel:   {self.kernel[:80]}, seen {self.count} times")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Suppression:
    """A finding that is expected in one kernel, and why. Suppressed findings stay in the report, apart."""

    kind: str
    kernel: str
    reason: str
    source: str = ""

    def matches(self, finding: Finding) -> bool:
        """Whether kind, part of the kernel's name and part of either source line fit."""
        places = [str(place) for place in (finding.place, finding.other_place) if place]
        fits = not self.source or any(self.source in place for place in places)
        return self.kind == finding.kind and self.kernel in finding.kernel and fits


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch: its size and what it cost."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    instructions: int
    mma: int
    async_ops: int
    async_bytes: int
    ctas: int
    seconds: float


@dataclass(slots=True)
class Report:
    """All launches of one emulated call."""

    launches: list[LaunchRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    suppressed: list[tuple[Finding, Suppression]] = field(default_factory=list)

    @property
    def instructions(self) -> int:
        """Warp instructions of all launches."""
        return sum(launch.instructions for launch in self.launches)

    @property
    def kinds(self) -> set[str]:
        """Kinds of all findings."""
        return {finding.kind for finding in self.findings}

    @property
    def fatal(self) -> Finding | None:
        """The finding that ended a launch, if one did."""
        return next((finding for finding in self.findings if finding.fatal), None)

    def require_clean(self) -> None:
        """Raise if anything was found.

        Raises:
            AssertionError: lists every finding.
        """
        if self.findings:
            raise AssertionError(f"{len(self.findings)} findings\n" + "\n".join(map(str, self.findings)))

    def add(self, finding: Finding, suppressions: Sequence[Suppression]) -> None:
        """File a finding under the first suppression that matches, else as found."""
        for suppression in suppressions:
            if suppression.matches(finding) and not finding.fatal:
                self.suppressed.append((finding, suppression))
                return
        self.findings.append(finding)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor that a launch may touch, under the name that reports give it."""

    name: str
    tensor: torch.Tensor

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return int(self.tensor.data_ptr())

    @property
    def size_bytes(self) -> int:
        """Bytes from the first to the last element, whatever the strides."""
        if self.tensor.numel() == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return int((last + 1) * self.tensor.element_size())

    def locate(self, address: int) -> str:
        """``name[i, j, k]``, with the byte within the element if it is not the first."""
        element, byte = divmod(address - self.base, self.tensor.element_size())
        index = [0] * self.tensor.dim()
        order = sorted(range(self.tensor.dim()), key=lambda d: -self.tensor.stride(d))
        for d in order:
            if self.tensor.stride(d):
                index[d], element = divmod(element, self.tensor.stride(d))
        suffix = f" byte {byte}" if byte else ""
        return f"{self.name}[{', '.join(map(str, index))}]{suffix}"


def describe_address(space: int, address: int, tensors: Sequence[NamedTensor]) -> str:
    """An address as a person would name it."""
    if space == SHARED:
        return f"shared+{address - SHARED_BASE}"
    if space == TMEM:
        return f"tensor memory lane {address >> 16}, column {address & 0xFFFF}"
    if space != GLOBAL:
        return ""
    for named in tensors:
        if named.base <= address < named.base + named.size_bytes:
            return named.locate(address)
    nearest = min(tensors, key=lambda n: min(abs(address - n.base), abs(address - n.base - n.size_bytes)), default=None)
    if nearest is None:
        return hex(address)
    if address >= nearest.base:
        return f"{address - nearest.base - nearest.size_bytes} B past the end of {nearest.name}"
    return f"{nearest.base - address} B before the start of {nearest.name}"


def make_finding(raw: RawFinding, program: Program, tensors: Sequence[NamedTensor]) -> Finding:
    """Name everything in a finding of the interpreter."""

    def place(pc: int) -> Place | None:
        if pc < 0:
            return None
        statement = program.statement(min(pc, len(program.statement_of) - 1))
        return Place(statement.line, statement.text, statement.source)

    def agent(code: int) -> str | None:
        return None if code < 0 else AGENTS[code >> 16].format(code & 0xFFFF)

    text = re.sub(r"\{pc (-?\d+)\}", lambda m: f"PTX line {getattr(place(int(m.group(1))), 'line', '?')}", raw.text)
    other = agent(raw.other_agent) if raw.other_cta < 0 else f"CTA {raw.other_cta}"
    return Finding(
        kind=raw.kind,
        text=text,
        place=place(raw.pc),
        agent=agent(raw.agent),
        other_place=place(raw.other_pc),
        other_agent=other,
        address=describe_address(raw.space, raw.address, tensors),
        kernel=program.entry.name,
        cta=raw.cta,
        count=raw.count,
        fatal=raw.fatal,
    )
