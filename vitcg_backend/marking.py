"""Which sizes of a traced frame are dynamic, and what happens when its trace fails because of us.

Note [Dynamic from the first call]
    The first lowered call marks the pixel rows dynamic and the grid's rows unbacked on the real inputs of the traced frame and
    starts the trace again, so that one image, several images and videos share one graph under every ``dynamic=`` setting.

Note [Steps back]
    A tower that loops over its grid in Python is a hard error with unbacked rows (``grid.tolist()`` asks whether there are
    any), where Dynamo would break the graph and go on. So a trace that fails starts again one step further back: 1. the
    grid's rows unbacked, 2. merely dynamic, 3. nothing lowered at all. The step sits on Dynamo's speculation log, which lives
    as long as one compile. What step 3 raises is what Dynamo raises without us. A call that eager rejects, too, takes no
    step: the graphs of step 3 would answer the good calls that come after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .options import Options

__all__ = [
    "inputs_of",
    "is_grid",
    "is_refused",
    "mark_inputs",
    "mark_padded_images",
    "note_step",
    "refuse",
    "refuse_in_backend",
    "reject_as_eager",
    "steps_taken",
]

log = _torch.log


def is_refused(trace: Any) -> bool:
    """Whether this compile goes on without lowering (step 3)."""
    return getattr(trace.speculation_log, "_vitcg_refused", None) is not None


def refuse(reason: str) -> None:
    """Start this compile's trace again with nothing lowered.

    Raises:
        TraceRestart: always.
    """
    _begin_unlowered(reason)
    raise _torch.TraceRestart(reason) from None


def refuse_in_backend(reason: str) -> None:
    """The same, from inside the backend.

    Raises:
        BackendRestart: always.
    """
    _begin_unlowered(reason)
    raise _torch.BackendRestart(reason)


def _begin_unlowered(reason: str) -> None:
    """Let the trace that comes next lower nothing."""
    log.info("vitcg does not lower this compile: %s", reason)
    trace = _torch.current_trace()
    trace.speculation_log._vitcg_refused = reason
    _begin_again(trace)


def mark_inputs() -> None:
    """Mark the rows of pixels and grid; see the notes above.

    Raises:
        TraceRestart: something was marked that the running trace has seen unmarked.
    """
    trace = _torch.current_trace()
    _step_back_on_failure(trace)
    tensors = inputs_of(trace)
    if any(is_grid(t) and t.shape[0] == 0 for t in tensors):
        refuse("a grid without a row: the tower's own functions answer it")
    if not all(map(_torch.has_values, tensors)):
        refuse("the call is itself being traced, on tensors without values")
    grid = next((t for t in tensors if is_grid(t)), None)
    if grid is None:
        return
    trace.speculation_log._vitcg_rows = True  # a tower with a grid: `batching.py` keeps off
    if _torch.is_marked(grid):
        return
    with _torch.real_tensors():
        total = int(grid.prod(1).sum())
    unbacked = not getattr(trace.speculation_log, "_vitcg_backed", None)
    _torch.mark_rows(grid, 0, unbacked=unbacked)
    for tensor in tensors:
        if _belongs_to_items(tensor, grid) and not _torch.is_marked(tensor):
            _torch.mark_rows(tensor, 0, unbacked=unbacked)
        axis = _token_axis(tensor, total)
        if tensor is not grid and axis is not None and not _torch.is_marked(tensor):
            _torch.mark_rows(tensor, axis, unbacked=False)
    trace.speculation_log.clear()
    if any(t.device.type == "cuda" for t in tensors) and _inner(trace) == "inductor":
        _torch.start_compile_workers()
    raise _torch.TraceRestart("vitcg: the rows of the pixels and of the grid are dynamic")


@torch._dynamo.assume_constant_result
def mark_padded_images(patch: int) -> None:
    """Mark a batch of padded images, and the rows of their sizes: all of these are unknown, so that all calls share one graph.

    Args:
        patch: side of a patch in pixels.

    Raises:
        TraceRestart: something was marked that the running trace has seen unmarked.
        Exception: no image, or none as large as a patch: what eager raises.
    """
    trace = _torch.current_trace()
    if trace is None:  # nothing is traced
        return
    _step_back_on_failure(trace)
    tensors = inputs_of(trace)
    if not all(map(_torch.has_values, tensors)):
        refuse("the call is itself being traced, on tensors without values")
    trace.speculation_log._vitcg_rows = True  # rows are patches: `batching.py` keeps off
    pixels = next((t for t in tensors if t.is_floating_point() and t.dim() == 4), None)
    sizes = next((t for t in tensors if is_grid(t)), None)
    if any(t is not None and len(t) == 0 for t in (pixels, sizes)) or (pixels is not None and min(pixels.shape[2:]) < patch):
        reject_as_eager()
        refuse("no image as large as a patch: the tower's own code answers it")
    if pixels is None or any(map(_torch.is_marked, tensors)):
        return
    _torch.mark_padded_images(pixels)
    if sizes is not None:
        _torch.mark_rows(sizes, 0, unbacked=True)
    trace.speculation_log.clear()
    raise _torch.TraceRestart("vitcg: the sizes of padded images are dynamic")


@torch._dynamo.assume_constant_result
def reject_as_eager() -> None:
    """Raise what eager raises for the call that is traced, if it does: a graph of it would answer good calls, too.

    What follows a graph break is not run once more: it may add to what the part before it has made.
    """
    trace = _torch.current_trace()
    error = None if _torch.is_resumed(trace) else _torch.eager_error(_torch.root_of(trace))
    if error is not None:
        raise error


def note_step(reason: str, text: str) -> None:
    """Note why the running compile is traced as it is, for `steps_taken`."""
    steps = _torch.current_trace().speculation_log
    steps._vitcg_notes = {**getattr(steps, "_vitcg_notes", {}), reason: text}


def _inner(trace: Any) -> Any:
    """The option `inner` of the running compile, which `torch.compile` keeps around the backend."""
    compiler = trace.output.compiler_fn
    while compiler is not None and not hasattr(compiler, "kwargs"):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return (getattr(compiler, "kwargs", {}).get("options") or {}).get("inner", Options.inner)


def steps_taken() -> dict[str, str]:
    """Reason -> text of the steps that the running compile has taken back."""
    trace = _torch.current_trace()
    steps = {"host_loop": "_vitcg_backed", "not_lowered": "_vitcg_refused"}
    found = {reason: getattr(trace.speculation_log, name, None) for reason, name in steps.items()} if trace else {}
    notes = getattr(trace.speculation_log, "_vitcg_notes", {}) if trace else {}
    return {**{reason: text for reason, text in found.items() if text}, **notes}


def _token_axis(tensor: Tensor, total: int) -> int | None:
    """The first axis as long as the grid's patches; for a batch of one, else an axis of whole patches side by side."""
    sizes = tuple(tensor.shape)
    if total in sizes:
        return sizes.index(total)
    if tensor.is_floating_point() and tensor.dim() > 2 and sizes[0] == 1 and total > 1:
        return next((axis for axis, size in enumerate(sizes) if size > total and size % total == 0), None)
    return None


