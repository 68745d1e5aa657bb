"""Rarer modes of tensor copies and tcgen05 in the PTX emulator, against their definitions."""

from __future__ import annotations

import pytest
import torch
from ptx_emulator import Kernel, Options
from ptx_emulator.ptx import parse_entries
from ptx_emulator.report import NamedTensor, Report
from ptx_emulator.snippets import module
from ptx_emulator.tensor_map import encode_tensor_map

BF16 = torch.bfloat16
LANE = "mov.u32 %r0, %tid.x; setp.eq.s32 %p1, %r0, 0; mov.u32 %r3, smem;"
BARRIER = """@!%p1 bra INIT; mbarrier.init.shared.b64 [%r3+4096], 1;
fence.mbarrier_init.release.cluster; INIT: bar.sync 0;"""
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p9, [%r3+4096], 0; @!%p9 bra LOOP;"


def gather(rows: tuple[int, int, int, int], box_rows: int = 1, schedule: str = "eager") -> tuple[Report, torch.Tensor]:
    """Four rows of ``source`` gathered at column 32, then scattered to the same rows of a tensor of ones."""
    source = torch.arange(10 * 96, dtype=torch.float32).view(10, 96).to(BF16)
    target = torch.ones(10, 96, dtype=BF16)
    at = ", ".join(map(str, rows))
    body = (
        LANE
        + BARRIER
        + f"""
    mov.b64 %d1, a0; mov.b64 %d2, a1;
    @!%p1 bra W;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3+4096], 512;
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
        [%r3], [%d1, {{32, {at}}}], [%r3+4096];
    W: {WAIT}
    @!%p1 bra END;
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d2, {{32, {at}}}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:"""
    )
    text = module(body, [".align 128 .b8 a0[128]", ".align 128 .b8 a1[128]"], shared_bytes=4104)
    maps = [encode_tensor_map(tensor, (box_rows, 64), 128) for tensor in (source, target)]
    tensors = [NamedTensor("source", source), NamedTensor("target", target)]
    report = Report()
    Kernel(parse_entries(text)["test"]).run((1, 1, 1), (32, 1, 1), 0, maps, tensors, Options(schedule, 1), report)
    expected = torch.ones(10, 96, dtype=BF16)
    for row in set(rows):
        if 0 <= row < 10:
            expected[row, 32:] = source[row, 32:]
    assert torch.equal(target, expected)
    return report, target


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("rows", [(7, 0, 3, 9), (2, 12, -1, 5)])
def test_gather_and_scatter_of_four_rows(rows: tuple[int, int, int, int], schedule: str) -> None:
    """Rows in the order that the instruction names them; outside the tensor, zeros in and nothing out."""
    gather(rows, schedule=schedule)[0].require_clean()


def test_gather_needs_a_map_of_single_rows() -> None:
    """A map that was made for tiles of rows, which the hardware does not take for a gather."""
    with pytest.raises(Exception, match="box of 4 rows for a gather of four"):
        gather((0, 1, 2, 3), box_rows=4)
