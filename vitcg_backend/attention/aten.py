"""Torch's own varlen kernels on CUDA: FlashAttention 2 for half precision, the memory-efficient kernel for float32.

Both launch a grid for ``longest`` rows times ``segments`` segments, whatever the segments are: a bound far from the
truth costs many times the work itself, so these kernels want tiered bounds (`VarlenKernel.needs_longest`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import CuSeqlensKernel, SegmentBounds, check_tensors, check_values, half_unusable

__all__ = [
    "MemEfficientKernel",
    "TorchFlashKernel",
    "efficient_unusable",
    "efficient_varlen",
    "flash_unusable",
    "flash_varlen",
    "flash_varlen_backward",
]

_HALF = (torch.float16, torch.bfloat16)


def flash_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's varlen FlashAttention 2 cannot run, or None."""
    reason = half_unusable("torch's FlashAttention", device, dtype, head_dim, 256)
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    return reason


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    """``[rows, heads, head_dim]`` attention by torch's FlashAttention 2; no copy of q, k or v, no wait for the device.

    Args:
        q: float16 or bfloat16 ``[rows, heads, head_dim]``; k and v likewise, grouped-query heads allowed.
        k: see q.
        v: see q, with the same head size.
        cu_seqlens: int32 ``[segments + 1]`` on the device, last entry = rows (other rows stay unwritten).
        longest: bound of the rows of a segment; the launch grid grows with it.
        scale: factor of the scores; None = ``head_dim ** -0.5``.
    """
    return _flash_forward(q, k, v, cu_seqlens, longest, scale)[0].contiguous()


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> tuple[Tensor, ...]:
    # With a bound of 1 and grouped-query heads the kernel takes its decoding path, which expects one row in each
    # segment; empty ones have none (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    # `seqlenq_ngroups_swapped`).
    longest = max(longest, 2)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, False, False, scale=scale
    )


def flash_varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_varlen` with respect to q, k and v, from a recomputed forward; arguments as there."""
    longest = max(longest, 2)
    out, logsumexp, rng_state, unused, _ = _flash_forward(q, k, v, cu_seqlens, longest, scale)
    gradients = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, logsumexp, cu_seqlens, cu_seqlens, longest, longest, 0.0, False,
        rng_state, unused, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.contiguous() for x in gradients)
    return dq, dk, dv


def efficient_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's varlen memory-efficient attention cannot run, or None."""
    if device.type != "cuda":
        return f"torch's memory-efficient attention needs a CUDA device, not {device.type}"
    if dtype not in (*_HALF, torch.float32):
        return f"torch's memory-efficient attention needs float32, float16 or bfloat16, not {dtype}"
    multiple = 16 // dtype.itemsize  # the kernel loads 16 bytes at a time
    if head_dim % multiple or head_dim <= 0:
        return f"torch's memory-efficient attention needs a head size that is a multiple of {multiple}, not {head_dim}"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return f"bfloat16 attention needs compute capability 8.0 or more ({torch.cuda.get_device_name(device)})"
    return None


def efficient_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    """As `flash_varlen`, by torch's memory-efficient kernel: also float32, and values of another size than the keys.

    The kernel knows no grouped-query heads: k and v with fewer heads than q are copied for it.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = torch.ops.aten._efficient_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, cu_seqlens, cu_seqlens, longest, longest, 0.0, 0, False,
        scale=scale,
    )[0]  # fmt: skip
    return out.squeeze(0).contiguous()


class TorchFlashKernel(CuSeqlensKernel):
    """Torch's FlashAttention 2, varlen."""

    name: ClassVar[str] = "torch"

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Half precision on CUDA with compute capability 8.0, head sizes in steps of 8 up to 256."""
        return flash_unusable(device, dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`, for values of the same head size as the keys."""
        check_tensors(q, k, v, bounds.rows)
        check_values(self.name, q, v)
        if bounds.rows == 0:
            return q.new_empty(q.shape)
        return flash_varlen(q, k, v, metadata, bounds.longest, scale)


class MemEfficientKernel(CuSeqlensKernel):
    """Torch's memory-efficient attention, varlen."""

    name: ClassVar[str] = "mem_efficient"

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """float32, float16, bfloat16 on CUDA, head sizes that are a multiple of 16 bytes."""
        return efficient_unusable(device, dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`."""
        check_tensors(q, k, v, bounds.rows)
        if bounds.rows == 0:
            return q.new_empty((0, q.shape[1], v.shape[2]))
        return efficient_varlen(q, k, v, metadata, bounds.longest, scale)
