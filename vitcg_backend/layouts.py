"""Layouts: what the grid of one call means for the body, computed once and kept.

The prologue runs on the real grid, or, for a bucket, on the real grid with dummy items that fill the rest of it, so that its
results are right for every row. Before a padded layout may be used it is checked: segments and gathers must not cross from
real rows to padded ones.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .attention import SegmentBounds, VarlenKernel
from .bucketing import Bucket, Layout, capacity_tier, tail_grid
from .passes import CompiledBody
from .passes.graph import Role, token_axes
from .passes.program import AttentionStep

__all__ = ["LayoutCache", "LayoutValues", "Misfit"]

_LONGEST_TIERS = (64, 256, 1024, 8192)
_MAX_LAYOUTS = 512


class Misfit(Exception):
    """A layout that its bucket cannot serve. `reason` is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass
class LayoutValues:
    """Metadata of one layout, on the device.

    Attributes:
        tensors: results of the prologue, in its order.
        segments: metadata index of a cu_seqlens -> what the attention kernel reads, int32.
        bounds: metadata index of a cu_seqlens -> the static bounds that `segments` was made for.
        num_segments: most segments among them, the padded tail included.
        ready: event recorded after they were computed (CUDA).
        stream: stream they were computed on.
        serial: a number no other values have.
    """

    tensors: tuple[Tensor, ...]
    segments: dict[int, Tensor]
    bounds: dict[int, SegmentBounds]
    num_segments: int
    ready: Any = None
    stream: Any = None
    serial: int = field(default_factory=itertools.count().__next__)

    def wait(self) -> None:
        """Make the current stream see these values, and keep their memory until it is done with them."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream(self.ready.device)
        if stream != self.stream:
            stream.wait_event(self.ready)
            for tensor in (*self.tensors, *self.segments.values()):
                tensor.record_stream(stream)


class LayoutCache:
    """Layout and bucket -> `LayoutValues`, at most 512, the least recently used dropped.

    Args:
        body: the compiled graph.
        kernel: its attention, None for a graph without attention.
    """

    def __init__(self, body: CompiledBody, kernel: VarlenKernel | None) -> None:
        self.body = body
        self.kernel = kernel
        self.segment_rows = {s.segments: s.rows for s in body.program.steps if isinstance(s, AttentionStep)}  # rows per n
        self._items = [i for i, node in enumerate(body.bound.placeholders) if node.meta["role"] == Role.ITEMS]
        self._values: OrderedDict[Any, LayoutValues] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget every layout."""
        self._values.clear()

    def get(
        self, args: Sequence[Any], layout: Layout | None, rows: int, bucket: Bucket | None, *, keep: bool = True
    ) -> LayoutValues:
        """Values of a layout for a bucket, or for its exact rows with ``bucket=None``.

        Args:
            args: arguments of the call.
            layout: its grid, None for a tower without one.
            rows: its rows.
            bucket: what they are padded to.
            keep: False when the values depend on more than the layout: then they are computed for this call alone.

        Raises:
            Misfit: the padded layout is not safe.
            Exception: whatever the tower's own metadata functions raise for a bad grid.
        """
        if not keep or self.body.hoisted.reads_state:
            return self._compute(args, layout, rows, bucket)
        items = tuple(tuple(args[i].tolist()) for i in self._items)
        if any(len(i) != len(layout or ()) for i in items):
            return self._compute(args, layout, rows, bucket)
        key = (layout, items, rows, bucket)
        values = self._values.get(key)
        if values is None:
            values = self._compute(args, layout, rows, bucket)
            self._values[key] = values
            if len(self._values) > _MAX_LAYOUTS:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        values.wait()
        return values

    def _compute(self, args: Sequence[Any], layout: Layout | None, rows: int, bucket: Bucket | None) -> LayoutValues:
        unit = self.body.bound.symbols.unit
        total = rows if bucket is None else bucket.patches
        tail = _tail_like(layout, tail_grid(total - rows, math.isqrt(unit))) if layout is not None and total > rows else ()
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._prologue(args, layout, tail, total)
            self._check_shapes(tensors, total)
            lists = {i: tensors[i].tolist() for i in self.segment_rows}
            for index, cu in lists.items():
                if cu[:1] != [0] or cu[-1] != total // unit * self.segment_rows[index]:
                    raise Misfit("segments", f"segments {index} do not cover all of {total} patches")
            if total > rows:
                self._check_closed(tensors, lists, rows)
                self._check_equal(tensors, self.get(args, layout, rows, None).tensors, rows)
            values = self._with_segments(tensors, lists, bucket)
        device = args[self.body.bound.pixels].device
        if device.type == "cuda":
            values.stream = torch.cuda.current_stream(device)
            values.ready = torch.cuda.Event()
            values.ready.record(values.stream)
        return values

    def _prologue(self, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int) -> tuple[Tensor, ...]:
        bound = self.body.bound
        grid_items = None if layout is None else len(layout) + len(tail)
        n = total // bound.symbols.unit
        inputs = []
        for position in self.body.hoisted.prologue_inputs:
            node, value = bound.placeholders[position], args[position]
            if node.meta["role"] == Role.GRID and tail:
                value = torch.tensor([*layout, *tail], dtype=value.dtype, device=value.device)  # type: ignore[misc]
            elif node.meta["role"] == Role.ITEMS and tail:  # a merge size of 1 suits every dummy item
                value = torch.cat([value, value.new_ones(len(tail))])
            elif node.meta["role"] == Role.SIZE:
                form = bound.symbols.linear(node.meta["val"])
                value = grid_items if form is None else form[0] * n + form[1]
            inputs.append(value)
        return tuple(self.body.hoisted.prologue(*inputs))

    def _check_shapes(self, tensors: tuple[Tensor, ...], total: int) -> None:
        """What the trace took for a shape was learnt from a few grids: hold it against this one."""
        symbols = self.body.bound.symbols
        for node, tensor in zip(self.body.hoisted.metadata, tensors, strict=True):
            forms = [symbols.linear(size) for size in node.meta["val"].shape]
            sizes = [
                s if form is None else form[0] * (total // symbols.unit) + form[1]
                for form, s in zip(forms, tensor.shape, strict=True)
            ]
            if sizes != list(tensor.shape):
                raise Misfit(
                    "metadata_shape", f"metadata {node.name} has shape {tuple(tensor.shape)}, traced as {tuple(sizes)}"
                )

    def _check_closed(self, tensors: tuple[Tensor, ...], lists: dict[int, list[int]], rows: int) -> None:
        unit = self.body.bound.symbols.unit
        for index, cu in lists.items():
            end = rows // unit * self.segment_rows[index]
            if end not in cu:
                raise Misfit("segment_crosses_padding", f"segments {index} do not end at row {end}, the last real one")
        for index, index_rows, source_rows in self.body.gathers:
            order, real, limit = tensors[index], rows // unit * index_rows, rows // unit * source_rows
            closed = (order[:real] < limit).all() & (order[:real] >= 0).all() & (order[real:] >= limit).all()
            if not bool(closed):
                raise Misfit("gather_crosses_padding", f"metadata {index} moves rows across row {limit}")

    def _check_equal(self, padded: tuple[Tensor, ...], exact: tuple[Tensor, ...], rows: int) -> None:
        """The contract of metadata: what belongs to a real row is the same with and without dummy items."""
        symbols = self.body.bound.symbols
        for index, (node, a, b) in enumerate(zip(self.body.hoisted.metadata, padded, exact, strict=True)):
            if index in self.segment_rows or not self.body.program.reads(index):
                continue  # checked by their boundaries; handed out as the unpadded grid gives them
            axes = token_axes(node.meta["val"], symbols)
            real = a.narrow(axes[0], 0, b.shape[axes[0]]) if axes else a
            if not torch.equal(real, b):
                raise Misfit("metadata_differs", f"metadata {node.name} of {rows} real rows depends on the padding")

    def _with_segments(self, tensors: tuple[Tensor, ...], lists: dict[int, list[int]], bucket: Bucket | None) -> LayoutValues:
        segments, bounds, most = {}, {}, 0
        for index, cu in lists.items():
            count = len(cu) - 1
            longest = max((b - a for a, b in itertools.pairwise(cu)), default=0)
            most = max(most, count)
            assert self.kernel is not None  # a graph with segments has attention
            limits = SegmentBounds(cu[-1], count, longest)
            if bucket is not None:
                limits = _tiered(limits, self.kernel)
            bounds[index] = limits
            segments[index] = self.kernel.metadata(cu, limits).to(tensors[index].device, non_blocking=True)
        return LayoutValues(tensors, segments, bounds, most)


def _tail_like(layout: Layout, tail: Layout) -> Layout:
    """Dummy items as the call has them: of one frame each where it has images only (some towers take nothing else), and
    without a number of frames where its grid has two columns.
    """
    columns = len(layout[0])
    if columns == 3 and any(frames > 1 for frames, _, _ in layout):
        return tail
    return tuple((1, h, w)[3 - columns :] for frames, h, w in tail for _ in range(frames))  # type: ignore[misc]


def _tiered(exact: SegmentBounds, kernel: VarlenKernel) -> SegmentBounds:
    """Few bounds for many layouts: each distinct one is a capture."""
    if kernel.needs_longest:
        longest = min(capacity_tier(exact.longest), exact.rows)
        return SegmentBounds(exact.rows, min(capacity_tier(exact.segments), exact.rows), longest)
    longest = next((t for t in _LONGEST_TIERS if t >= exact.longest), exact.rows)
    segments = max(capacity_tier(exact.segments), capacity_tier(exact.rows // 64))
    return SegmentBounds(exact.rows, min(segments, exact.rows), min(longest, exact.rows))
