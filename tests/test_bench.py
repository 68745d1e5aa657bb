"""The benchmark's parts that need no GPU: workloads, counts, checks against float32, and what it says of failures."""

from __future__ import annotations

import argparse
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from msa_vendored.__main__ import main
from msa_vendored.backward.documents import BLOCK_SIZE
from msa_vendored.bench import check, cli, peers, plots, report, runner, workload
from msa_vendored.bench.errors import BenchArgumentError, PeerMissingError
from msa_vendored.bench.implementations import OURS, Peer, Prepared, list_implementations
from msa_vendored.bench.markdown import format_markdown
from msa_vendored.bench.ours import LauncherCalls
from msa_vendored.bench.timing import LEAST_CALLS, Timing, time_calls, time_limit
from msa_vendored.bench.workload import Case, Operands

CPU = torch.device("cpu")
PACK = Case("pack", (140, 30, 1))


@pytest.fixture(scope="module")
def operands() -> Operands:
    return workload.make_operands(PACK, CPU, seed=3)


@pytest.mark.parametrize("selection", workload.SELECTIONS)
def test_a_selection_is_causal_and_holds_the_own_block(selection: str) -> None:
    """Guards counts and timings of a selection that training would never make."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(4096)
    ids = workload.select_at_random(positions, 4096, selection, generator)
    own = positions // BLOCK_SIZE
    assert bool((ids <= own[None, :, None]).all())
    assert bool((ids == own[None, :, None]).any(2).all())
    assert bool(((ids >= 0).sum(2) == (own + 1).clamp(max=16)).all())
    late = ids[:, 3000:]
    assert bool((late[..., 1:] > late[..., :-1]).all())
    near = (late > own[3000:, None] - workload.NEAREST).sum(2)
    assert bool((near == workload.NEAREST).all()) == (selection == "mixed")
    assert bool((late[..., 0] == 0).all()) == (selection == "mixed")


def test_pairs_are_counted_exactly(operands: Operands) -> None:
    """Guards TFLOP/s that are too high because a masked half of a block was counted."""
    everything = torch.arange(PACK.tokens)
    visible = [check.visible_keys(operands, everything, head, dense=False).sum() for head in range(4)]
    assert operands.sparse_pairs == int(sum(visible))
    assert PACK.dense_pairs == int(check.visible_keys(operands, everything, 0, dense=True).sum())
    assert workload.forward_flops(3, 16) == 4 * 128 * 16 * 3


def test_the_reference_passes_the_check_and_a_wrong_result_does_not(operands: Operands) -> None:
    """Guards a yardstick that would let wrong gradients through, tensor by tensor."""
    calls = LauncherCalls("reference", operands)
    right = calls.collect()
    errors = check.compare_sample(operands, right, dense=False)
    assert set(errors) == set(runner.ERROR_LIMITS)
    assert all(error <= runner.ERROR_LIMITS[name] for name, error in errors.items()), errors
    shifted = {name: getattr(right, name).float() * 1.01 + 1e-3 for name in errors}
    wrong = check.compare_sample(operands, check.Results(**shifted), dense=False)
    assert [name for name, error in wrong.items() if not error > runner.ERROR_LIMITS[name]] == []


def test_packs_have_the_tokens_asked_for(tmp_path: Path) -> None:
    """Guards a cut pack with an empty or missing last document."""
    lengths = workload.draw_pack(32768)
    assert sum(lengths) == 32768
    assert min(lengths) > 0
    assert len(lengths) > 8
    path = tmp_path / "packs.jsonl"
    path.write_text('{"case_id":1,"cu_seqlens":[0,100,260,300]}\n{"case_id":2,"cu_seqlens":[0,250,260]}\n')
    assert [case.lengths for case in workload.read_packs(path, 200)] == [(100, 40), (10,)]
    assert [case.lengths for case in workload.read_packs(path)] == [(100, 160, 40), (250, 10)]
    assert [case.name for case in workload.read_packs(path, 200)] == [
        "pack 1: 2 documents, 140 tokens",
        "pack 2: 1 document, 10 tokens",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file of packs is empty"),
        ("[0, 5]", "a pack cannot be read"),
        ('{"case_id": 1', "a pack cannot be read"),
        ('{"case_id": 1}', "a pack cannot be read"),
        ('{"case_id": 1, "cu_seqlens": 5}', "no list of integers"),
        ('{"case_id": 1, "cu_seqlens": [0, 5.0]}', "no list of integers"),
        ('{"case_id": 1, "cu_seqlens": []}', "does not start at 0"),
        ('{"case_id": 1, "cu_seqlens": [1, 5]}', "does not start at 0"),
        ('{"case_id": 1, "cu_seqlens": [0]}', "got:      no document"),
        ('{"case_id": 1, "cu_seqlens": [0, 5, 5]}', "got:      5 after 5"),
        ('{"case_id": 1, "cu_seqlens": [0, 201]}', "at most 200 tokens"),
    ],
)
def test_an_unusable_pack_is_named(tmp_path: Path, text: str, message: str) -> None:
    """Guards minutes of measuring lengths that nobody meant; the message names the line."""
    path = tmp_path / "packs.jsonl"
    path.write_text(f'{{"case_id": 7, "cu_seqlens": [0, 200]}}\n{text}\n' if text else "")
    with pytest.raises(BenchArgumentError) as caught:
        workload.read_packs(path, 200)
    assert message in str(caught.value)
    assert "packs.jsonl, line 2" in str(caught.value) or not text
    with pytest.raises(BenchArgumentError, match="cannot be read"):
        workload.read_packs(tmp_path / "nothing")


def test_the_flex_mask_keeps_the_pairs_of_the_selection() -> None:
    """Guards a peer that is timed on other work than ours."""
    case = Case("one", (512,))
    operands = workload.make_operands(case, CPU, seed=1)
    mask = peers.make_flex_mask(operands)
    rows, keys = torch.arange(512 * 16)[:, None], torch.arange(512)[None]
    for head in range(4):
        kept = mask.mask_mod(torch.tensor(0), torch.tensor(head), rows, keys)
        visible = check.visible_keys(operands, torch.arange(512), head, dense=False)
        assert torch.equal(kept, visible.repeat_interleave(16, dim=0))
        listed = mask.to_dense()[0, head].bool()
        assert torch.equal(listed, visible.view(64, 8, 4, 128).any(3).any(1))


def broken(operands: Operands) -> Prepared:
    raise RuntimeError("no such kernel\nand more")


def test_a_failing_peer_is_a_row_and_not_the_end(operands: Operands) -> None:
    """Guards a run of minutes that is lost to one peer."""
    peer = Peer("broken", False, "torch", broken)
    (row,) = runner.run_guarded(PACK, peer, [operands], runner.Settings())
    assert (row.status, row.note) == ("failed", "RuntimeError: no such kernel")


def endless(operands: Operands) -> Prepared:
    while True:
        time.sleep(0.01)


def test_a_peer_that_takes_too_long_is_left_out_from_then_on(operands: Operands) -> None:
    """Guards a run that one peer's compiler, or a loop of its, takes with it."""
    settings = runner.Settings(limit_s=0.1)
    peer = Peer("endless", False, "torch", endless)
    (row,) = runner.run_guarded(PACK, peer, [operands], settings)
    assert row.status == "failed"
    assert row.note.endswith("TimeLimitError: it takes too long")
    assert "more than 0.1 s" in str(runner.find_reason(PACK, peer, [PACK], settings, {"endless"}))
    assert runner.find_reason(PACK, peer, [PACK], settings, {"another"}) is None
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # the alarm is off


