"""The examples of the documentation run, and do what their text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_vendored.training import Microbatch, select_blocks, sparse_attention

ROOT = Path(__file__).parents[1]
MAX_EXAMPLE_LINES = 40


def read_example(page: str) -> str:
    """The only fenced Python block of a page of the documentation."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, page
    return blocks[0]


def run_example(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(read_example(page), page, "exec"), names)  # noqa: S102 -- our own documentation
    return names


def test_first_training_step_lowers_the_loss(tmp_path: Path) -> None:
    """Guards the first thing a new user runs, as they run it: a script on a CPU, warnings as errors."""
    script = tmp_path / "first.py"
    script.write_text(read_example("README.md"))
    assert len(script.read_text().splitlines()) <= MAX_EXAMPLE_LINES
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # tiny tensors: threads would only wait for each other
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    match = re.fullmatch(r"loss (\d+\.\d+) -> (\d+\.\d+)\n", result.stdout)
    assert match, result.stdout
    first, last = (float(loss) for loss in match.groups())
    assert first > 1.8  # ln 8 = 2.08 is the loss of knowing nothing
    assert last < first / 2


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 8, "k": 4, "v": 4, "index_q": 4, "index_k": 1}
    tensors = {name: torch.randn(2, 150, count, 8, generator=generator) for name, count in heads.items()}
    doc_ids = torch.ones(2, 150, dtype=torch.int64)
    doc_ids[0, 140:] = 0
    doc_ids[1, 9:] = 2
    return {**tensors, "doc_ids": doc_ids}


def expected_output(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    microbatch = Microbatch.from_document_map(batch["doc_ids"])
    q, k, v, index_q, index_k = (microbatch.pack(batch[name]) for name in ("q", "k", "v", "index_q", "index_k"))
    return microbatch.unpack(sparse_attention(q, k, v, select_blocks(index_q, index_k, microbatch), microbatch))


def test_nemo_example_attends_within_documents(batch: dict[str, torch.Tensor]) -> None:
    """Guards the layer core of the Automodel page, padding included."""
    out = run_example("docs/nemo.md")["attend"](*batch.values())
    assert torch.equal(out, expected_output(batch))
    assert not out[0, 140:].any()


def test_megatron_example_takes_both_layouts(batch: dict[str, torch.Tensor]) -> None:
    """Guards the transposes of the Megatron page: [s, b, h, d] and packed [t, h, d] give the same numbers."""
    core = run_example("docs/megatron.md")["SparseCoreAttention"]()
    *tensors, doc_ids = batch.values()
    out = core(*(tensor.transpose(0, 1) for tensor in tensors), doc_ids)
    expected = expected_output(batch).flatten(2)
    assert torch.equal(out, expected.transpose(0, 1))
    microbatch = Microbatch.from_document_map(doc_ids)
    packed = core.forward_packed(*(microbatch.pack(tensor) for tensor in tensors), microbatch.cu_seqlens)
    torch.testing.assert_close(packed, microbatch.pack(expected))
