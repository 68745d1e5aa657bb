"""The five launchers on Hopper (SM90), written in CuTe DSL; bound by ``kernels(backend="sm90")``.

Importing this package imports neither torch nor the DSL; the launcher modules import torch, and the DSL only when a
kernel is compiled.
"""

from __future__ import annotations

ARCH = "sm_90a"
"""What the kernels are compiled for; it loads on compute capability 9.0 and on nothing else."""