def test_a_missing_peer_is_said_to_be_missing() -> None:
    """Guards a table that looks complete."""
    found = runner.find_version(Peer("x", False, "no-such-distribution", broken))
    assert found == ("not installed: no-such-distribution", False)
    with pytest.raises(PeerMissingError, match="cannot be imported"):
        Peer("x", False, "torch", broken, module="no_such_module").find_version()
    assert "multiples of 128" in str(Peer("x", False, "torch", broken, multiple=128).refuse(PACK))
    assert "packed" in str(Peer("x", False, "torch", broken, single_document=True).refuse(PACK))


def make_report() -> runner.Report:
    def row(name: str, tokens: int, part: str, median_ms: float, **values: Any) -> runner.Row:
        timing = Timing(median_ms, median_ms, median_ms, 20)
        fields = {"timing": timing, "tflops": 100.0, "part": part, **values}
        return runner.Row(f"{tokens} tokens", "random", tokens, 1, name, "dense" in name, **fields)

    rows = [
        row(name, tokens, part, tokens / scale)
        for tokens in (4096, 8192)
        for part in ("forward", "backward")
        for name, scale in (("msa_vendored", 8000.0), (report.BASELINE, 2000.0))
    ]
    rows.append(row("flash-msa", 4096, "forward", 1.0, status="wrong", errors={"out": 0.5}))
    rows.append(row("flex_attention", 4096, "", 1.0, timing=None, status="failed", note="RuntimeError: x"))
    rows.append(row("other", 4096, "", 1.0, timing=None, status="absent", note="not installed: other"))
    environment = {
        "card": "a card", "driver": "1", "cuda": "13", "python": "3", "msa_vendored": "0", "packages": {"torch": "2"},
    }  # fmt: skip
    return runner.Report(environment, 800.0, 4.3, tuple(rows))


