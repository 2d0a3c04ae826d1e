"""residual_epilogue: sums of a product and a matrix in memory become one operator, same result; others are left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import aten_pieces, attend, dynamo_graph, metadata
from test_align_products import run, wide
from torch import Tensor, fx

from vitcg_backend import _torch, passes
from vitcg_backend.debug import Dump
from vitcg_backend.options import Options
from vitcg_backend.passes.graph import Symbols
from vitcg_backend.passes.measure_products import measure_products, products_of
from vitcg_backend.passes.residual_epilogue import residual_epilogue
from vitcg_backend.products import PRODUCT

aten = torch.ops.aten
HALF = torch.bfloat16


def operators(function: Callable[..., Tensor]) -> tuple[fx.GraphModule, Symbols]:
    """The one ATen piece of a function, its products operators."""
    (piece,), symbols = aten_pieces(function)
    return measure_products(piece, symbols=symbols, unusable=lambda device: None), symbols


def rows(x: Tensor) -> Tensor:
    """Rows of 256 elements."""
    return x.to(HALF).repeat(1, 32)


def linear(m: Any, x: Tensor) -> Tensor:
    """A layer over such rows."""
    w, b = wide(m, 256, 256, HALF)
    return F.linear(x, w, b)


def products(piece: fx.GraphModule) -> list[fx.Node]:
    """Its products."""
    return [node for node in piece.graph.nodes if node.target is PRODUCT]


def fused(piece: fx.GraphModule) -> list[bool]:
    """Of each product, whether something is added in its epilogue."""
    return [node.args[4] is not None for node in products(piece)]


def _chain(m: Any, x: Tensor, g: Tensor) -> Tensor:
    """A block as transformers writes it: the residual first, then the branch."""
    first = linear(m, rows(x))
    second = first + linear(m, first.relu())
    return second + linear(m, second.relu())


def _several_users(m: Any, x: Tensor, g: Tensor) -> Tensor:
    first = linear(m, rows(x))
    total = linear(m, first.relu()) + first
    return total.relu() + total.sin() + first.cos()


def _both_products(m: Any, x: Tensor, g: Tensor) -> Tensor:
    first = linear(m, rows(x))
    return linear(m, first.relu()) + linear(m, first.sin())


REWRITTEN = {"chain": (_chain, [False, True, True]), "users": (_several_users, [False, True]), "both": (_both_products, None)}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewrites(name: str) -> None:
    """Each sum goes into its product with the same result, whoever reads the residual and the sum, with no guard on n."""
    function, expected_fused = REWRITTEN[name]
    piece, symbols = operators(function)
    expected = run(piece).clone()
    guards, number = len(symbols.shape_env.guards), len(products(piece))
    new = residual_epilogue(piece, symbols=symbols)
    assert new is piece
    assert len(symbols.shape_env.guards) == guards
    assert len(products(new)) == number
    assert fused(new) == expected_fused if expected_fused is not None else sum(fused(new)) == 1
    assert [product.added for _, product in products_of(new, symbols)] == fused(new)
    torch.testing.assert_close(run(new), expected, rtol=0, atol=0)  # a CPU rounds twice, as before


def _attended(m: Any, x: Tensor, g: Tensor) -> Tensor:
    hidden = linear(m, rows(x))
    return hidden + linear(m, attend(hidden, metadata("boundaries", g)))


def test_an_input_of_a_piece_is_a_residual() -> None:
    """What the piece before has left in memory is added in the epilogue."""
    pieces, symbols = aten_pieces(_attended)
    pieces = [measure_products(piece, symbols=symbols, unusable=lambda device: None) for piece in pieces]
    assert [fused(residual_epilogue(piece, symbols=symbols)) for piece in pieces] == [[False], [True]]


def _computed(m: Any, x: Tensor, g: Tensor) -> Tensor:
    return linear(m, rows(x)) + rows(x).sin()


def _product_read_twice(m: Any, x: Tensor, g: Tensor) -> Tensor:
    first = linear(m, rows(x))
    second = linear(m, first.relu())
    return (first + second) * second


def _scaled(m: Any, x: Tensor, g: Tensor) -> Tensor:
    first = linear(m, rows(x))
    return torch.add(first, linear(m, first.relu()), alpha=2)


def _twice(m: Any, x: Tensor, g: Tensor) -> Tensor:
    first = linear(m, rows(x))
    return first + first


def _activated(m: Any, x: Tensor, g: Tensor) -> Tensor:
    w, b = wide(m, 256, 256, HALF)
    first = linear(m, rows(x))
    return first + aten._addmm_activation(b, first.relu(), w.t(), use_gelu=True)


def _other_dtype(m: Any, x: Tensor, g: Tensor) -> Tensor:
    return linear(m, rows(x)) + linear(m, rows(x).relu()).float()


def _one_row(m: Any, x: Tensor, g: Tensor) -> Tensor:
    _, b = wide(m, 256, 256, HALF)
    return linear(m, rows(x)) + b


LEFT_ALONE = {
    "computed in passing": _computed,
    "the product is read twice": _product_read_twice,
    "scaled": _scaled,
    "itself": _twice,
    "an activation": _activated,
    "another dtype": _other_dtype,
    "one row": _one_row,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name: str) -> None:
    """The same object, the same nodes, no new assumption about n."""
    piece, symbols = operators(LEFT_ALONE[name])
    before, guards = list(piece.graph.nodes), len(symbols.shape_env.guards)
    assert products(piece), "a product is what this is about"
    assert residual_epilogue(piece, symbols=symbols) is piece
    assert list(piece.graph.nodes) == before
    assert len(symbols.shape_env.guards) == guards


def test_by_default_and_not_with_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body's products add their residuals, but with ``matmul="torch"`` and in pieces that run eagerly."""
    monkeypatch.setattr(passes, "measure_products", functools.partial(measure_products, unusable=lambda device: None))
    monkeypatch.setattr(_torch, "compile_piece", lambda gm, mode: gm.forward)

    def added(**options: Any) -> list[bool]:
        body = passes.compile_body(
            dynamo_graph(_chain), (), options=Options.parse(options), cache=passes.PieceCache(), dump=Dump(None)
        )
        return [product.added for product in body.products_at(6)]

    assert added() == [False, True, True]
    assert added(matmul="torch") == []
    assert added(inner="eager") == []
