"""The bound behind fp16 sums of dQ, and who has them. For the stages themselves see ``test_backward_stages``."""

from __future__ import annotations

import pytest
import torch
from dq_scale_cases import row_factors
from hypothesis import given
from hypothesis import strategies as st

from msa_vendored.backward.accumulation import ARCH_ACCUMULATIONS, DQ_ACCUMULATIONS, choose_dq_accumulation
from msa_vendored.backward.checks import ArgumentValueError, UnsupportedArgumentError

EXPONENTS = st.integers(-30, 30)


@given(
    seed=st.integers(0, 1 << 30),
    keys=st.integers(1, 40),
    exponents=st.tuples(EXPONENTS, EXPONENTS, EXPONENTS),
    aligned=st.booleans(),
    softmax_scale=st.sampled_from([128**-0.5, -0.2, 1e-3]),
)
def test_no_part_of_a_scaled_sum_overflows(
    seed: int, keys: int, exponents: tuple[int, int, int], aligned: bool, softmax_scale: float
) -> None:
    """Guards infinite gradients: keys in the worst order, and signs that all add up (``aligned``)."""
    random = torch.Generator().manual_seed(seed)
    sizes = [2.0**exponent for exponent in exponents]
    grad, k, v = (
        torch.randn((rows, 128), generator=random).bfloat16().double() * size
        for rows, size in zip((1, keys, keys), sizes, strict=True)
    )
    if aligned:
        v = grad.sign() * v.abs().amax() * (-1.0) ** torch.arange(keys)[:, None]
    p = torch.softmax(3 * torch.randn((1, keys), generator=random).double(), 1)
    dp = grad @ v.T
    ds = softmax_scale * p * (dp - (p * dp).sum(1, keepdim=True))
    if aligned:
        k = ds.T.sign() * k.abs().amax()
    maxima = torch.stack([k.abs().amax(), v.abs().amax()])[None].float()
    factor = float(row_factors(grad.abs().sum(1, keepdim=True).float(), maxima, softmax_scale))
    terms = ds.T * k * factor
    assert float(torch.maximum(terms.clamp(min=0).sum(0), -terms.clamp(max=0).sum(0)).max()) <= 2.0**15
    if aligned:  # the bound is sharp but for 4 P (1 - P), where P is what keys of one sign get
        share = float(p[0, ::2].sum())
        assert float(terms.sum(0).abs().max()) >= 0.99 * 2.0**14 * 2 * share * (1 - share)


@pytest.mark.parametrize("arch", ARCH_ACCUMULATIONS)
@pytest.mark.parametrize("name", [*DQ_ACCUMULATIONS, None, "fp8"])
def test_what_an_architecture_lacks_is_refused_by_name(arch: str, name: str | None) -> None:
    """Guards a sum of another type than was asked for."""
    if name == "fp8":
        with pytest.raises(ArgumentValueError, match="expected: 'bf16' or 'fp16' or 'fp32'"):
            choose_dq_accumulation(arch, name)
    elif name == "fp16" and arch != "sm_90a":
        with pytest.raises(UnsupportedArgumentError, match="got:      'fp16'"):
            choose_dq_accumulation(arch, name)
    else:
        assert choose_dq_accumulation(arch, name) == (name or ARCH_ACCUMULATIONS[arch][0])