@pytest.mark.parametrize(
    ("name", "dense", "every", "skipped"),
    [("x", True, False, 1), ("x", True, True, 1), ("x", False, False, 1), ("x", False, True, 0),
     (OURS, False, False, 0)],
)  # fmt: skip
def test_peers_run_a_case_once(name: str, dense: bool, every: bool, skipped: int) -> None:
    """Guards half a run that measures the same again, and a second selection that is left out where it matters."""
    cases = [Case("a", (512,)), Case("b", (256, 256)), Case("a", (512,), "mixed"), Case("c", (640,), "mixed")]
    peer = Peer(name, dense, "torch", broken)
    reasons = [runner.find_repetition(case, peer, cases, every=every) for case in cases]
    assert [index for index, reason in enumerate(reasons) if reason] == [2][:skipped]
    assert not skipped or "see random" in str(reasons[2])


def test_the_table_shows_ratios_failures_and_absences() -> None:
    """Guards a wrong or failed peer that looks like a fast one."""
    buffer = io.StringIO()
    report.print_report(make_report(), Console(file=buffer, width=200))
    text = buffer.getvalue()
    assert "4.00" in text
    assert "5.0e-01 WRONG" in text
    assert "RuntimeError: x" in text
    assert "other: absent, not installed: other" in text


