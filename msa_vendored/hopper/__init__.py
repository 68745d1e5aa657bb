"""The five launchers on Hopper (SM90), written in CuTe DSL; bound by ``kernels(backend="sm90")``.

Importing this package imports neither torch nor the DSL; the launcher modules import torch, and the DSL only when a
kernel is compiled.
"""
