"""Rewrite: a matrix product whose sizes are no multiples of 16 bytes is done on padded matrices.

Why: Hopper's fast kernels load tiles whose rows begin at multiples of 16 bytes. The MLP of Qwen2.5-VL is 3420 wide, four
bfloat16 elements short of that, and cuBLAS takes a kernel that does 220 TFLOP/s at 6400 patches on an H200, where a large
product does 790: 24 of the 32 ms of the tower's graph, which takes 18 ms with padded products. Aligning the rows in memory
changes nothing, the sizes themselves have to fit.

The weights are copied in every run and never kept: so an edit of them is seen by the next replay. The activation is padded by
the kernel that computes it.

Numerics: zeros are added to the sums, which changes none; another kernel sums in another order: within the error budget,
not bit-equal. It changes no piece that runs eagerly.

Cases: 1. products of matrices with a transposed weight of at least 256 x 256, on CUDA in bfloat16 and float16. 2. A bias that
is spread over the outputs is left alone. 3. So is every product of a graph that reads memory by strides: the rows of a result
lie further apart afterwards, and such an operation was traced for the rows as they lay.

Before::

    # x: [4n, 1280], w: [3420, 1280], b: [3420]
    %y = aten.addmm(%b, %x, aten.permute(%w, [1, 0]))

After::

    %w2 = aten.constant_pad_nd(%w, [0, 0, 0, 4]);  %b2 = aten.constant_pad_nd(%b, [0, 4])
    %y2 = aten.addmm(%b2, %x, aten.permute(%w2, [1, 0]));  %y = aten.slice(%y2, 1, 0, 3420)
"""

from __future__ import annotations

import torch
from torch import fx

from .graph import adding_before, reads_by_strides, rewrite_each

__all__ = ["align_products"]

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten._addmm_activation.default: 1}  # -> position of the first matrix
_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # elements of half precision in 16 bytes
_LEAST = 256


def align_products(gm: fx.GraphModule, *, device_type: str = "cuda") -> fx.GraphModule:
    """Rewrite every such product (see the module's text); a graph without one comes back as the same object.

    Args:
        gm: an ATen piece with ``meta["val"]``. It is changed.
        device_type: where the rewrite holds.
    """
    products = [] if reads_by_strides(gm) else [node for node in gm.graph.nodes if node.target in _PRODUCTS]
    matches = [node for node in products if _matches(node, device_type)]
    return rewrite_each(gm, matches, _rewrite)


def _matches(node: fx.Node, device_type: str) -> bool:
    first = _PRODUCTS[node.target]
    turned = node.args[first + 1]
    value = node.meta["val"]
    if not _turns(turned) or value.device.type != device_type or value.dtype not in _HALF:
        return False
    sizes = turned.args[0].meta["val"].shape
    if first and tuple(node.args[0].meta["val"].shape) != (sizes[0],):  # what is added is no bias of one number an output
        return False
    if not all(isinstance(size, int) and size >= _LEAST for size in sizes):
        return False
    return any(size % _ALIGNED for size in sizes)


def _turns(node: fx.Node) -> bool:
    """Whether a node is the transpose of a matrix."""
    if node.target is aten.permute.default:
        return [axis % 2 for axis in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]  # a list of axes
    return node.target is aten.t.default


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    first = _PRODUCTS[node.target]
    source, weight = node.args[first], node.args[first + 1].args[0]
    outputs, inputs = weight.meta["val"].shape
    more_outputs, more_inputs = -outputs % _ALIGNED, -inputs % _ALIGNED
    with adding_before(node) as add:
        turned = add(aten.permute.default, add(aten.constant_pad_nd.default, weight, [0, more_inputs, 0, more_outputs]), [1, 0])
        if more_inputs:
            source = add(aten.constant_pad_nd.default, source, [0, more_inputs])
        bias = list(node.args[:first])
        if more_outputs:
            bias = [add(aten.constant_pad_nd.default, b, [0, more_outputs]) for b in bias]
        product = add(node.target, *bias, source, turned, **node.kwargs)
        result = add(aten.slice.Tensor, product, 1, 0, outputs) if more_outputs else product
    node.replace_all_uses_with(result)
    graph.erase_node(node)