def test_the_picture_leaves_wrong_results_out(tmp_path: Path) -> None:
    """Guards a plot in which a wrong peer sets the record."""
    pytest.importorskip("matplotlib")
    found = make_report()
    assert {row.implementation for row in plots.select_rows(found.rows, "forward")} == {"msa_vendored", report.BASELINE}
    packs = [
        runner.Row("p", selection, 9, 3, "msa_vendored", False, "forward", Timing(2.0, 2.0, 2.0, 20), status=status)
        for selection, status in (("random", "ok"), ("random", "wrong"), ("mixed", "ok"))
    ]
    alone = replace(packs[0], case="pack 1: 1 document, 9 tokens", documents=1)
    assert plots.select_packs([alone], "forward") == [alone]
    assert plots.select_rows([alone], "forward") == []
    assert plots.select_packs(packs, "forward") == packs[:1]
    plots.save_plots(replace(found, rows=(*found.rows, *packs)), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_the_markdown_table_has_a_cell_for_every_case() -> None:
    """Guards a README that shows a wrong or failed peer's time as if it were right."""
    pack: dict[str, Any] = {"case": "a pack", "documents": 3, "dense": False, "selection": "random", "tokens": 9}
    slow = Timing(2500.0, 2500.0, 2500.0, 3)
    rows = [
        runner.Row(**pack, implementation="msa_vendored", part="forward", timing=slow),
        runner.Row(**pack, implementation="msa_vendored", part="index", timing=Timing(0.1, 0.1, 0.1, 20)),
        runner.Row(**pack, implementation="flex_attention", status="failed"),
        runner.Row(**pack, implementation="flash-msa", status="skipped"),
    ]
    report = make_report()
    lines = format_markdown(replace(report, rows=(*report.rows, *rows))).splitlines()
    assert lines[:15] == [
        "| forward / backward, ms | 4096 tokens | 8192 tokens |",
        "|---|---|---|",
        "| msa_vendored | 0.512 / 0.512 | 1.02 / 1.02 |",
        "| FlashAttention-4 dense | 2.05 / 2.05 | 4.10 / 4.10 |",
        "| flash-msa | 1.00 / – (wrong) |  |",
        "| flex_attention | failed |  |",
        "",
        "| forward / backward, ms | msa_vendored | flex_attention |",
        "|---|---|---|",
        "| a pack | 2,500 (of 3) / – | failed |",
        "",
        "| msa_vendored, ms | index |",
        "|---|---|",
        "| a pack | 0.100 |",
        "",
    ]
    assert lines[15].startswith("a card, driver 1, CUDA 13,")


def test_results_can_be_printed_and_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards pictures that can only be drawn where the GPU is, and a form that reads back as something else."""
    found = make_report()
    assert runner.Report.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(found.to_dict()))
    assert main(["bench", "--from-json", str(path)]) == 1  # one peer is wrong, one failed
    assert "5.0e-01 WRONG" in capsys.readouterr().out
    path.write_text('{"schema": 7}')
    assert main(["bench", "--from-json", str(path)]) == 1
    assert "no results of this benchmark" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a benchmark of the CPU that is taken for one of the card."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the command would run")
    assert main(["bench"]) == 1
    assert "the benchmark needs a CUDA device" in capsys.readouterr().err


def test_cases_come_in_the_order_of_what_matters(tmp_path: Path) -> None:
    """Guards a run that is cut short, whose results are written after each case."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    path = tmp_path / "packs.jsonl"
    path.write_text('{"case_id":8,"cu_seqlens":[0,30000,196608]}')
    options = parser.parse_args(["--tokens", "4096,512", "--packs", str(path)])
    assert [(case.tokens, case.selection, len(case.lengths)) for case in cli.list_cases(options)] == [
        (4096, "random", 1),
        (512, "random", 1),
        (4096, "mixed", 1),
        (512, "mixed", 1),
        (30000, "random", 1),
        (196608, "random", 2),
    ]
    options = parser.parse_args(["--tokens", "512", "--selections", "mixed", "--no-packs"])
    assert [case.selection for case in cli.list_cases(options)] == ["mixed"]


def test_names_choose_implementations() -> None:
    """Guards a typing error that measures nothing."""
    assert [peer.name for peer in cli.choose_implementations(["flash-msa"])] == ["flash-msa"]
    assert len(cli.choose_implementations([])) == len(list_implementations())
    assert [peer.name for peer in cli.choose_implementations(["msa_vendored"], ["reference"])] == ["msa_vendored"]
    with pytest.raises(BenchArgumentError, match="no such implementation"):
        cli.choose_implementations(["flsh"])


@pytest.mark.gpu
def test_a_slow_part_makes_fewer_calls() -> None:
    """Guards minutes for one peer, and a median of fewer calls that does not say so."""

    def wait() -> None:
        torch.cuda._sleep(50_000_000)  # 25 to 50 ms

    slow = time_calls([wait, wait], budget_s=0.2)
    assert LEAST_CALLS <= slow.calls < 20
    assert 10 < slow.median_ms < 200
    assert time_calls([wait], budget_s=1e-3).calls == LEAST_CALLS
    assert time_calls([lambda: None], budget_s=0.2).calls == 20
    assert "(of" in report.format_median(slow, "30")
