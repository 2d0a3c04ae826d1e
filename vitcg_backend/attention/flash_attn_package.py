"""The flash-attn package: FlashAttention 3 on Hopper where its package is installed, else FlashAttention 2.

As with torch's own kernels the launch grid grows with ``longest`` and ``segments``, and rows of no segment stay unwritten.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import CuSeqlensKernel, SegmentBounds, check_tensors, check_values, half_unusable

__all__ = ["FlashAttnKernel"]

_HOPPER = "flash_attn_interface"  # the module of FlashAttention 3; it has no package around it
_ANY = "flash_attn"


@functools.cache
def _import(module: str) -> tuple[Callable[..., Any] | None, str | None]:
    """`flash_attn_varlen_func` of a module, or why there is none."""
    if find_spec(module) is None:
        return None, f"the module {module} is not installed"
    try:
        return importlib.import_module(module).flash_attn_varlen_func, None
    except Exception as error:  # built for another torch, say: more than an ImportError
        return None, f"{module} cannot be imported ({type(error).__name__}: {error})"


def _function(device: torch.device) -> tuple[Callable[..., Any] | None, str | None]:
    """The function for a device, or why there is none."""
    if torch.cuda.get_device_capability(device) == (9, 0):
        function, _ = _import(_HOPPER)
        if function is not None:
            return function, None
    return _import(_ANY)


class FlashAttnKernel(CuSeqlensKernel):
    """`flash_attn_varlen_func` of the flash-attn package."""

    name: ClassVar[str] = "flash_attn"

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Half precision on CUDA with compute capability 8.0, head sizes in steps of 8 up to 256, and the package."""
        # Other head sizes it copies into padded tensors.
        return half_unusable("flash-attn", device, dtype, head_dim, 256) or _function(device)[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`, for values of the same head size as the keys."""
        check_tensors(q, k, v, bounds.rows)
        check_values(self.name, q, v)
        if bounds.rows == 0:
            return q.new_empty(q.shape)
        function, reason = _function(q.device)
        if function is None:
            raise RuntimeError(reason)
        return _call(function, q, k, v, metadata, bounds.longest, scale)


def _call(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    """One call, written so that it means the same to FlashAttention 2 and 3: what comes seventh differs between them."""
    # With a bound of 1 and grouped-query heads FlashAttention 2 expects one row in each segment (csrc/flash_attn/flash_api.cpp,
    # `seqlenq_ngroups_swapped`, 2.8.3); empty ones have none.
    longest = max(longest, 2)
    with torch.no_grad():  # nothing is kept for a backward, which pieces have none of
        out = function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=False)
    # Early releases of FlashAttention 3 return the logarithms of the sums, too.
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result.contiguous()
