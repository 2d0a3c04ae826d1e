"""Rewrite: a residual is added in the epilogue of the matrix product whose result it is added to.

Why: the sum is otherwise made by the layer norm that follows, which reads both terms, and writes the sum for the next
residual: at 6272 patches of a Qwen3-VL tower on an H200 the two norms of a layer take 39 of 486 us. CublasLt reads the residual
while the product is in registers, which takes it 1 to 2 us more, and the norms have one matrix to read and one to write.

Numerics: product, bias and residual are added up in float32 and rounded once, instead of twice: within the error budget.

Preconditions: after `measure_products`, whose operator has the epilogue.

Cases: 1. the sum of a `vitcg.product` without an activation, of which it is the only user, and of a matrix of the same sizes
and dtype, row after row. 2. A matrix that is itself computed in passing (positions, say) is left to be fused with the sum:
only an input of the piece or another product is in memory anyway. 3. A scaled sum is left alone.

Before::

    # x: bf16[4n, 4304], w: bf16[1152, 4304], b: bf16[1152], r: bf16[4n, 1152]
    %y = vitcg.product(%x, %w, %b, False, None)
    %s = aten.add(%r, %y)

After::

    %s = vitcg.product(%x, %w, %b, False, %r)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..products import PRODUCT
from .graph import Symbols, adding_before

__all__ = ["residual_epilogue"]

aten = torch.ops.aten


def residual_epilogue(gm: fx.GraphModule, *, symbols: Symbols) -> fx.GraphModule:
    """Rewrite every such sum (see the module's text); a graph without one comes back as the same object.

    Args:
        gm: an ATen piece with ``meta["val"]``. It is changed.
        symbols: those of its sizes.
    """
    rewritten = False
    for node in list(gm.graph.nodes):  # in order: the sum of one layer, a product by now, is the residual of the next
        terms = _terms(node, symbols)
        if terms is not None:
            _rewrite(gm.graph, node, *terms)
            rewritten = True
    if rewritten:
        gm.graph.lint()
        gm.recompile()
    return gm


def _terms(node: fx.Node, symbols: Symbols) -> tuple[fx.Node, fx.Node] | None:
    """The product and the residual of a sum, None where it is no such sum."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for product, residual in (node.args, node.args[::-1]):
        nodes = isinstance(product, fx.Node) and isinstance(residual, fx.Node)
        if nodes and _takes(product, residual, symbols):  # type: ignore[arg-type]  # both nodes
            return product, residual  # type: ignore[return-value]
    return None


def _takes(product: fx.Node, residual: fx.Node, symbols: Symbols) -> bool:
    if product.target is not PRODUCT or len(product.users) != 1 or product is residual:
        return False
    _, _, _, gelu, added = product.args
    if gelu or added is not None or not (residual.op == "placeholder" or residual.target is PRODUCT):
        return False
    result, other = product.meta["val"], residual.meta["val"]
    return (
        isinstance(other, torch.Tensor)
        and other.dtype == result.dtype
        and other.device == result.device
        and other.dim() == 2
        and _sizes(other, symbols) == _sizes(result, symbols)
        and list(other.stride()) == [other.shape[1], 1]
    )


def _sizes(value: torch.Tensor, symbols: Symbols) -> list[Any]:
    """Sizes as multiples of n, which compare without a guard."""
    return [symbols.linear(size) for size in value.shape]


def _rewrite(graph: fx.Graph, node: fx.Node, product: fx.Node, residual: fx.Node) -> None:
    x, weight, bias, gelu, _ = product.args
    with adding_before(node) as add:
        fused = add(PRODUCT, x, weight, bias, gelu, residual)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    graph.erase_node(product)
