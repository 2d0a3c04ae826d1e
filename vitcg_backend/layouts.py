"""Layouts: what the grid of one call means for the body, computed once and kept.

The prologue runs on the real grid, or, for a bucket, on the real grid with dummy items that fill the rest of it, so that its
results are right for every row. A padded layout is checked before a result that it served is given out: segments and gathers
must not cross from real rows to padded ones, and what belongs to a real row must be what the real grid alone gives.

Where the prologue can run on the host it does, from frames seen before (`prologue_by_frame`), and its results go to the
device in one copy. The check, which needs the prologue itself, then comes after the replay has been launched
(`LayoutCache.check`): the device works meanwhile. It may, because the padded grid is a grid like any other: whatever the check
finds, no index is out of bounds.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from . import _torch
from .attention import KernelChoice, SegmentBounds, VarlenKernel, tiered
from .bucketing import Bucket, Layout, tail_grid
from .passes import CompiledBody
from .passes.graph import Role, token_axes
from .passes.program import AttentionStep
from .sizes import Sizes

__all__ = ["MAX_BYTES", "LayoutCache", "LayoutValues", "Misfit", "grid_tensor"]

_MAX_LAYOUTS = 512
MAX_BYTES = 256 << 20
"""Cap of the metadata kept for layouts: a call of 16384 tokens has a few MiB of it."""


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
        kernels: metadata index of a cu_seqlens -> the attention kernel of its segments, which `segments` was made for.
        bounds: metadata index of a cu_seqlens -> the static bounds that `segments` was made for.
        num_segments: most segments among them that belong to the call, the padded tail left out.
        ready: event recorded after they were computed (CUDA), for those of no bucket.
        stream: handle of the stream they were computed on.
        boundaries: metadata index of a cu_seqlens -> its values, for the unpadded layout alone.
        serial: a number no other values have.
        unchecked: the prologue's results and the values of each cu_seqlens, until `LayoutCache.check` has looked at them.
        misfit: what it found.
    """

    tensors: tuple[Tensor, ...]
    segments: dict[int, Tensor]
    kernels: dict[int, VarlenKernel]
    bounds: dict[int, SegmentBounds]
    num_segments: int
    ready: Any = None
    stream: Any = None
    boundaries: dict[int, list[int]] = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)
    unchecked: tuple[tuple[Tensor, ...], dict[int, list[int]]] | None = None
    misfit: Misfit | None = None

    @property
    def launches(self) -> tuple[tuple[int, str, SegmentBounds], ...]:
        """All that decides how attention is launched: values with equal ones may use one capture."""
        return tuple((index, kernel.name, self.bounds[index]) for index, kernel in self.kernels.items())

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.tensors, *self.segments.values()))

    def upload(self, device: torch.device) -> None:
        """Move everything to a GPU in one copy out of pinned memory, which waits for nothing."""
        sources = [*self.tensors, *self.segments.values()]
        if not sources:
            return
        # Wide elements first: so each tensor begins at a multiple of its own element size.
        order = sorted(range(len(sources)), key=lambda i: -sources[i].element_size())
        flat = [sources[i].reshape(-1).view(torch.uint8) for i in order]
        sizes = [f.numel() for f in flat]
        staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        torch.cat(flat, out=staged)
        moved: list[Tensor] = [torch.empty(0)] * len(sources)
        for i, part in zip(order, staged.to(device, non_blocking=True).split(sizes), strict=True):
            moved[i] = part.view(sources[i].dtype).view(sources[i].shape)
        self.tensors = tuple(moved[: len(self.tensors)])
        self.segments = dict(zip(self.segments, moved[len(self.tensors) :], strict=True))

    def wait(self) -> None:
        """Make the current stream see these values, and keep their memory until it is done with them."""
        tensors = (*self.tensors, *self.segments.values())
        if self.stream is None or not tensors or _torch.raw_stream(tensors[0].device) == self.stream:
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        if self.ready is not None:
            stream.wait_event(self.ready)
        for tensor in tensors:
            tensor.record_stream(stream)


