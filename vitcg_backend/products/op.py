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

from . import cublaslt, triton_product
from .library import library
from .shape import Product
from .triton_product import Tile

__all__ = ["PRODUCT", "Kernel", "launch", "using"]

Kernel = cublaslt.Algorithm | Tile
"""What may run a product instead of torch's own."""

_LIBRARY = torch.library.Library("vitcg", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias, bool gelu) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("product", torch.library.fallthrough_kernel, "Autograd")

PRODUCT = torch.ops.vitcg.product.default


class _Chosen(threading.local):
    """What the current thread runs at present instead of torch's own products."""

    kernels: Mapping[Product, Kernel] | None = None


_chosen = _Chosen()


@contextlib.contextmanager
def using(kernels: Mapping[Product, Kernel]) -> Iterator[None]:
    """Inside, on this thread, products that are in `kernels` run in what is there."""
    before, _chosen.kernels = _chosen.kernels, kernels
    try:
        yield
    finally:
        _chosen.kernels = before


def launch(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> None:
    """Run a product in a kernel; see `cublaslt.launch` and `triton_product.launch`."""
    if isinstance(kernel, Tile):
        triton_product.launch(kernel, x, weight, bias, gelu, out)
    else:
        cublaslt.launch(kernel, x, weight, bias, gelu, out)


@torch.library.impl(_LIBRARY, "product", "CPU")
def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    result = functional.linear(x, weight, bias)
    return functional.gelu(result, approximate="tanh") if gelu else result  # torch's fused one takes the other formula on a CPU


@torch.library.impl(_LIBRARY, "product", "CUDA")
def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if _chosen.kernels:
        kernel = _chosen.kernels.get(Product(x.shape[0], weight.shape[0], x.shape[1], x.dtype, bias is not None, gelu))
        if kernel is not None and cublaslt.reads(x, weight, bias):  # which is what ours can read
            launch(kernel, x, weight, bias, gelu, out)
            return out
    return library(x, weight, bias, gelu, out)


@torch.library.register_fake("vitcg::product", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
