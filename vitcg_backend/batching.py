"""Towers that take one image (or tile, or clip) a row: ``[batch, channels, height, width]`` and no grid.

Note [The batch is the token axis]
    Such a tower is traced once with a batch that nobody knows, and every other size of its pixels a constant: an image of
    another size is another graph. From there on it is a packed tower without a grid, whose rows are images: `prove_padding`
    shows that no row reaches another, buckets are numbers of images, and what else comes a row an image (masks) is padded
    with it. The batch is unbacked because Dynamo takes a backed size of 1 for a constant.

Note [Steps back of a batch]
    What cannot be traced, taken apart or proved with an unknown batch is traced again as if this backend had marked nothing
    and takes the ordinary path, with the reason. That a trace cannot go on is known when it fails: under ``fullgraph=True``
    at a branch on the batch, where Dynamo would break the graph otherwise. The ordinary path also takes the last graph that
    Dynamo makes for a function: it is traced with every size of the images dynamic, so that no later size is left to eager
    mode, where nothing is counted. Dynamo tries the graph used last first: a guard keeps the sizes that have buckets out of
    that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torch import Tensor, fx

from . import _dynamo_call, _torch
from .marking import inputs_of, is_grid, is_refused

__all__ = ["batch_refusal", "forget_sizes", "is_batched", "mark_batch", "note_size", "refuse_batch", "watch_batch"]

log = _torch.log
_sizes: weakref.WeakKeyDictionary[CodeType, set[Any]] = weakref.WeakKeyDictionary()  # a function's sizes that have buckets


def mark_batch(*, traced: bool) -> None:
    """Mark the batch of the pixels of the running trace, and of what else has a row an image; see the notes above.

    Args:
        traced: the trace is through, so that no metadata function will come any more.

    Raises:
        BackendRestart: something was marked that the running trace has seen unmarked.
    """
    trace = _torch.current_trace()
    steps = trace.speculation_log
    if is_refused(trace) or hasattr(steps, "_vitcg_rows") or is_batched() or batch_refusal() is not None:
        return
    tensors = inputs_of(trace)
    pixels = _pixels(tensors, traced)
    if pixels is None or _torch.is_resumed(trace) or any(map(_torch.is_marked, tensors)):
        return
    rows = [pixels, *(t for t in tensors if t is not pixels and len(t) == len(pixels))]
    left, limit = _torch.graphs_left()
    if left > 0:
        steps._vitcg_batch = rows
    else:
        text = f"the last of the {limit} graphs that Dynamo makes for one function takes any image size, without buckets"
        steps._vitcg_batch_refused = ("image_sizes", f"{text}; raise torch._dynamo.config.recompile_limit for more of them")
    for tensor in rows:
        _torch.mark_batch(tensor, _step_back_on_failure, any_size=left <= 0)
    steps.clear()
    raise _torch.BackendRestart("vitcg: the batch of the pixels is dynamic")


def is_batched() -> bool:
    """Whether the running trace has a batch that `mark_batch` marked."""
    trace = _torch.current_trace()
    return trace is not None and hasattr(trace.speculation_log, "_vitcg_batch")


def watch_batch(gm: fx.GraphModule) -> None:
    """In the backend: step back from a graph that is another for a batch of one; guard that all batches are one.

    Raises:
        BackendRestart: such a graph.
    """
    trace = _torch.current_trace()
    refused = batch_refusal()
    if refused is not None and refused[0] == "image_sizes":
        pixels = _pixels(inputs_of(trace), True)
        own = set() if pixels is None else {_torch.size_key(pixels)}  # its graphs are for towers with other attributes
        _dynamo_call.guard_on_other_sizes(trace, pixels, _sizes.get(_torch.traced_code(trace), set()) - own)
    if not is_batched():
        return
    broken = _torch.graph_break(trace)
    if broken is not None:
        refuse_batch("graph_break", broken)
    for node in gm.graph.nodes:
        if "squeeze" in _name(node) and "unsqueeze" not in _name(node) and _drops_unknown(node):
            refuse_batch("batch_of_one", f"{node.format_node()} drops the batch where it is 1")
    _dynamo_call.guard_on_equal_rows(trace, trace.speculation_log._vitcg_batch)


def note_size() -> None:
    """In the backend: the running trace's image size has buckets now. Nothing where no batch is marked."""
    if is_batched():
        trace = _torch.current_trace()
        pixels = trace.speculation_log._vitcg_batch[0]
        _sizes.setdefault(_torch.traced_code(trace), set()).add(_torch.size_key(pixels))


def forget_sizes() -> None:
    """No size has buckets any more."""
    _sizes.clear()


def refuse_batch(reason: str, detail: str) -> None:
    """Trace again with nothing marked, for a reason that the ordinary path then has. Nothing where no batch is marked.

    Raises:
        BackendRestart: there is one.
    """
    if is_batched():
        _refuse(_torch.current_trace().speculation_log, reason, detail)


def _refuse(steps: Any, reason: str, detail: str) -> None:
    log.info("vitcg steps back from a dynamic batch [%s]: %s", reason, detail)
    for tensor in steps._vitcg_batch:
        _torch.clear_dynamic_marks(tensor)
    del steps._vitcg_batch
    steps._vitcg_batch_refused = (reason, detail)
    steps.clear()
    raise _torch.BackendRestart(f"vitcg: no dynamic batch: {reason}")


def batch_refusal() -> tuple[str, str] | None:
    """Reason and text of the step back that the running trace is the result of."""
    trace = _torch.current_trace()
    return None if trace is None else getattr(trace.speculation_log, "_vitcg_batch_refused", None)


def _pixels(tensors: Sequence[Tensor], traced: bool) -> Tensor | None:
    """The images of a frame: its first input of floating-point numbers, if it has four axes or comes with a mask.

    Something like a grid beside them may still be one, until the trace is through without a metadata function.
    """
    pixels = next((t for t in tensors if t.is_floating_point() and t.dim() > 2), None)
    if pixels is None or len(pixels) == 0:
        return None
    others = [t for t in tensors if not t.is_floating_point()]
    if pixels.dim() == 3:
        return pixels if any(t.shape == pixels.shape[:2] for t in others) else None
    return None if any(is_grid(t) and (not traced or len(t) != len(pixels)) for t in others) else pixels


def _step_back_on_failure() -> None:
    """A trace that fails with an unknown batch starts again without one."""
    trace = _torch.current_trace()
    if not is_batched() or getattr(trace.output, "_vitcg_watched", False):
        return
    trace.output._vitcg_watched = True

    def failed(error: BaseException) -> None:
        if _torch.dynamo_goes_on(trace, error):
            return
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        text = f"the tower's own code needs the number of images: {_torch.user_line(error) or text}"
        _refuse(trace.speculation_log, "host_code", text)  # the failed trace is no longer the current one

    _torch.on_failed_trace(trace, failed)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _drops_unknown(node: fx.Node) -> bool:
    """Whether a squeeze reaches an axis whose size is unknown: eager drops it where it is 1."""
    value = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, Tensor):
        return False
    given = node.args[1:] or tuple(node.kwargs[k] for k in ("dim", "dims") if k in node.kwargs)
    listed = [d for g in given for d in (g if isinstance(g, (tuple, list)) else (g,))]
    axes = [d % value.dim() for d in listed] if listed else range(value.dim())
    return any(not isinstance(value.shape[axis], int) for axis in axes)