class LayoutCache:
    """Layout and bucket -> `LayoutValues`, at most 512 and `max_bytes`, the least recently used dropped.

    Args:
        body: the compiled graph.
        choice: of its attention kernels, None for a graph without attention.
        max_bytes: cap of the tensors; the latest values are kept in any case.

    Attributes:
        num_bytes: of what is kept.
        version: goes up whenever values are dropped.
        items: arguments that bring a value for each item, besides the grid.
        sizes: the sizes among the arguments of a call.
        other_sizes: those that the metadata depends on besides the grid and the rows.
    """

    def __init__(self, body: CompiledBody, choice: KernelChoice | None, max_bytes: int = MAX_BYTES) -> None:
        self.body = body
        self.choice = choice
        self.max_bytes, self.num_bytes, self.version = max_bytes, 0, 0
        self.segment_rows = {s.segments: s.rows for s in body.program.steps if isinstance(s, AttentionStep)}  # rows per n
        self.items = [i for i, node in enumerate(body.bound.placeholders) if node.meta["role"] == Role.ITEMS]
        self.sizes = Sizes(body.bound)
        self.other_sizes = [i for i in self.sizes.others if i in body.hoisted.prologue_inputs]
        self._values: OrderedDict[Any, LayoutValues] = OrderedDict()
        self._shared: dict[Bucket | None, list[tuple[dict[int, VarlenKernel], dict[int, SegmentBounds]]]] = {}
        self._host, self._quick = body.host_prologue, body.quick_prologue
        self._host_agrees: bool | None = None  # with the prologue on the device; not yet looked at
        self._traced: _Traced | None = None

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget every layout."""
        self.version += 1
        self._values.clear()
        self._shared.clear()
        self.num_bytes = 0

    def share(self, bucket: Bucket, kernels: dict[int, VarlenKernel], bounds: dict[int, SegmentBounds]) -> None:
        """Give layouts that fit into `bounds`, those of a capture, these bounds and its kernels from now on: they need no
        other capture.

        Nothing where larger bounds cost time (`VarlenKernel.needs_longest`).
        """
        if not kernels or any(kernel.needs_longest for kernel in kernels.values()):
            return
        self._shared.setdefault(bucket, []).append((kernels, bounds))
        self._drop(lambda key: key[3] == bucket)

    def _drop(self, chosen: Callable[[Any], bool]) -> None:
        self.version += 1
        for key in [key for key in self._values if chosen(key)]:
            self.num_bytes -= self._values.pop(key).num_bytes

    def get(
        self,
        args: Sequence[Any],
        layout: Layout | None,
        rows: int,
        bucket: Bucket | None,
        *,
        keep: bool = True,
        measure: bool = False,
        shared: bool = False,
    ) -> LayoutValues:
        """Values of a layout for a bucket, or for its exact rows with ``bucket=None``.

        Args:
            args: arguments of the call.
            layout: its grid, None for a tower without one.
            rows: its rows.
            bucket: what they are padded to.
            keep: False when the values depend on more than the layout: then they are computed for this call alone.
            measure: attention kernels may be timed for them (`KernelChoice.at`).
            shared: other layouts are to use their capture (`share`).

        Raises:
            Misfit: the padded layout is not safe.
            Exception: whatever the tower's own metadata functions raise for a bad grid.
        """
        if not keep or self.body.hoisted.reads_state:
            return self._compute(args, layout, rows, bucket, measure, shared)
        items = tuple(tuple(args[i].tolist()) for i in self.items)
        if any(len(i) != len(layout or ()) for i in items):
            return self._compute(args, layout, rows, bucket, measure, shared)
        key = (layout, items, rows, bucket, *[args[i] for i in self.other_sizes])
        values = self._values.get(key)
        if values is None:
            values = self._compute(args, layout, rows, bucket, measure, shared)
            self._values[key] = values
            self.num_bytes += values.num_bytes
            while len(self._values) > 1 and (len(self._values) > _MAX_LAYOUTS or self.num_bytes > self.max_bytes):
                self.num_bytes -= self._values.popitem(last=False)[1].num_bytes
                self.version += 1
        else:
            self._values.move_to_end(key)
        if values.misfit is not None:
            raise values.misfit
        values.wait()
        return values

    def check(self, args: Sequence[Any], layout: Layout | None, rows: int, values: LayoutValues) -> None:
        """Look at values of a bucket, unless they have been looked at. The arguments are those of `get`.

        Raises:
            Misfit: the padded layout is not safe; what it has served is not to be used.
            Exception: whatever the tower's own metadata functions raise for a bad grid.
        """
        if values.unchecked is None:
            return
        padded, lists = values.unchecked
        with torch.inference_mode(False), torch.no_grad():
            if self._host is None:
                exact = self.get(args, layout, rows, None)
                tensors, boundaries = exact.tensors, exact.boundaries
            else:
                # Of one frame the functions' results are kept as they are: put together or not is the same.
                alone = layout is not None and len(layout) == 1 and layout[0][:-2] in ((), (1,))
                tensors = self._prologue(args, layout, (), rows, quick=alone)
                boundaries = self._boundaries(args, tensors, rows)
            values.unchecked = None
            try:
                self._check_closed(padded, lists, boundaries, rows)
                self._check_equal(padded, tensors, rows)
            except Misfit as misfit:
                values.misfit = misfit
                if self._quick is not None:  # it may be at fault: from now on without it, and this layout once more
                    self._quick = None
                    self._drop(lambda key: True)
                raise

    def _compute(
        self, args: Sequence[Any], layout: Layout | None, rows: int, bucket: Bucket | None, measure: bool, shared: bool
    ) -> LayoutValues:
        unit = self.body.bound.symbols.unit
        total = rows if bucket is None else bucket.patches
        tail = _tail_like(layout, tail_grid(total - rows, math.isqrt(unit))) if layout is not None and total > rows else ()
        device = args[self.body.bound.pixels].device
        with torch.inference_mode(False), torch.no_grad():
            quick = bucket is not None and self._quick is not None
            tensors = self._prologue(args, layout, tail, total, quick=quick)
            lists = self._boundaries(args, tensors, total)
            values = self._with_segments(tensors, lists, rows, bucket, measure, shared)
            if total == rows and not quick:
                values.boundaries = lists
            else:
                values.unchecked = tensors, lists
            if self._host is None:
                self.check(args, layout, rows, values)
            elif device.type == "cuda":
                values.upload(device)
        if device.type == "cuda":
            values.stream = _torch.raw_stream(device)
            if bucket is None:  # those of buckets are made and used in the order that a tower keeps its streams in
                values.ready = torch.cuda.Event()
                values.ready.record(torch.cuda.current_stream(device))
        return values

    def _prologue(
        self, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int, *, quick: bool = False
    ) -> tuple[Tensor, ...]:
        """Results of the prologue on a layout and a tail, where `_host` runs: on the host."""
        if self._host is not None and self._host_agrees is not True:
            device = args[self.body.bound.pixels].device.type
            self._host_agrees = device == "cpu" or self._agrees(args, layout, tail, total)
            if not self._host_agrees:
                self._host = self._quick = None
        module = self.body.hoisted.prologue if self._host is None else self._host
        return self._run(self._quick if quick and self._quick is not None else module, args, layout, tail, total)

    def _agrees(self, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int) -> bool:
        """Whether the host gives what the device gives, on the first layout: the last word on `prologue_on_host`."""
        expected = self._run(self.body.hoisted.prologue, args, layout, tail, total)
        assert self._host is not None
        try:
            found = self._run(self._host, args, layout, tail, total)
            torch.testing.assert_close(found, tuple(t.cpu() for t in expected), rtol=1e-5, atol=1e-6, equal_nan=True)
        except Exception as error:
            _torch.log.info("metadata is computed on the device, on the host it is other: %s", error)
            return False
        return True

    def _run(
        self, module: fx.GraphModule, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int
    ) -> tuple[Tensor, ...]:
        bound = self.body.bound
        items = len(layout or ()) + len(tail)
        n = total // bound.symbols.unit
        host = module is not self.body.hoisted.prologue
        inputs = []
        for position, role in self._facts().inputs:
            value = args[position]
            if role == Role.GRID and (host or tail):
                value = grid_tensor([*layout, *tail], value.dtype, torch.device("cpu") if host else value.device)  # type: ignore[misc]
            elif role == Role.ITEMS:
                value = value.cpu() if host else value
                if tail:  # a merge size of 1 suits every dummy item
                    value = torch.cat([value, value.new_ones(len(tail))])
            elif role == Role.SIZE:
                value = self.sizes.value(position, args, n, items)
            inputs.append(value)
        return tuple(module.forward(*inputs))  # as in `CompiledTower._operators`

    def _check_shapes(self, args: Sequence[Any], tensors: tuple[Tensor, ...], n: int) -> None:
        """Compiled pieces believe the shapes that they were traced with; what the caller gives may have any."""
        for place, name, forms in self._facts().shapes:
            tensor = tensors[place] if place >= 0 else args[-place - 1]
            for size, form in zip(tensor.shape, forms, strict=True):
                if form is not None and size != form[0] * n + form[1]:
                    raise Misfit("metadata_shape", f"{name} is {tuple(tensor.shape)} in a call of {n} tokens")

    def _facts(self) -> _Traced:
        if self._traced is None:
            self._traced = _Traced.of(self.body)
        return self._traced

    def _boundaries(self, args: Sequence[Any], tensors: tuple[Tensor, ...], total: int) -> dict[int, list[int]]:
        """The values of each cu_seqlens, such as eager's attention takes: whole rows, no segment empty."""
        n = total // self.body.bound.symbols.unit
        self._check_shapes(args, tensors, n)
        lists = {}
        for index, each in self.segment_rows.items():
            cu: list[int] = tensors[index].tolist()
            whole = not tensors[index].dtype.is_floating_point and cu[:1] == [0] and cu[-1] == n * each
            if not whole or any(a >= b for a, b in itertools.pairwise(cu)):
                raise Misfit("segments", f"segments {index} do not cut the {n * each} rows into parts of at least one")
            lists[index] = cu
        return lists

    def _check_closed(
        self, tensors: tuple[Tensor, ...], lists: dict[int, list[int]], exact: dict[int, list[int]], rows: int
    ) -> None:
        unit = self.body.bound.symbols.unit
        for index, cu in lists.items():
            if cu[: len(exact[index])] != exact[index]:
                raise Misfit("segments_differ", f"segments {index} of {rows} real rows depend on the padding")
        for index, index_rows, source_rows in self.body.gathers:
            order, real, limit = tensors[index], rows // unit * index_rows, rows // unit * source_rows
            closed = (order[:real] < limit).all() & (order[:real] >= 0).all() & (order[real:] >= limit).all()
            if not bool(closed):
                raise Misfit("gather_crosses_padding", f"metadata {index} moves rows across row {limit}")

    def _check_equal(self, padded: tuple[Tensor, ...], exact: tuple[Tensor, ...], rows: int) -> None:
        """The contract of metadata: what belongs to a real row is the same with and without dummy items."""
        for index, name, axis in self._facts().axes:
            if index in self.segment_rows:
                continue  # checked by their boundaries; handed out as the unpadded grid gives them
            a, b = padded[index], exact[index]
            real = a if axis is None else a.narrow(axis, 0, b.shape[axis])
            if not torch.equal(real, b):
                raise Misfit("metadata_differs", f"metadata {name} of {rows} real rows depends on the padding")

    def _with_segments(
        self,
        tensors: tuple[Tensor, ...],
        lists: dict[int, list[int]],
        rows: int,
        bucket: Bucket | None,
        measure: bool,
        shared: bool,
    ) -> LayoutValues:
        bounds, most = {}, 0
        for index, cu in lists.items():
            real = rows // self.body.bound.symbols.unit * self.segment_rows[index]
            most = max(most, sum(end <= real for end in cu[1:]))
            bounds[index] = SegmentBounds(cu[-1], len(cu) - 1, max((b - a for a, b in itertools.pairwise(cu)), default=0))
        if self.choice is None:  # no attention, no segments
            return LayoutValues(tensors, {}, {}, {}, most)
        kernels, bounds = self._served_by(bucket, bounds, self.choice, measure, shared)
        segments = {
            index: kernels[index].metadata(cu, bounds[index]).to(tensors[index].device, non_blocking=True)
            for index, cu in lists.items()
        }
        return LayoutValues(tensors, segments, kernels, bounds, most)

    def _served_by(
        self, bucket: Bucket | None, exact: dict[int, SegmentBounds], choice: KernelChoice, measure: bool, shared: bool
    ) -> tuple[dict[int, VarlenKernel], dict[int, SegmentBounds]]:
        """Kernels and static bounds of a layout: those of a shared capture where it fits, else in a bucket tiers."""
        for kernels, known in self._shared.get(bucket, ()):
            if all(known[index].admit(bounds) for index, bounds in exact.items()):
                return kernels, known
        kernels = {index: choice.at(index, bounds, measure=measure, shared=shared) for index, bounds in exact.items()}
        if bucket is None:
            return kernels, exact
        return kernels, {index: tiered(bounds, kernels[index], shared=shared) for index, bounds in exact.items()}


