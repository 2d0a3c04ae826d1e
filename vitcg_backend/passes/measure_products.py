"""Rewrite: a matrix product is an operator whose kernel a capture chooses by the clock.

Why: cuBLAS picks its kernel by rules, and at many sizes another of its own is faster: on an H200 by up to 8 % at 8000 rows of
a Qwen3-VL tower, 17 % at 16128. All sizes are known when a bucket is captured, so each product is timed once for each of
them, and runs in what was fastest (`vitcg_backend.products`). Uncaptured calls, of any size, run torch's own.

Numerics: the same sums in float32, added up in another order where another kernel runs: within the error budget, not
bit-equal, and by a clock, whose choices are kept on disk; without that file two processes may differ.
`torch.use_deterministic_algorithms` keeps torch's own. It changes no piece that runs eagerly.

Preconditions: after `align_products`, which makes sizes multiples of 16 bytes.

Cases: 1. `mm` and `addmm`, and `_addmm_activation` as `gelu_epilogue` leaves it, of rows by a transposed weight of at least
256 x 256, sizes that are multiples of 8, in bfloat16 or float16, where cublasLt can be called. 2. A bias is one number
an output, unscaled, else the product is left alone. 3. So is one whose matrices do not lie row after row.

Before::

    # x: bf16[4n, 1152], w: bf16[4304, 1152], b: bf16[4304]
    %y = aten._addmm_activation(%b, %x, aten.permute(%w, [1, 0]), use_gelu = True)

After::

    %y = vitcg.product(%x, %w, %b, True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..products import PRODUCT, Product
from ..products.cublaslt import unusable
from .graph import Symbols, adding_before, rewrite_each

__all__ = ["measure_products", "products_of"]

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten._addmm_activation.default: 1}  # -> position of the first matrix
_TURNS = (aten.permute.default, aten.t.default)
_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # elements of half precision in 16 bytes
_LEAST = 256


def measure_products(
    gm: fx.GraphModule, *, symbols: Symbols, unusable: Callable[[torch.device], str | None] = unusable
) -> fx.GraphModule:
    """Rewrite every such product (see the module's text); a graph without one comes back as the same object.

    Args:
        gm: an ATen piece with ``meta["val"]``. It is changed.
        symbols: those of its sizes.
        unusable: why cublasLt cannot be called on a device, None where it can.
    """
    matches = [node for node in gm.graph.nodes if node.target in _PRODUCTS and _matches(node, symbols)]
    matches = [node for node in matches if unusable(node.meta["val"].device) is None]
    return rewrite_each(gm, matches, _rewrite)


def products_of(gm: fx.GraphModule, symbols: Symbols) -> list[tuple[int, Product]]:
    """The products that `measure_products` has left in a graph, each with its rows for each n (and none of its own)."""
    found = []
    for node in gm.graph.nodes:
        if node.target is PRODUCT:
            x, weight, bias, gelu = node.args
            rows, (outputs, inputs) = _rows_of(x.meta["val"], symbols), weight.meta["val"].shape
            assert rows is not None  # else it had not been rewritten
            found.append((rows, Product(0, outputs, inputs, x.meta["val"].dtype, bias is not None, gelu)))
    return found


def _matches(node: fx.Node, symbols: Symbols) -> bool:
    first = _PRODUCTS[node.target]
    source, turned = node.args[first : first + 2]
    if turned.target not in _TURNS or (turned.target is aten.permute.default and list(turned.args[1]) != [1, 0]):
        return False
    if node.kwargs != ({"use_gelu": True} if node.target is aten._addmm_activation.default else {}):
        return False
    x, weight = source.meta["val"], turned.args[0].meta["val"]
    outputs, inputs = weight.shape
    if x.dtype not in _HALF or _rows_of(x, symbols) is None:
        return False
    if not all(isinstance(size, int) and size >= _LEAST and size % _ALIGNED == 0 for size in (outputs, inputs)):
        return False
    if first and not _is(node.args[0].meta["val"].shape, [outputs]):  # what is added is no bias of one number an output
        return False
    return _is(x.stride(), [inputs, 1]) and _is(weight.stride(), [inputs, 1])


def _is(sizes: Sequence[Any], expected: list[int]) -> bool:
    """Whether sizes are these numbers, asked without a guard on those that are none."""
    return all(isinstance(size, int) for size in sizes) and list(sizes) == expected


def _rows_of(x: Tensor, symbols: Symbols) -> int | None:
    """The c of a matrix of c * n rows, else None."""
    form = symbols.linear(x.shape[0])
    return form[0] if form is not None and form[0] > 0 and form[1] == 0 else None


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    first = _PRODUCTS[node.target]
    bias = node.args[0] if first else None
    with adding_before(node) as add:
        product = add(PRODUCT, node.args[first], node.args[first + 1].args[0], bias, bool(node.kwargs))
    node.replace_all_uses_with(product)
    graph.erase_node(node)