def _belongs_to_items(tensor: Tensor, grid: Tensor) -> bool:
    """Whether a tensor holds one whole number an item, as merge sizes do."""
    return tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64) and len(tensor) == len(grid)


def _step_back_on_failure(trace: Any) -> None:
    """See Note [Steps back]."""
    if getattr(trace.output, "_vitcg_watched", False):
        return
    trace.output._vitcg_watched = True
    root = trace.output.root_tx

    def failed(error: BaseException) -> None:
        steps = trace.speculation_log
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if _torch.is_data_dependent(error) and not getattr(steps, "_vitcg_backed", None):
            log.info("vitcg traces a frame again, its grid's rows merely dynamic: %s", reason)
            steps._vitcg_backed = f"the tower's own code needs the number of items: {_torch.user_line(error) or reason}"
            _restart(trace, "vitcg: the rows of the grid cannot be unknown here", error)
        if _torch.eager_error(root) is not None:
            log.info("a trace failed with a call that eager rejects, too: %s", reason)
            return
        log.warning("vitcg lowers nothing in a frame whose trace failed: %s", reason)
        steps._vitcg_refused = reason
        _restart(trace, f"vitcg: {reason}", error)

    _torch.on_failed_trace(trace, failed)


def _restart(trace: Any, reason: str, error: BaseException | None = None) -> None:
    _begin_again(trace)
    raise _torch.TraceRestart(reason) from error


def _begin_again(trace: Any) -> None:
    for tensor in inputs_of(trace):
        _torch.clear_dynamic_marks(tensor)  # unbacked rows are a hard error in the tower's own loops over the grid
    trace.speculation_log.clear()


def inputs_of(trace: Any) -> list[Tensor]:
    """The real tensors that the traced frame was called with."""
    return list(_tensors(_torch.root_of(trace).f_locals.values()))


def is_grid(tensor: Tensor) -> bool:
    """Whether a tensor may be a grid: whole numbers, two or three for each item."""
    integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool
    return integer and tensor.dim() == 2 and tensor.shape[1] in (2, 3)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, torch.nn.Parameter) and value.dim() > 0:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