@dataclass(frozen=True)
class _Traced:
    """What was traced, in plain numbers: to ask sizes for them takes longer than all else for a small layout.

    Attributes:
        inputs: of each input of the prologue the position in the call, and its role.
        shapes: of each tensor that the pieces read where it is (a result of the prologue, or -1 - position), its name, and
            (c, d) of each of its sizes.
        axes: of each result of the prologue that the pieces read its index, its name, and its token axis.
    """

    inputs: list[tuple[int, str]]
    shapes: list[tuple[int, str, list[tuple[int, int] | None]]]
    axes: list[tuple[int, str, int | None]]

    @classmethod
    def of(cls, body: CompiledBody) -> _Traced:
        symbols, nodes = body.bound.symbols, body.bound.placeholders
        extra = [(-1 - i, node) for i, node in enumerate(nodes) if node.meta["role"] == Role.EXTRA]
        made = [(i, node) for i, node in enumerate(body.hoisted.metadata) if body.program.reads(i)]
        return cls(
            [(position, nodes[position].meta["role"]) for position in body.hoisted.prologue_inputs],
            [(i, node.name, [symbols.linear(size) for size in node.meta["val"].shape]) for i, node in (*made, *extra)],
            [(i, node.name, next(iter(token_axes(node.meta["val"], symbols)), None)) for i, node in made],
        )


def grid_tensor(layout: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A grid as a tensor. A copy to a GPU waits for nothing: what is queued there may take milliseconds."""
    on_gpu = device.type == "cuda"
    return torch.tensor(layout, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=True)


def _tail_like(layout: Layout, tail: Layout) -> Layout:
    """Dummy items as the call has them: of one frame each where it has images only (some towers take nothing else), and
    without a number of frames where its grid has two columns.
    """
    columns = len(layout[0])
    if columns == 3 and any(frames > 1 for frames, _, _ in layout):
        return tail
    return tuple((1, h, w)[3 - columns :] for frames, h, w in tail for _ in range(frames))  # type: ignore[misc]
