"""Captures: a body with static inputs for one bucket, replayed as a CUDA graph, or called on a CPU under the same rules.

Note [Lifetime of the static memory]
    Inputs live in an `Arena` that all buckets of a tower share: each call writes all that it reads. Outputs of a graph are
    memory of the graph pool; no tensor owns them after the capture, so that the next capture in the pool may reuse it: one
    replay runs at a time and its results are copied out, in stream order, before the next.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _torch, products
from .attention import SegmentBounds, VarlenKernel
from .batch_inputs import BatchInputs
from .bucketing import Bucket
from .layouts import LayoutValues, tensor_of
from .packed import copy_all, places, unpack
from .passes import CompiledBody
from .passes.graph import token_axes
from .passes.program import AttentionStep

__all__ = ["Arena", "Capture", "bytes_needed", "run_body"]

_serial = itertools.count()
_one_capture = threading.Lock()  # the capture stream of a device is shared
_MAX_VIEWS = 64

BESIDE = 2048
"""Most rows (patches) of a capture whose deepstack mergers run beside its layers: with more, each kernel fills the device by
itself, and what runs beside takes memory of its own."""


def run_body(
    body: CompiledBody,
    args: Sequence[Any],
    n: int,
    tensors: Sequence[Tensor],
    segments: dict[int, Tensor],
    kernels: dict[int, VarlenKernel],
    bounds: dict[int, SegmentBounds],
    beside: Any = None,
) -> list[Any]:
    """Run the program of a body: pieces and attention in order.

    Args:
        body: the compiled graph.
        args: arguments of the call (static ones in a capture).
        n: output tokens.
        tensors: metadata tensors for ``n * unit`` rows.
        segments: metadata index -> attention metadata.
        kernels: metadata index -> the attention kernel of its segments.
        bounds: metadata index -> its bounds.
        beside: a CUDA stream for the steps that no later one reads, None to run them in their place.

    Returns:
        The results of the graph, in order.
    """
    program = body.program
    slots: list[Any] = [None] * program.num_slots
    for slot, position in program.arguments:
        slots[slot] = args[position]
    for slot, tensor in zip(program.metadata, tensors, strict=True):
        slots[slot] = tensor
    functions = body.functions
    aside: list[list[Any]] = []  # arguments of what runs beside: their memory is in use until that is done
    for step in program.steps:
        if isinstance(step, AttentionStep):
            slots[step.output] = kernels[step.segments].forward(
                slots[step.query],
                slots[step.key],
                slots[step.value],
                segments[step.segments],
                bounds[step.segments],
                step.scale,
            )
        else:
            arguments = [n, *[slots[i] for i in step.inputs]]
            for slot in step.free:  # a piece gives memory back as soon as it is done with it, if nobody else holds it
                slots[slot] = None
            if step.aside and beside is not None:
                aside.append(list(arguments))
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    results = functions[step.piece](arguments)
            else:
                results = functions[step.piece](arguments)
            for number, slot in enumerate(step.outputs):  # no name may keep a result: its memory is wanted by the next piece
                slots[slot] = results[number]
            del results, arguments
        for slot in step.free:
            slots[slot] = None
    if aside:
        torch.cuda.current_stream().wait_stream(beside)
    return [_result(kind, what, slots, args, tensors) for kind, what in program.outputs]


def _result(kind: str, what: Any, slots: list[Any], args: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    if kind == "slot":
        return slots[what]
    if kind == "argument":
        return args[what]
    return tensors[what].clone() if kind == "metadata" else what  # metadata is kept: the caller may write into a result


class Arena:
    """Static input buffers by name, shared by the buckets of a tower; a larger request gets a new buffer."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}
        self.owner: Any = None

    def view(self, name: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """A zero-initialised buffer's view of this shape and stride (elements)."""
        size = 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True)) if all(shape) else 0
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.zeros(size, dtype=dtype, device=device)
        return buffer.as_strided(tuple(shape), tuple(stride))

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Drop the buffers; captures that use them keep theirs."""
        self._buffers.clear()
        self.owner = None


@dataclass
class _Output:
    """Where a result's real rows are: (index of the result, its token axis, rows per n)."""

    axis: int | None
    rows: int


