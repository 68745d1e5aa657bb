"""What the runners of an emulated attention have in common: the problem, the errors of a result, and the conversation.

A test starts a runner as a subprocess and writes cases to it, one a line; it answers one line a run, both JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ptx_emulator.subjects import relative_error

if TYPE_CHECKING:
    from msa_vendored.reference.cases import PackedCase


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One problem of the forward and the schedules to run it under.

    Attributes:
        query_lengths: tokens of each document.
        key_lengths: keys of each document; as the queries if empty.
        topk: selection width.
        index_heads: key heads.
        ratio: query heads for each.
        seed: of operands and selection.
        own_block: select as training does; else any number of blocks, from none on.
        schedules: (schedule, seed, checks) of each run.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...] = ()
    topk: int = 4
    index_heads: int = 4
    ratio: int = 16
    seed: int = 0
    own_block: bool = True
    schedules: tuple[tuple[str, int, bool], ...] = (("eager", 0, True),)

    def make_operands(self) -> PackedCase:
        """Random operands and a selection."""
        from msa_vendored.reference.cases import make_case

        return make_case(
            self.query_lengths, self.key_lengths or None, topk=self.topk, index_heads=self.index_heads,
            heads_per_index_head=self.ratio, seed=self.seed, own_block=self.own_block,
        )  # fmt: skip


def compare_attention(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Relative Frobenius error of O, and the largest absolute error of the LSE; inf where only one side is -inf."""
    (out, lse), (want_out, want_lse) = got, expected
    empty = torch.isinf(want_lse)
    difference = torch.where(empty, torch.where(lse == want_lse, 0.0, math.inf), (lse - want_lse).abs())
    return relative_error(out, want_out), float(difference.max())


def serve_cases(case_type: Callable[..., Any], run: Callable[[Any], Iterable[Any]]) -> int:
    """Run the cases on standard input and print the results, dataclasses; the exit status."""
    for line in sys.stdin:
        if line.strip():
            for result in run(case_type(**json.loads(line))):
                print(json.dumps(asdict(result)), flush=True)
    return 0
