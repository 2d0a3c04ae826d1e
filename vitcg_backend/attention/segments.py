"""Packed attention one segment at a time: the reference, the kernel that runs everywhere, the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import SegmentBounds, VarlenKernel, check_tensors, padded_cu_seqlens

__all__ = ["SdpaKernel", "attention_by_segment", "gradients_by_segment"]

_SCORES = 1 << 25  # most scores that `gradients_by_segment` holds at once: 128 MiB of float32


def _heads_first(x: Tensor) -> Tensor:
    """``[rows, heads, dim]`` as a ``[1, heads, rows, dim]`` view, the layout of scaled_dot_product_attention."""
    return x.transpose(0, 1).unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """One segment, ``[1, heads, rows, dim]``, with grouped-query heads where k has fewer than q."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def attention_by_segment(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """What the towers of transformers do in eager mode under ``sdpa``, bit for bit.

    Args:
        q: ``[rows, heads, head_dim]``.
        k: ``[rows, kv_heads, head_dim]``.
        v: ``[rows, kv_heads, value_dim]``.
        cu_seqlens: int32 or int64 ``[segments + 1]``, on any device (its values are read on the host).
        scale: factor of the scores; None = ``head_dim ** -0.5``.

    Returns:
        A contiguous ``[rows, heads, value_dim]`` tensor.

    Raises:
        RuntimeError: the segment lengths do not add up to the rows (`torch.split`), or there is none (`torch.cat`).
    """
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(torch.split(_heads_first(x), lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(q, k, v, scale).transpose(1, 2).contiguous() for q, k, v in parts], dim=1).squeeze(0)


class SdpaKernel(VarlenKernel):
    """`scaled_dot_product_attention` for each segment: runs everywhere, reads the segments on the host."""

    name: ClassVar[str] = "sdpa"
    capturable: ClassVar[bool] = False
    needs_longest: ClassVar[bool] = False

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None for every floating-point dtype."""
        return None if dtype.is_floating_point else f"attention needs a floating-point dtype, not {dtype}"

    def metadata(self, cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
        """`cu_seqlens`, padded with its last value to ``[bounds.segments + 1]``; rows after it are a padded tail."""
        return padded_cu_seqlens(cu_seqlens, bounds, cover=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`; waits for the device when `metadata` is on one."""
        check_tensors(q, k, v, bounds.rows)
        cu = metadata.tolist()
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        out[cu[-1] :] = 0
        for start, end in itertools.pairwise(cu):
            if start < end:
                q_, k_, v_ = (_heads_first(x[start:end]) for x in (q, k, v))
                out[start:end] = _sdpa(q_, k_, v_, scale).squeeze(0).transpose(0, 1)
        return out


def gradients_by_segment(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_by_segment` with respect to q, k and v, from recomputed scores.

    They are written out, because autograd is off inside an operator. Computed in float32 (float64 for float64 inputs),
    with at most 2**25 scores in memory at once.

    Args:
        grad: gradient of the output, ``[rows, heads, value_dim]``.
        q: as in `attention_by_segment`, and so are the others.
        k: as there.
        v: as there.
        cu_seqlens: as there.
        scale: as there.

    Returns:
        Contiguous tensors with the shapes and dtypes of q, k and v.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    lengths = cu_seqlens.diff().tolist()
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for *inputs, dq_, dk_, dv_ in zip(*(x.split(lengths) for x in (grad, q, k, v, dq, dk, dv)), strict=True):
        grad_, q_, k_, v_ = (x.to(compute).transpose(0, 1) for x in inputs)
        gradients = _segment_gradients(grad_, q_, k_, v_, factor)
        for output, value in zip((dq_, dk_, dv_), gradients, strict=True):
            output.copy_(value.transpose(0, 1))
    return dq, dk, dv


def _segment_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one segment, heads first: ``[heads, rows, dim]``, and ``[kv_heads, rows, dim]`` for k and v.

    With P = softmax(scale Q K^T) and O = P V: dV = P^T dO, dS = P * (dO V^T - rowsum(P * dO V^T)), dQ = scale dS K and
    dK = scale dS^T Q.
    """
    heads, rows, _ = q.shape
    groups = heads // k.shape[0]
    keys, values = (x.repeat_interleave(groups, dim=0) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    step = max(1, _SCORES // max(1, heads * rows))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        weights = torch.softmax(q[:, part] @ keys.mT * scale, dim=-1)
        dv += weights.mT @ grad[:, part]
        dweights = grad[:, part] @ values.mT
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
        dq[:, part] = dscores @ keys
        dk += dscores.mT @ q[:, part]
    return dq, dk.unflatten(0, (-1, groups)).sum(1), dv.unflatten(0, (-1, groups)).sum(1)
