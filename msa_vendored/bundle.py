"""The five launchers as one value, bound on first use.

Binding needs the packages but no GPU: nothing is compiled and CUDA is not initialised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from msa_vendored.errors import MSAVendoredError
from msa_vendored.installed import provenance
from msa_vendored.probes import (
    HOPPER_IMPORTS,
    IMPORTS,
    forget_environment,
    import_symbols,
    probe_distribution,
    probe_hopper_parts,
    probe_parts,
    require_parts,
)

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("sm100", "sm90", "reference")
"""Names that ``kernels(backend=…)`` accepts; None means sm100."""


class UnknownBackendError(MSAVendoredError, ValueError):
    """``kernels(backend=…)`` got a name that is none of :data:`BACKENDS`."""


@dataclass(frozen=True, slots=True)
class MSAKernels:
    """The launchers that training with MSA needs. None of the first four has a gradient.

    Attributes:
        build_k2q_csr: ``(q2k_indices, cu_seqlens_q, cu_seqlens_k, kv_block_size, *, total_k, max_seqlen_k,
            max_seqlen_q, total_rows, qhead_per_kv=1, return_schedule=False)``; from selected key blocks per query to
            queries per key block. Always pass the exact ``total_rows``: without it edges can be dropped silently.
        sparse_atten_func: ``(q, k, v, k2q_row_ptr, k2q_q_indices, topK, *, cu_seqlens_q, …, causal=False, …)``;
            the sparse forward.
        fmha_sm100: ``(q, k, v, plan, …)``; the dense forward, used for block scores.
        fmha_sm100_plan: ``(qo_lens, kv_lens, num_qo_heads, …)``; its plan. Synchronises with the host.
        run_backward: ``(*, q, k_aligned, v_aligned, grad_out, lse, out, schedule)`` -> ``(dq, dk, dv)``; see
            :func:`msa_vendored.run_backward`.
    """

    build_k2q_csr: Callable[..., Any]
    sparse_atten_func: Callable[..., Any]
    fmha_sm100: Callable[..., Any]
    fmha_sm100_plan: Callable[..., tuple[Any, ...]]
    run_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class KernelBinder:
    """Callable that binds a backend's launchers once in a process; :data:`kernels` is the one instance."""

    def __init__(self) -> None:
        self._bound: dict[str, MSAKernels] = {}
        self._lock = threading.RLock()

    def __call__(self, *, backend: str | None = None) -> MSAKernels:
        """The launchers of a backend; the same object every time. Threads that call at once bind once.

        Args:
            backend: ``"sm100"`` (None means it): the official launchers, as they are, and our ``run_backward``.
                ``"sm90"``: our own five for Hopper, which need torch and CuTe DSL but no built MSA tree.
                ``"reference"``: the same five in PyTorch, on any device.

        Raises:
            UnavailableError: something is not built, missing, of the wrong version, or not the patched tree that the
                provenance names. Lists everything, with one command. It is not remembered: the next call tries again.
            UnknownBackendError: (a ValueError) no such backend.
            Exception: what a module other than by ImportError raises while it is imported, unchanged.
        """
        name = "sm100" if backend is None else backend
        if (bound := self._bound.get(name)) is not None:
            return bound
        with self._lock:
            if name not in self._bound:
                self._bound[name] = _bind(name)
            return self._bound[name]

    def cache_clear(self) -> None:
        """Forget what is bound; the next call probes and binds again."""
        with self._lock:
            self._bound.clear()

    def __repr__(self) -> str:
        return f"<msa_vendored.kernels, bound: {', '.join(sorted(self._bound)) or 'nothing yet'}>"


kernels = KernelBinder()


def _bind(backend: str) -> MSAKernels:
    if backend == "sm100":
        return _bind_sm100()
    if backend == "reference":
        forget_environment()
        require_parts([probe_distribution("torch")], "the reference launchers cannot be bound")
        names = [field.name for field in fields(MSAKernels)]
        return _bind_symbols([("msa_vendored.reference", name) for name in names], (), backend)
    if backend == "sm90":
        forget_environment()
        require_parts(probe_hopper_parts(), "the sm90 launchers cannot be bound")
        names = [field.name for field in fields(MSAKernels)]
        return _bind_symbols([("msa_vendored.hopper.launchers", name) for name in names], HOPPER_IMPORTS, backend)
    raise UnknownBackendError(
        "unknown backend",
        where="kernels(backend=…)",
        expected="None or one of " + ", ".join(repr(name) for name in BACKENDS),
        got=repr(backend),
    )


def _bind_sm100() -> MSAKernels:
    provenance.cache_clear()
    forget_environment()
    require_parts(probe_parts(), "the sm100 launchers cannot be bound")
    package = provenance().package
    symbols = [
        # By name, so that an AttributeError raised inside it is not taken for a symbol that the package lacks: the
        # package imports it only when one of its symbols is asked for.
        (f"{package}.api", "__name__"),
        (f"{package}.sparse", "build_k2q_csr"),
        (f"{package}.sparse", "sparse_atten_func"),
        (package, "fmha_sm100"),
        (package, "fmha_sm100_plan"),
        ("msa_vendored.backward", "run_backward"),
    ]
    return _bind_symbols(symbols, tuple(IMPORTS), "sm100")


def _bind_symbols(symbols: list[tuple[str, str]], first: tuple[str, ...], backend: str) -> MSAKernels:
    values, missing = import_symbols(symbols, first=first)
    require_parts(missing, f"the {backend} launchers cannot be bound")
    named = {symbol: value for (_, symbol), value in zip(symbols, values, strict=True)}
    return MSAKernels(**{field.name: named[field.name] for field in fields(MSAKernels)})  # type: ignore[arg-type]  # untyped modules
