"""align_products: products of odd sizes run on padded matrices, with the same result; all others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import aten_pieces
from torch import Tensor, fx

from vitcg_backend.passes.align_products import align_products

aten = torch.ops.aten


def wide(m: Any, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [outputs, inputs] and a bias [outputs] made of a module's parameters."""
    weight = m.weight.to(dtype)
    return weight[0, 0] + torch.zeros(outputs, inputs, dtype=dtype), weight[0, :1].expand(outputs)


def mlp(hidden: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> Callable[..., Tensor]:
    """A gated MLP of that width over rows of 256 elements."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        rows = x.to(dtype).repeat(1, 32)
        (gate, b), (down, d) = wide(m, hidden, 256, dtype), wide(m, 256, hidden, dtype)
        h = F.silu(F.linear(rows, gate, b if bias else None)) * F.linear(rows, gate * 2, b if bias else None)
        return F.linear(h, down, d if bias else None)

    return function


def aten_of(function: Callable[..., Tensor]) -> fx.GraphModule:
    """The one ATen piece of a function."""
    (piece,), _ = aten_pieces(function)
    return piece


def run(piece: fx.GraphModule, rows: int = 5) -> Tensor:
    """The first result of a piece on seeded inputs."""
    torch.manual_seed(0)
    inputs: list[Any] = [rows]
    for node in piece.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], Tensor):
            shape = [rows if not isinstance(s, int) else s for s in node.meta["val"].shape]
            inputs.append((torch.randn(shape) / 16).to(node.meta["val"].dtype))
    return piece(*inputs)[0]


def products(piece: fx.GraphModule) -> list[tuple[int, int]]:
    """(inputs, outputs) of every product."""
    targets = (aten.mm.default, aten.addmm.default, aten._addmm_activation.default)
    found = [node.args[-1].meta["val"].shape for node in piece.graph.nodes if node.target in targets]
    return [(int(shape[0]), int(shape[1])) for shape in found]


@pytest.mark.parametrize("bias", [True, False])
def test_rewrites(bias: bool) -> None:
    """Inputs and outputs of 260 become 264; the results are the same."""
    piece = aten_of(mlp(260, bias=bias))
    expected = run(piece).clone()
    assert products(piece) == [(256, 260), (256, 260), (260, 256)]
    shape_env = next(node.meta["val"].fake_mode.shape_env for node in piece.graph.nodes if "mm" in node.name)
    guards = len(shape_env.guards)
    align_products(piece, device_type="cpu")
    assert len(shape_env.guards) == guards  # right for any number of rows
    assert products(piece) == [(256, 264), (256, 264), (264, 256)]
    torch.testing.assert_close(run(piece), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize(("hidden", "dtype"), [(264, torch.bfloat16), (260, torch.float32), (20, torch.bfloat16)])
def test_what_is_left_alone(hidden: int, dtype: torch.dtype) -> None:
    """Sizes that fit, float32, small products, and other devices: the same object, the same nodes."""
    piece = aten_of(mlp(hidden, dtype))
    before = list(piece.graph.nodes)
    assert align_products(piece, device_type="cpu") is piece
    assert list(piece.graph.nodes) == before
    odd = aten_of(mlp(260))
    before = list(odd.graph.nodes)
    assert align_products(odd) is odd
    assert list(odd.graph.nodes) == before


def test_an_activation_in_the_epilogue_stays() -> None:
    """As `gelu_epilogue` leaves it."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        w, b = wide(m, 260, 256, torch.bfloat16)
        return aten._addmm_activation(b, x.bfloat16().repeat(1, 32), w.t(), use_gelu=True)

    piece = aten_of(function)
    expected = run(piece).clone()
    align_products(piece, device_type="cpu")
    assert products(piece) == [(256, 264)]
    torch.testing.assert_close(run(piece), expected, rtol=2e-2, atol=2e-2)


def _as_it_is(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, _ = wide(m, 260, 260, torch.bfloat16)
    return x.bfloat16().repeat(1, 33)[:, :260] @ w.permute(0, 1)


def _one_bias(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 260, 256, torch.bfloat16)
    return F.linear(x.bfloat16().repeat(1, 32), w, b[:1])


def _by_strides(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 260, 256, torch.bfloat16)
    y = F.linear(x.bfloat16().repeat(1, 32), w, b)
    return torch.as_strided(y, y.shape, y.stride())


@pytest.mark.parametrize("function", [_as_it_is, _one_bias, _by_strides])
def test_what_only_looks_alike(function: Callable[..., Tensor]) -> None:
    """A permutation that turns nothing, one bias for all outputs, a result read by its strides: left as they are."""
    piece = aten_of(function)
    before = list(piece.graph.nodes)
    assert products(piece), "a product is what this is about"
    assert align_products(piece, device_type="cpu") is piece
    assert list(piece.graph.nodes) == before


@pytest.mark.gpu
def test_numerics() -> None:
    """On CUDA the padded product is at least as close to float64 as the product itself."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w, b = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in ((512, 3420), (1280, 3420), (1280,)))
    padded = torch.addmm(b, F.pad(x, (0, 4)), F.pad(w, (0, 4)).t())
    exact = F.linear(x.double(), w.double(), b.double())
    assert (padded - exact).norm() <= 1.05 * (F.linear(x, w, b) - exact).norm()
