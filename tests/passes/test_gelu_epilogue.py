"""gelu_epilogue: linear + tanh-GELU becomes one product with an epilogue, on half precision only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import program, targets

from vitcg_backend.passes.gelu_epilogue import gelu_epilogue


def mlp(m, x, g):
    w, b = m.weight.bfloat16(), m.second[0].bfloat16()
    return F.gelu(F.linear(x.bfloat16(), w, b), approximate="tanh")


def piece(function):
    (only,) = program(function).pieces
    return only.gm


def test_rewrites() -> None:
    """The pair becomes one node and the original graph stays as it was."""
    gm = piece(mlp)
    new = gelu_epilogue(gm, device_type="cpu")
    assert any("_addmm_activation" in name for name in targets(new))
    assert "gelu" not in targets(new)
    assert "linear" not in targets(new)
    assert "gelu" in targets(gm)


def test_unrelated_graph_comes_back_as_the_same_object() -> None:
    """No pair, or another device: nothing is copied."""
    gm = piece(lambda m, x, g: F.gelu(F.linear(x, m.weight, m.second[0])))
    assert gelu_epilogue(gm, device_type="cpu") is gm
    gm = piece(mlp)
    assert gelu_epilogue(gm) is gm


@pytest.mark.gpu
def test_numerics() -> None:
    """On CUDA the fused product is at least as close to float64 as the two operations."""
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = (torch.randn(s, device="cuda", generator=generator) for s in ((256, 64), (128, 64), (128,)))
        x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
        fused = torch.ops.aten._addmm_activation(b, x, w.t(), use_gelu=True)
        plain = F.gelu(F.linear(x, w, b), approximate="tanh")
        exact = F.gelu(F.linear(x.double(), w.double(), b.double()), approximate="tanh")
        assert (fused - exact).norm() <= 1.05 * (plain - exact).norm()


def test_a_linear_with_several_users_is_kept() -> None:
    """Its result is needed before the activation too."""

    def function(m, x, g):
        h = F.linear(x.bfloat16(), m.weight.bfloat16(), m.second[0].bfloat16())
        return F.gelu(h, approximate="tanh") + h

    gm = piece(function)
    assert gelu_epilogue(gm, device_type="cpu") is gm


def test_nested_chain() -> None:
    """Two layers in a row are both rewritten."""

    def function(m, x, g):
        return mlp(m, mlp(m, x, g), g)

    names = targets(gelu_epilogue(piece(function), device_type="cpu"))
    assert sum("_addmm_activation" in name for name in names) == 2
