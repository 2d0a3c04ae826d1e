"""Torch's own product, which runs where nothing was chosen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["library"]


def library(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> Tensor:
    """Torch's product into `out`; arguments as `cublaslt.launch` takes them, a GELU only with a bias.

    Into a given result, as compiled code calls it: that is what autocast leaves alone.
    """
    turned = weight.t()
    if bias is None:
        return torch.mm(x, turned, out=out)
    if gelu:
        return torch.ops.aten._addmm_activation.out(bias, x, turned, use_gelu=True, out=out)
    return torch.addmm(bias, x, turned, out=out)
