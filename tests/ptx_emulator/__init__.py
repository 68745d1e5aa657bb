"""Runs SM100 kernels on a CPU, from their PTX: results, deadlocks, races.

What it says is: emulated and race-checked, never executed on SM100 hardware. docs/emulator.md has the model, the
checks and the limits.
"""

from __future__ import annotations

from ptx_emulator.launch import EmulationError, Kernel, Options, emulate, load_kernels
from ptx_emulator.program import UnsupportedPtxError
from ptx_emulator.ptx import PtxError
from ptx_emulator.report import Finding, LaunchRecord, Report, Suppression

__all__ = [
    "EmulationError",
    "Finding",
    "Kernel",
    "LaunchRecord",
    "Options",
    "PtxError",
    "Report",
    "Suppression",
    "UnsupportedPtxError",
    "emulate",
    "load_kernels",
]
