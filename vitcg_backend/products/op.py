"""`vitcg::product`: a linear layer as an operator of ours, so that a capture can choose its kernel.

Outside of `using` it is what `default` says, and costs the host a few microseconds more than torch's own. It has no gradients:
only pieces that run without them have it. Importing this module registers the operator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from . import cublaslt, triton_product
from .default import default
from .shape import Product
from .triton_product import Tile

__all__ = ["PRODUCT", "Kernel", "launch", "reads", "using"]

Kernel = cublaslt.Algorithm | Tile
"""What may run a product instead of the default."""

_LIBRARY = torch.library.Library("vitcg", "FRAGMENT")
_LIBRARY.define(
    "product(Tensor x, Tensor weight, Tensor? bias, bool gelu, Tensor? added) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("product", torch.library.fallthrough_kernel, "Autograd")

PRODUCT = torch.ops.vitcg.product.default


class _Chosen(threading.local):
    """What the current thread runs at present instead of the default."""

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


def reads(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> bool:
    """Whether a kernel can read these where they lie."""
    if isinstance(kernel, Tile):
        return added is None and triton_product.reads(x, weight, bias)
    return cublaslt.reads(x, weight, bias, added)


def launch(
    kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, added: Tensor | None, out: Tensor
) -> None:
    """Run a product in a kernel; see `cublaslt.launch` and `triton_product.launch`, which adds nothing."""
    if isinstance(kernel, Tile):
        triton_product.launch(kernel, x, weight, bias, gelu, out)
    else:
        cublaslt.launch(kernel, x, weight, bias, gelu, added, out)


@torch.library.impl(_LIBRARY, "product", "CPU")
def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, added: Tensor | None) -> Tensor:
    result = functional.linear(x, weight, bias)
    if gelu:  # torch's fused one takes the other formula on a CPU
        result = functional.gelu(result, approximate="tanh")
    return result if added is None else result + added


@torch.library.impl(_LIBRARY, "product", "CUDA")
def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, added: Tensor | None) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if _chosen.kernels:
        product = Product(x.shape[0], weight.shape[0], x.shape[1], x.dtype, bias is not None, gelu, added is not None)
        kernel = _chosen.kernels.get(product)
        if kernel is not None and reads(kernel, x, weight, bias, added):
            launch(kernel, x, weight, bias, gelu, added, out)
            return out
    return default(x, weight, bias, gelu, added, out)


@torch.library.register_fake("vitcg::product", lib=_LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, added: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
