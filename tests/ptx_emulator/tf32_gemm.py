"""A tf32 GEMM of one SM100 tile by CuTe DSL, one for each layout: ``python -m ptx_emulator.tf32_gemm``.

Threads store the operands through the DSL's own layouts, and the DSL builds the matrix descriptors: what the emulator
makes of both is checked against the DSL, not against this project's reading of the ISA. Small integers are exact.
"""

from __future__ import annotations

import json

import torch

ROWS, COLUMNS, DEPTH = 128, 64, 16
CASES: dict[str, tuple[str, str, tuple[int, int]]] = {
    "a": ("MN_SW128_32B", "K_SW64", (1, 2)),
    "b": ("K_SW64", "MN_SW128_32B", (2, 1)),
    "both": ("MN_SW128_32B", "MN_SW128_32B", (2, 1)),
    "groups_of_k_apart": ("MN_SW128_32B_K4", "MN_SW128_32B_K4", (1, 2)),
    "another_swizzle": ("MN_SW128", "K_SW64", (1, 2)),
}
"""Layouts of A and B, names of ``SmemLayoutAtomKind``, and the order of their atoms: (1, 2) along rows first.

``_K4`` is the same layout in atoms of 4 values of K, for which the DSL gives another stride.
"""


def main() -> int:
    """Run every case; prints one JSON object each: whether the product is right, and the findings."""
    from ptx_emulator import cute_host, emulate

    cute_host.prepare("sm_100a")
    from ptx_emulator.tf32_kernel import compile_gemm

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, DEPTH), generator=generator).float() for rows in (ROWS, COLUMNS))
    for name, layouts in CASES.items():
        out = torch.full((ROWS, COLUMNS), torch.nan)
        report = emulate(cute_host.CompiledFunction(compile_gemm(*layouts)), a, b, out)
        result = {"case": name, "right": torch.equal(out, a @ b.T), "findings": list(map(str, report.findings))}
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
