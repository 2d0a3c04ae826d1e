"""The operator ``vitcg::varlen_attention``: what a packed attention call is lowered to while a graph is traced.

    varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float? scale, SymInt? max_seqlen=None) -> Tensor

Non-causal attention of each row of q ``[rows, heads, head_dim]`` to the rows of k ``[rows, kv_heads, head_dim]`` and v
``[rows, kv_heads, value_dim]`` of its segment; ``cu_seqlens`` are the prefix sums of the segment lengths, integers
``[segments + 1]``, that end at ``rows``. The result is a new contiguous ``[rows, heads, value_dim]`` tensor.
``scale`` None is ``head_dim ** -0.5``; ``max_seqlen`` bounds the rows of a segment.

On the CPU the result equals the eager tower's per-segment SDPA bit for bit. On CUDA torch's varlen kernels run:
FlashAttention 2 for half precision, the memory-efficient kernel for float32, per-segment SDPA for what neither takes.
Lengths that do not add up raise what `torch.split` raises: without `max_seqlen` the operator looks at them first, as eager
does, and waits for the device. Who gives `max_seqlen` knows the lengths: then a kernel runs without a wait.
First-order gradients and autocast act as those of scaled_dot_product_attention do. Importing this module registers the
operator.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from .aten import efficient_unusable, efficient_varlen, flash_unusable, flash_varlen, flash_varlen_backward
from .base import check_tensors
from .segments import attention_by_segment, gradients_by_segment

__all__ = ["VARLEN_ATTENTION", "VARLEN_ATTENTION_BACKWARD", "differentiable"]

_LIBRARY = torch.library.Library("vitcg", "FRAGMENT")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float? scale, SymInt? max_seqlen=None"
_LIBRARY.define(f"varlen_attention({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"varlen_attention_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

VARLEN_ATTENTION = torch.ops.vitcg.varlen_attention.default
VARLEN_ATTENTION_BACKWARD = torch.ops.vitcg.varlen_attention_backward.default

_Gradients = tuple[Tensor, Tensor, Tensor]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rows: int | None) -> None:
    """Check shapes, without a look at values.

    Raises:
        ValueError: q, k, v do not belong together, or cu_seqlens is not flat.
    """
    check_tensors(q, k, v, rows, strides=False)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be a flat tensor of integers, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")


def _check_integers(cu_seqlens: Tensor) -> None:
    """Only of a call: a tower that is traced with the wrong dtype raises where eager raises.

    Raises:
        TypeError: lengths that are not integers, as `torch.split` raises for them.
    """
    if cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"cu_seqlens must be a flat tensor of integers, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")


# --- forward --------------------------------------------------------------------------------------------------------


@torch.library.impl(_LIBRARY, "varlen_attention", "CPU")
def _cpu(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, max_seqlen: int | None = None) -> Tensor:
    _check(q, k, v, cu_seqlens, q.shape[0])
    _check_integers(cu_seqlens)
    return attention_by_segment(q, k, v, cu_seqlens, scale)


@torch.library.impl(_LIBRARY, "varlen_attention", "CUDA")
def _cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, max_seqlen: int | None = None) -> Tensor:
    _check(q, k, v, cu_seqlens, q.shape[0])
    _check_integers(cu_seqlens)
    longest = q.shape[0] if max_seqlen is None else max_seqlen
    if q.numel() == 0:
        return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    unknown = max_seqlen is None and not torch.cuda.is_current_stream_capturing()
    if unknown and not _covers(cu_seqlens.tolist(), q.shape[0]):
        return attention_by_segment(q, k, v, cu_seqlens, scale)  # raises as eager does, where a kernel would read elsewhere
    if _flash_takes(q, k, v):
        return flash_varlen(q, k, v, cu_seqlens.to(q.device, torch.int32), longest, scale)
    if _last_axis_contiguous(q, k, v) and efficient_unusable(q.device, q.dtype, _odd_dim(q, v)) is None:
        return efficient_varlen(q, k, v, cu_seqlens.to(q.device, torch.int32), longest, scale)
    return attention_by_segment(q, k, v, cu_seqlens, scale)


def _covers(cu_seqlens: list[int], rows: int) -> bool:
    """Whether segments begin at row 0, follow one another and end with the last row."""
    whole = cu_seqlens[:1] == [0] and cu_seqlens[-1] == rows
    return whole and all(a <= b for a, b in itertools.pairwise(cu_seqlens))


def _flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    same_dim = q.shape[2] == v.shape[2]
    return same_dim and _last_axis_contiguous(q, k, v) and flash_unusable(q.device, q.dtype, q.shape[2]) is None


def _last_axis_contiguous(*tensors: Tensor) -> bool:
    return all(x.stride(2) == 1 for x in tensors)


def _odd_dim(q: Tensor, v: Tensor) -> int:
    """One of the two head sizes: that of the values when it is the less even one."""
    return min(q.shape[2], v.shape[2], key=lambda dim: dim & -dim)


@torch.library.register_fake("vitcg::varlen_attention", lib=_LIBRARY)
def _fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, max_seqlen: int | None = None) -> Tensor:
    # Rows may be sizes that nobody knows yet, and those cannot be compared; the call itself does it.
    _check(q, k, v, cu_seqlens, None)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


# --- backward: an operator too, because its loop over segments cannot be traced ---------------------------------------


@torch.library.impl(_LIBRARY, "varlen_attention_backward", "CPU")
def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
    max_seqlen: int | None = None,
) -> _Gradients:
    with torch.autocast(q.device.type, enabled=False):
        return gradients_by_segment(grad, q, k, v, cu_seqlens, scale)


@torch.library.impl(_LIBRARY, "varlen_attention_backward", "CUDA")
def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
    max_seqlen: int | None = None,
) -> _Gradients:
    if q.numel() and _flash_takes(q, k, v):
        # Its workspace grows with segments x longest: the true length is worth a wait for the device here.
        longest = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
        return flash_varlen_backward(grad, q, k, v, cu_seqlens.to(q.device, torch.int32), longest, scale)
    return _cpu_backward(grad, q, k, v, cu_seqlens, scale)


@torch.library.register_fake("vitcg::varlen_attention_backward", lib=_LIBRARY)
def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
    max_seqlen: int | None = None,
) -> _Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, cu_seqlens, ctx.scale, ctx.max_seqlen = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = VARLEN_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, ctx.scale, ctx.max_seqlen)
    return dq, dk, dv, None, None, None


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("vitcg::varlen_attention has first-order gradients only")


torch.library.register_autograd("vitcg::varlen_attention", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("vitcg::varlen_attention_backward", _refuse, lib=_LIBRARY)


def differentiable(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with torch's own operations, segment by segment, in place of the attention operator.

    For forward-mode differentiation: an operator of this kind has no formula for it and, where no input requires gradients,
    drops the tangents without a word (torch/_library/autograd.py, `make_autograd_impl`, the same in 2.11 and 2.13).
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for node in graph.nodes:
        if node.target in (VARLEN_ATTENTION, torch.ops.vitcg.varlen_attention):
            node.target = _by_segment
    return fx.GraphModule(gm, graph)


def _by_segment(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, *_: Any) -> Tensor:
    factor, groups = q.shape[2] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    results = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        q_, k_, v_ = (x[start:end].transpose(0, 1) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(groups, dim=0) for x in (k_, v_))
        results.append((torch.softmax(q_ @ k_.transpose(1, 2) * factor, -1) @ v_).transpose(0, 1))
    return torch.cat(results)


# --- autocast -------------------------------------------------------------------------------------------------------


def _register_autocast(device_type: str, key: str) -> None:
    """Cast q, k and v as autocast casts those of SDPA; torch's own `register_autocast` knows only one fixed dtype."""

    def autocast(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, max_seqlen: int | None = None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        # float64 is not eligible (aten/src/ATen/autocast_mode.h, `is_eligible`).
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return VARLEN_ATTENTION(q, k, v, cu_seqlens, scale, max_seqlen)

    _LIBRARY.impl("varlen_attention", autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")