class Capture:
    """One captured size of a body.

    Args:
        body: the compiled graph, every piece proved.
        bucket: the size.
        args: arguments of a call: their shapes, dtypes and device. Nothing of them is kept.
        values: a layout padded to the bucket.
        arena: where the static inputs live.
    """

    def __init__(
        self,
        body: CompiledBody,
        bucket: Bucket,
        args: Sequence[Any],
        values: LayoutValues,
        arena: Arena,
    ) -> None:
        self.body, self.bucket, self.arena = body, bucket, arena
        self.serial = next(_serial)
        self.kernels, self.bounds = values.kernels, values.bounds
        self.device = args[body.bound.pixels].device
        self.pool_bytes = 0  # that the capture took from the driver
        self.graph: Any = None
        self._results: list[Any] = []
        self._views: dict[int, list[Any]] = {}
        self._pixel_views: dict[int, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            self._make_inputs(args, values)
        self._outputs = [self._output(v) for v in body.program.output_values]
        self._views_of = body.program.views

    def _make_inputs(self, args: Sequence[Any], values: LayoutValues) -> None:
        bound, n = self.body.bound, self.bucket.tokens
        pixels = args[bound.pixels]
        shape = list(pixels.shape)
        shape[bound.pixel_axis] = self.bucket.patches * bound.pixels_per_row
        self.pixels = self._buffer("pixels", shape, _contiguous(shape), pixels.dtype)
        self.batch = BatchInputs(bound, args, self.bucket.patches, self.arena)
        nodes = self.body.hoisted.metadata
        self.copied = [index for index in range(len(nodes)) if self.body.program.reads(index)]
        # Those not copied: attention has its own form of them; a result is taken from the unpadded grid.
        self.tensors: list[Any] = [None if i in self.copied else tensor_of(made) for i, made in enumerate(values.made)]
        shapes = [[_size(bound.symbols, s, n) for s in nodes[i].meta["val"].shape] for i in self.copied]
        shapes += [list(t.shape) for t in values.segments.values()]
        dtypes = [values.made[i].dtype for i in self.copied] + [t.dtype for t in values.segments.values()]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        self.packed = self._buffer("metadata", [places(sizes)[1]], [1], torch.uint8)
        views = unpack(self.packed, shapes, dtypes)
        for index, view in zip(self.copied, views, strict=False):
            self.tensors[index] = view
        self.segments = dict(zip(values.segments, views[len(self.copied) :], strict=True))

    def _buffer(self, name: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arena.view(name, shape, stride, dtype, self.device)

    def _output(self, fake: Any) -> _Output:
        symbols = self.body.bound.symbols
        if isinstance(fake, Tensor):
            for axis, size in enumerate(fake.shape):
                if symbols.depends(size):
                    form = symbols.linear(size)
                    if form is not None:
                        return _Output(axis, form[0])
        return _Output(None, 0)

    @property
    def holds_inputs(self) -> bool:
        """Whether the metadata in the static inputs, which captures share, was written for this one."""
        return self.arena.owner is not None and self.arena.owner[0] == self.serial

    def token_axis(self, result: int) -> int | None:
        """The token axis of a result of the graph, None for one without."""
        return self._outputs[result].axis

    @property
    def static_bytes(self) -> int:
        """Bytes of the static inputs that this size uses (shared with other sizes) and of its outputs."""
        return sum(t.nbytes for t in (self.pixels, *self.batch.tensors, self.packed)) + self._result_bytes()

    @property
    def own_bytes(self) -> int:
        """Bytes that no other size shares: what the graph pool took, or on a CPU the outputs."""
        return self.pool_bytes if self.graph is not None else self._result_bytes()

    def _result_bytes(self) -> int:
        return sum(r.numel() * r.element_size() for r in self._results if isinstance(r, Tensor))

    def write(self, args: Sequence[Any], values: LayoutValues, rows: int) -> None:
        """Copy a call's pixels and its layout's metadata into the static inputs (not the metadata of the last call again)."""
        bound = self.body.bound
        target = self._pixel_views.get(rows)
        if target is None:
            target = self.pixels.narrow(bound.pixel_axis, 0, rows * bound.pixels_per_row)
            if len(self._pixel_views) < _MAX_VIEWS:
                self._pixel_views[rows] = target
        target.copy_(args[bound.pixels], non_blocking=True)
        self.batch.write(args, rows)
        if self.arena.owner == (self.serial, values.serial):
            return
        if values.packed is not None:
            self.packed.copy_(values.packed, non_blocking=True)
        elif self.packed.numel():
            sources = [tensor_of(values.made[i]) for i in self.copied] + list(values.segments.values())
            targets = [self.tensors[i] for i in self.copied] + list(self.segments.values())
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self.arena.owner = (self.serial, values.serial)

    def fill_tail(self, rows: int, value: float) -> None:
        """Set the padded pixel rows."""
        axis, width = self.body.bound.pixel_axis, self.body.bound.pixels_per_row
        if self.pixels.dtype.is_floating_point and rows < self.bucket.patches:
            self.pixels.narrow(axis, rows * width, (self.bucket.patches - rows) * width).fill_(value)

    def turn_tails(self, rows: int) -> None:
        """Put the padded rows of each metadata tensor in reverse order: still valid, and not what the layout says."""
        bound = self.body.bound
        for index in self.copied:
            for axis in token_axes(self.body.hoisted.metadata[index].meta["val"], bound.symbols):
                tensor = self.tensors[index]
                real = tensor.shape[axis] * rows // self.bucket.patches
                tail = tensor.narrow(axis, real, tensor.shape[axis] - real)
                tail.copy_(tail.flip(axis))

    def run(self, args: Sequence[Any], beside: Any = None) -> list[Any]:
        """The body on the static inputs and a call's parameters, uncaptured; see `run_body` for `beside`."""
        static = list(args)
        static[self.body.bound.pixels] = self.pixels
        self.batch.give(static)
        n = self.bucket.tokens
        with torch.no_grad():  # the graph of a function that is itself under `no_grad` is called in grad mode
            return run_body(self.body, static, n, self.tensors, self.segments, self.kernels, self.bounds, beside)

    def record(self, args: Sequence[Any], pool: Any, warm: bool = False) -> None:
        """Warm up on a side stream, then capture into `pool`; nothing on a CPU, where `replay` calls the pieces.

        Args:
            args: of a call.
            pool: a graph pool.
            warm: the pieces have just run for as many rows, and attention by the same kernels: no other run loads anything. Nor
                do products: a kernel that was chosen for one has run (`Choices.settle`).

        Raises:
            Exception: what made the capture impossible; the stream is out of capture mode by then.
        """
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                kernels = products.CHOICES.settle(self.body.products_at(self.bucket.tokens), self.device, self.body.tiles)
                before = torch.cuda.memory_reserved()
                with products.using(kernels):
                    self._record_cuda(args, pool, warm)
                self.pool_bytes = max(torch.cuda.memory_reserved() - before, 0)

    def _record_cuda(self, args: Sequence[Any], pool: Any, warm: bool) -> None:
        current, side = torch.cuda.current_stream(), _torch.capture_stream(torch.cuda.current_device())
        beside = _torch.second_capture_stream(side.device_index) if self.bucket.patches <= BESIDE else None
        with _one_capture, torch.cuda.stream(side):
            side.wait_stream(current)
            # The first run compiles and loads what is lazy outside the capture.
            with _torch.pool_held(pool, side.device_index, lambda: None if warm else self.run(args, beside)):
                if not warm:
                    side.synchronize()
                _torch.release_workspaces()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = self.run(args, beside)
                except BaseException:
                    _torch.end_failed_capture(graph, pool, side)
                    raise
                graph.capture_end()
                _torch.release_workspaces()
        current.wait_stream(side)
        self.graph = graph
        self._results = [_torch.unowned(r) if self._is_pooled(r, args) else r for r in results]

    def _is_pooled(self, result: Any, args: Sequence[Any]) -> bool:
        if not isinstance(result, Tensor):
            return False
        inputs = {
            t.untyped_storage().data_ptr()
            for t in (*args, *self.tensors, *self.batch.tensors, self.pixels)
            if isinstance(t, Tensor)
        }
        return result.untyped_storage().data_ptr() not in inputs

    def replay(self, args: Sequence[Any]) -> None:
        """Run the body on the static inputs; results are in the static outputs, in stream order."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._results = self.run(args)

    def real_rows(self, rows: int) -> list[Any]:
        """Views of the static outputs' real rows."""
        if self.graph is not None and rows in self._views:  # a graph's outputs stay where they are
            return self._views[rows]
        tokens = rows // self.body.bound.symbols.unit
        views = [
            r if o.axis is None else r.narrow(o.axis, 0, tokens * o.rows)
            for r, o in zip(self._results, self._outputs, strict=True)
        ]
        if self.graph is not None and len(self._views) < _MAX_VIEWS:
            self._views[rows] = views
        return views

    def copy_out(self, rows: int) -> list[Any]:
        """Copies of the real rows, which belong to the caller."""
        views = self.real_rows(rows)
        of = self._views_of
        results = [
            _blank(v, o.axis) if isinstance(v, Tensor) and i not in of else v
            for i, (v, o) in enumerate(zip(views, self._outputs, strict=True))
        ]
        pairs = [(r, v) for i, (r, v) in enumerate(zip(results, views, strict=True)) if isinstance(v, Tensor) and i not in of]
        copy_all([r for r, _ in pairs], [v for _, v in pairs])
        for index, owner in of.items():
            results[index] = _same_view(views[index], views[owner], results[owner])
        return results


def _blank(view: Tensor, axis: int | None) -> Tensor:
    """Memory for a copy of a result: laid out as eager's, with gaps between rows where that has them."""
    if axis == 0 and not view.is_contiguous() and 0 not in view.stride():
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    # `empty_like` would keep the stride of an axis of size 1, which is that of the whole bucket.
    return torch.empty_like(view, memory_format=torch.contiguous_format if view.is_contiguous() else torch.preserve_format)


def _same_view(view: Tensor, owner: Tensor, copy: Tensor) -> Tensor:
    """The view of `copy` that `view` is of `owner`: results that share memory share it in the caller's hands, too.

    Raises:
        RuntimeError: it is none, or the copy is laid out otherwise.
    """
    offset, rest = divmod(view.data_ptr() - owner.data_ptr(), owner.element_size())
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    end = sum((size - 1) * stride for size, stride in zip(owner.shape, owner.stride(), strict=True))
    laid = [s for size, s in zip(owner.shape, owner.stride(), strict=True) if size > 1]
    if rest or offset < 0 or last > end or laid != [s for size, s in zip(copy.shape, copy.stride(), strict=True) if size > 1]:
        raise RuntimeError("two results share memory in a way that copies of them cannot")
    return copy.as_strided(view.shape, view.stride(), copy.storage_offset() + offset)


def bytes_needed(body: CompiledBody, bucket: Bucket, args: Sequence[Any], values: LayoutValues) -> int:
    """Bytes of the static inputs and outputs of a bucket, before it is captured: a bound from below of what it takes."""
    pixels = args[body.bound.pixels]
    width = body.bound.pixels_per_row * pixels.element_size()
    total = pixels.numel() // pixels.shape[body.bound.pixel_axis] * bucket.patches * width
    total += sum(t.nbytes for t in values.segments.values())
    total += sum(math.prod(m.shape) * m.dtype.itemsize for i, m in enumerate(values.made) if body.program.reads(i))
    for fake in body.program.output_values:
        if isinstance(fake, Tensor):
            sizes = [_size(body.bound.symbols, size, bucket.tokens) for size in fake.shape if body.bound.symbols.linear(size)]
            total += math.prod(sizes) * fake.element_size()
    return total


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _size(symbols: Any, size: Any, n: int) -> int:
    form = symbols.linear(size)
    assert form is not None  # `prove_padding` refuses pieces with other sizes
    return form[0] * n + form[1]
