"""FlashInfer's cuDNN prefill: cuDNN's attention for packed segments, planned for each set of bounds.

cuDNN's plan is made for heads, strides, segments and the longest segment; where rows lie and how many of each segment are
there it reads on the device. To make a plan takes far longer than to run it. One is made at the first run of a bucket, before
its capture, and kept by FlashInfer, which keeps 256 of them (0.7.4). So both bounds are rounded up here, whatever they are:
calls of exact rows make no plans of their own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..bucketing import capacity_tier
from .base import CuSeqlensKernel, SegmentBounds, check_tensors, check_values, half_unusable

__all__ = ["FlashInferKernel"]

_WORKSPACE = 128 << 20  # bytes, what FlashInfer's own documentation gives cuDNN; memory of the graph pool in a capture
_LARGEST_OFFSET = 2**31 - 1  # offsets are int32, in elements


@functools.cache
def _import() -> tuple[Callable[..., Any] | None, str | None]:
    """`cudnn_batch_prefill_with_kv_cache`, or why there is none."""
    for module, package in (("flashinfer", "flashinfer-python"), ("cudnn", "nvidia-cudnn-frontend")):
        if find_spec(module) is None:
            return None, f"the package {package} is not installed"
    try:
        # Without the frontend FlashInfer takes kernels of its own, for other layouts and head sizes.
        importlib.import_module("cudnn")
        return importlib.import_module("flashinfer.cudnn").cudnn_batch_prefill_with_kv_cache, None
    except Exception as error:  # a missing library of CUDA, say: more than an ImportError
        return None, f"flashinfer cannot be imported ({type(error).__name__}: {error})"


class FlashInferKernel(CuSeqlensKernel):
    """`flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache` over keys and values that are not paged."""

    name: ClassVar[str] = "flashinfer"

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Half precision on CUDA with compute capability 8.0, head sizes in steps of 8 up to 128, and both packages."""
        return half_unusable("cuDNN's attention", device, dtype, head_dim, 128) or _import()[1]

    def metadata(self, cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
        """Of each segment its rows, ``[segments]``, then `cu_seqlens` padded to ``[segments + 1]``.

        `segments` is the tier of ``bounds.segments``. They have to cover every row.
        """
        borders = super().metadata(cu_seqlens, bounds)
        more = capacity_tier(bounds.segments) - bounds.segments
        borders = torch.cat([borders, borders[-1:].expand(more)])
        return torch.cat([borders.diff(), borders])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`, for values of the same head size as the keys."""
        check_tensors(q, k, v, bounds.rows)
        check_values(self.name, q, v)
        if bounds.rows * max(x.stride(0) for x in (q, k, v)) > _LARGEST_OFFSET:
            raise ValueError(
                f"attention 'flashinfer' has 32-bit offsets: {bounds.rows} rows of {q.stride(0)} elements are too many"
            )
        out = q.new_empty(q.shape)
        if out.numel() == 0:
            return out
        function, reason = _import()
        if function is None:
            raise RuntimeError(reason)
        _call(function, q, k, v, out, metadata, bounds, scale)
        return out


def _call(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    metadata: Tensor,
    bounds: SegmentBounds,
    scale: float,
) -> None:
    """One call that writes into `out`."""
    segments, longest = capacity_tier(bounds.segments), capacity_tier(bounds.longest)
    lengths, borders = metadata[:segments].view(-1, 1, 1, 1), metadata[segments:]
    # Where each segment begins, in elements of each tensor's own rows. Views of one buffer have equal rows.
    starts = {width: borders * width for width in {x.stride(0) for x in (q, k, v, out)}}
    with torch.no_grad():
        function(
            q, k, v, scale, q.new_empty(_WORKSPACE, dtype=torch.int8),
            max_token_per_sequence=longest, max_sequence_kv=longest,
            actual_seq_lens_q=lengths, actual_seq_lens_kv=lengths, causal=False, return_lse=False,
            batch_offsets_q=starts[q.stride(0)], batch_offsets_k=starts[k.stride(0)],
            batch_offsets_v=starts[v.stride(0)], batch_offsets_o=starts[out.stride(0)],
            out=out, is_cuda_graph_compatible=True,
        )  # fmt: skip
