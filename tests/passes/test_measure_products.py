"""measure_products: products that our kernel could run become the operator, with the same result; all others are left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import aten_pieces, dynamo_graph
from test_align_products import products as library_products
from test_align_products import run, wide
from torch import Tensor, fx

from vitcg_backend import _torch, passes
from vitcg_backend.debug import Dump
from vitcg_backend.options import Options
from vitcg_backend.passes.graph import Symbols
from vitcg_backend.passes.measure_products import measure_products, products_of
from vitcg_backend.products import PRODUCT, Product

aten = torch.ops.aten
HALF = torch.bfloat16


def mlp(hidden: int = 264, dtype: torch.dtype = HALF, *, bias: bool = True) -> Callable[..., Tensor]:
    """Two layers over rows of 256 elements."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        (up, b), (down, d) = wide(m, hidden, 256, dtype), wide(m, 256, hidden, dtype)
        h = F.linear(x.to(dtype).repeat(1, 32), up, b if bias else None)
        return F.linear(h.relu(), down, d if bias else None)

    return function


def aten_of(function: Callable[..., Tensor]) -> tuple[fx.GraphModule, Symbols]:
    """The one ATen piece of a function."""
    (piece,), symbols = aten_pieces(function)
    return piece, symbols


def rewritten(piece: fx.GraphModule, symbols: Symbols) -> fx.GraphModule:
    """The rewrite as it is where our kernel runs."""
    return measure_products(piece, symbols=symbols, unusable=lambda device: None)


def count(piece: fx.GraphModule) -> int:
    """Products of ours."""
    return sum(node.target is PRODUCT for node in piece.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
def test_rewrites(bias: bool) -> None:
    """A chain of products becomes operators with the same results; their sizes are listed, and nothing is assumed of n."""
    piece, symbols = aten_of(mlp(bias=bias))
    expected = run(piece).clone()
    guards = len(symbols.shape_env.guards)
    new = rewritten(piece, symbols)
    assert len(symbols.shape_env.guards) == guards
    assert (count(new), library_products(new)) == (2, [])
    assert products_of(new, symbols) == [
        (1, Product(0, 264, 256, HALF, bias, False)),
        (1, Product(0, 256, 264, HALF, bias, False)),
    ]
    torch.testing.assert_close(run(new), expected, rtol=0, atol=0)


def test_an_activation_in_the_epilogue() -> None:
    """As `gelu_epilogue` leaves it: it goes with the product."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        w, b = wide(m, 264, 256, HALF)
        return aten._addmm_activation(b, x.to(HALF).repeat(1, 32), w.t(), use_gelu=True)

    piece, symbols = aten_of(function)
    new = rewritten(piece, symbols)
    assert products_of(new, symbols) == [(1, Product(0, 264, 256, HALF, True, True))]
    (node,) = (node for node in new.graph.nodes if node.target is PRODUCT)
    x, w, b = (torch.randn(size).to(HALF) for size in ((5, 256), (264, 256), (264,)))
    exact = F.gelu(F.linear(x.double(), w.double(), b.double()), approximate="tanh")
    result = node.target(x, w, b, *node.args[3:])
    torch.testing.assert_close(result.double(), exact, rtol=2e-2, atol=2e-2)
    assert (result - exact).norm() < (F.relu(F.linear(x, w, b)) - exact).norm()


def test_several_users() -> None:
    """All users of a product read the operator."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        w, b = wide(m, 264, 256, HALF)
        y = F.linear(x.to(HALF).repeat(1, 32), w, b)
        return y.relu() + y.sin()

    piece, symbols = aten_of(function)
    expected = run(piece).clone()
    new = rewritten(piece, symbols)
    (node,) = (node for node in new.graph.nodes if node.target is PRODUCT)
    assert len(node.users) == 2
    torch.testing.assert_close(run(new), expected, rtol=0, atol=0)


def _by_itself(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, _ = wide(m, 256, 256, HALF)
    return x.to(HALF).repeat(1, 32) @ w


def _one_bias(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 264, 256, HALF)
    return F.linear(x.to(HALF).repeat(1, 32), w, b[:1])


def _added_rows(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, _ = wide(m, 256, 256, HALF)
    rows = x.to(HALF).repeat(1, 32)
    return torch.addmm(rows, rows, w.t())


def _scaled(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 256, 256, HALF)
    return torch.addmm(b, x.to(HALF).repeat(1, 32), w.t(), alpha=2)


def _apart(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 256, 512, HALF)
    return F.linear(x.to(HALF).repeat(1, 32), w[:, ::2], b)


def _rows_apart(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 256, 256, HALF)
    return F.linear(x.to(HALF).repeat(1, 64)[:, ::2], w, b)


def _relu(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 256, 256, HALF)
    return aten._addmm_activation(b, x.to(HALF).repeat(1, 32), w.t())


LEFT_ALONE = {
    "odd sizes": mlp(260),
    "float32": mlp(dtype=torch.float32),
    "small": mlp(128),
    "not transposed": _by_itself,
    "one bias for all": _one_bias,
    "a bias for each row": _added_rows,
    "scaled": _scaled,
    "weights apart": _apart,
    "rows apart": _rows_apart,
    "another activation": _relu,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name: str) -> None:
    """The same object, the same nodes, no new assumption about n."""
    piece, symbols = aten_of(LEFT_ALONE[name])
    before, guards = list(piece.graph.nodes), len(symbols.shape_env.guards)
    assert library_products(piece), "a product is what this is about"
    assert rewritten(piece, symbols) is piece
    assert list(piece.graph.nodes) == before
    assert len(symbols.shape_env.guards) == guards
    assert products_of(piece, symbols) == []


def test_other_devices_are_left_alone() -> None:
    """A CPU has no kernel of ours: the same object, the same nodes."""
    piece, symbols = aten_of(mlp())
    before = list(piece.graph.nodes)
    assert measure_products(piece, symbols=symbols) is piece
    assert list(piece.graph.nodes) == before


def test_a_body_knows_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their rows at each size; with ``matmul="torch"`` and in eager pieces there are none."""
    monkeypatch.setattr(passes, "measure_products", functools.partial(measure_products, unusable=lambda device: None))
    monkeypatch.setattr(_torch, "compile_piece", lambda gm, mode: gm.forward)
    cache = passes.PieceCache()

    def sizes(**options: Any) -> list[tuple[int, int, int]]:
        graph = dynamo_graph(mlp())
        body = passes.compile_body(graph, (), options=Options.parse(options), cache=cache, dump=Dump(None))
        assert body.refusal is None
        assert body.tiles == (options.get("matmul") == "max-autotune")
        return [(product.rows, product.outputs, product.inputs) for product in body.products_at(6)]

    assert sizes() == [(6, 264, 256), (6, 256, 264)]
    assert sizes(matmul="max-autotune") == [(6, 264, 256), (6, 256, 264)]
    assert sizes(matmul="torch") == []
    assert sizes(inner="eager") == []
    assert cache.compiled == 3
