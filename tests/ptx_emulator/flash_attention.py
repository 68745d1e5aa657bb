"""Runs FlashAttention-4's backward (head dim 64) in the emulator: ``python -m ptx_emulator.flash_attention [sm_90a]``.

A regression of the emulator, not of ours: a kernel of another author that is known to be right, with features that
the MSA forward does not use (linear bulk copies and reductions, mapa, 16x256b loads). The package ``flash-attn-4`` is
a test-only dependency. Cases come as JSON lines, results go out as JSON lines.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch

from ptx_emulator import cute_host
from ptx_emulator.launch import Options
from ptx_emulator.official import poisoned_empty
from ptx_emulator.report import Report, Suppression

SUPPRESSIONS = (
    Suppression(
        "global-conflict",
        "FlashAttentionBackwardPreprocess",
        "256 threads for tiles of 128 rows: threads 128 to 255 also write lse_log2 of the next tile, the same values",
    ),
    Suppression(
        "uninitialised-register",
        "FlashAttentionBackwardPreprocess",
        "rows beyond the sequence are not loaded; what is computed from them is not stored",
    ),
    Suppression(
        "global-conflict",
        "FlashAttentionBackwardSm100",
        "dK and dV: every lane of the leader warp issues the same tensor store, 32 copies of the same values",
    ),
    Suppression(
        "global-conflict",
        "FlashAttentionBackwardSm90",
        "dK and dV: every lane of the storing warp issues the same tensor store, 32 copies of the same values",
    ),
    Suppression(
        "leftover-transactions",
        "FlashAttentionBackwardSm100",
        "dK and dV: the last stage's bulk store is neither committed nor waited for: docs/findings/",
    ),
    Suppression(
        "missing-tcgen05-wait",
        "FlashAttentionBackwardSm100",
        "tensor memory is released after its values were used, without tcgen05.wait::ld: docs/findings/",
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One backward problem, head dim 64."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    causal: bool
    schedules: tuple[tuple[str, int, bool], ...] = (("eager", 0, True),)
    suppress: bool = True


class Backward:
    """FA4's backward for SM100 or SM90 with its compilations and launches redirected. One in a process."""

    def __init__(self, arch: str = "sm_100a") -> None:
        os.environ.update(FLASH_ATTENTION_ARCH=arch.rstrip("a"), FLASH_ATTENTION_NUM_SMS="148")
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "0"
        cute_host.prepare(arch)
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda *_a, **_k: divmod(int(arch[3:-1]), 10)
        cuda.is_available = lambda: True
        import cutlass.cute as cute

        # By name: mypy runs where this test-only dependency is not installed.
        utils: Any = import_module("flash_attn.cute.cute_dsl_utils")
        self.interface: Any = import_module("flash_attn.cute.interface")
        self.report = Report()
        self.options = Options()
        from_dlpack = utils.from_dlpack
        utils.from_dlpack = lambda t, **k: from_dlpack(cute_host.FakeCuda(t) if isinstance(t, torch.Tensor) else t, **k)
        compile_original = cute.compile

        def compile_redirected(*arguments: Any, **options: Any) -> Any:
            function = cute_host.CompiledFunction(compile_original(*arguments, **options))
            return lambda *values: function.run(values, self.options, self.report)

        cute.compile = compile_redirected
        tensor_type: Any = torch.Tensor
        tensor_type.is_cuda = property(lambda _self: True)

    def run(self, case: Case) -> list[dict[str, Any]]:
        """Run a case under each of its schedules; gradients against autograd in float32."""
        torch.manual_seed(0)
        shape = (case.batch, case.queries, case.heads, 64)
        key_shape = (case.batch, case.keys, case.key_heads, 64)
        q, k, v, grad = (torch.randn(s).to(torch.bfloat16) for s in (shape, key_shape, key_shape, shape))
        out, lse, gradients = reference(q, k, v, grad, case.causal)
        results = []
        for schedule, seed, checked in case.schedules:
            checks = Options().checks if checked else frozenset()
            self.options = Options(schedule, seed, checks, suppress=SUPPRESSIONS if case.suppress else ())
            self.report = Report()
            started = time.perf_counter()
            with poisoned_empty():
                got = self.interface._flash_attn_bwd(
                    q, k, v, out, grad, lse, softmax_scale=64**-0.5, causal=case.causal
                )
            errors = [float((g.float() - e).norm() / e.norm()) for g, e in zip(got[:3], gradients, strict=True)]
            results.append(
                {
                    "schedule": schedule,
                    "seed": seed,
                    "errors": errors,
                    "seconds": time.perf_counter() - started,
                    "launches": [asdict(launch) for launch in self.report.launches],
                    "findings": [str(finding) for finding in self.report.findings],
                    "kinds": sorted(self.report.kinds),
                    "suppressed": sorted({finding.kind for finding, _ in self.report.suppressed}),
                }
            )
        return results


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output in bf16, LSE, and the gradients of q, k, v in float32."""
    leaves = [t.float().clone().requires_grad_(True) for t in (q, k, v)]
    ratio = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(ratio, 2) for t in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], keys) * 64**-0.5
    if causal:
        after = torch.arange(k.shape[1])[None] > torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = scores.masked_fill(after, -math.inf)
    lse = torch.logsumexp(scores, -1).detach().contiguous()
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), values)
    out.backward(grad.float())
    return out.detach().to(torch.bfloat16), lse, [leaf.grad for leaf in leaves if leaf.grad is not None]


def main() -> int:
    """Run the cases on standard input."""
    backward = Backward(*sys.argv[1:2])
    for line in sys.stdin:
        if line.strip():
            for result in backward.run(Case(**json.loads(line))):
                print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
