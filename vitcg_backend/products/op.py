"""`vitcg::product`: a linear layer as an operator of ours, so that a capture can choose its kernel.

Outside of `using` it is torch's own product, and costs the host a few microseconds more than that. It has no gradients: only
pieces that run without them have it. Importing this module registers the operator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .measure import library
from .shape import Product
from .triton_product import Tile, launch, reads

__all__ = ["PRODUCT", "using"]

_LIBRARY = torch.library.Library("vitcg", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias, bool gelu) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("product", torch.library.fallthrough_kernel, "Autograd")

PRODUCT = torch.ops.vitcg.product.default


class _Chosen(threading.local):
    """What the current thread runs at present instead of torch's own products."""

    tiles: Mapping[Product, Tile] | None = None


_chosen = _Chosen()


@contextlib.contextmanager
def using(tiles: Mapping[Product, Tile]) -> Iterator[None]:
    """Inside, on this thread, products that are in `tiles` run in Triton."""
    before, _chosen.tiles = _chosen.tiles, tiles
    try:
        yield
    finally:
        _chosen.tiles = before


@torch.library.impl(_LIBRARY, "product", "CPU")
def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    result = functional.linear(x, weight, bias)
    return functional.gelu(result, approximate="tanh") if gelu else result  # torch's fused one takes the other formula on a CPU


@torch.library.impl(_LIBRARY, "product", "CUDA")
def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if _chosen.tiles:
        tile = _chosen.tiles.get(Product(x.shape[0], weight.shape[0], x.shape[1], x.dtype, bias is not None, gelu))
        if tile is not None and reads(x, weight, bias):
            launch(tile, x, weight, bias, gelu, out)
            return out
    return library(x, weight, bias, gelu, out)


@torch.library.register_fake("vitcg::product", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
