"""What runs a product where nothing was chosen: torch's own calls, and cublasLt where they have no epilogue for it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cublaslt

__all__ = ["default", "library"]


def library(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor, added: Tensor | None = None) -> Tensor:
    """Torch's own product into `out`; arguments as `cublaslt.launch` takes them, a GELU only with a bias.

    Into a given result, as compiled code calls it: that is what autocast leaves alone.
    """
    turned = weight.t()
    if bias is None:
        torch.mm(x, turned, out=out)
    elif gelu:
        torch.ops.aten._addmm_activation.out(bias, x, turned, use_gelu=True, out=out)
    else:
        torch.addmm(bias, x, turned, out=out)
    return out if added is None else out.add_(added)


def default(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, added: Tensor | None, out: Tensor) -> Tensor:
    """The same, a matrix that is added in the epilogue where cublasLt does that."""
    fused = added is not None and cublaslt.unusable(x.device) is None and cublaslt.reads(x, weight, bias, added)
    if fused and cublaslt.launch(None, x, weight, bias, gelu, added, out):
        return out
    return library(x, weight, bias, gelu, out, added)
