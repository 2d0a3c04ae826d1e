"""Layouts: what the grid of one call means for the body, computed once and kept.

The prologue runs on the real grid, or, for a bucket, on the real grid with dummy items that fill the rest of it, so that its
results are right for every row. A padded layout is checked before a result that it served is given out: segments and gathers
must not cross from real rows to padded ones, and what belongs to a real row must be what the real grid alone gives.

Where the prologue can run on the host it does, from frames seen before (`frames`), and the capture that reads its results
copies them to the device at once (`packed`). The check, which needs the prologue itself, then comes after the replay has been
launched (`LayoutCache.check`): the device works meanwhile. It may, because the padded grid is a grid like any other: whatever
the check finds, no index is out of bounds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from . import _torch
from .attention import KernelChoice, SegmentBounds, VarlenKernel, tiered
from .bucketing import Bucket, Layout, tail_grid
from .frames import Assembled, FrameByFrame
from .packed import pack, unpack
from .passes import CompiledBody
from .passes.graph import Role, token_axes
from .passes.program import AttentionStep
from .sizes import Sizes

__all__ = ["MAX_BYTES", "LayoutCache", "LayoutValues", "Misfit", "grid_tensor", "tensor_of"]

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
    """Metadata of one layout.

    Attributes:
        made: results of the prologue, in its order.
        segments: metadata index of a cu_seqlens -> what the attention kernel reads, int32.
        kernels: metadata index of a cu_seqlens -> the attention kernel of its segments, which `segments` was made for.
        bounds: metadata index of a cu_seqlens -> the static bounds that `segments` was made for.
        num_segments: most segments among them that belong to the call, the padded tail left out.
        packed: all that a capture reads, on the host in one buffer; None where the prologue runs on the device.
        ready: event recorded after they were on the device (CUDA), for those of no bucket.
        stream: handle of the stream that they came to the device on, None for what is on the host.
        boundaries: metadata index of a cu_seqlens -> its values, for the unpadded layout alone.
        serial: a number no other values have.
        shared: made for a capture that other layouts are to use.
        unchecked: the values of each cu_seqlens, until `LayoutCache.check` has looked at them.
        misfit: what it found.
    """

    made: Sequence[Tensor | Assembled]
    segments: dict[int, Tensor]
    kernels: dict[int, VarlenKernel]
    bounds: dict[int, SegmentBounds]
    num_segments: int
    packed: Tensor | None = None
    ready: Any = None
    stream: Any = None
    boundaries: dict[int, list[int]] = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)
    shared: bool = False
    unchecked: dict[int, list[int]] | None = None
    misfit: Misfit | None = None
    _there: tuple[Sequence[Tensor], dict[int, Tensor]] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Results of the prologue where it ran, in its order."""
        return [tensor_of(result) for result in self.made]

    @property
    def launches(self) -> tuple[tuple[int, str, SegmentBounds], ...]:
        """All that decides how attention is launched: values with equal ones may use one capture."""
        return tuple((index, kernel.name, self.bounds[index]) for index, kernel in self.kernels.items())

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, which lie on the host a second time in one buffer, or on the device once they are there."""
        made = sum(math.prod(m.shape) * m.dtype.itemsize for m in self.made)
        return 2 * (made + sum(t.nbytes for t in self.segments.values()))

    def on(self, device: torch.device) -> tuple[Sequence[Tensor], dict[int, Tensor]]:
        """`tensors` and `segments` where the pieces run. They go to a GPU in one copy that waits for nothing, once."""
        if self._there is None:
            sources = [*self.tensors, *self.segments.values()]
            if self.stream is None and device.type == "cuda" and sources:
                with torch.inference_mode(False), torch.no_grad():
                    buffer = pack([(source,) for source in sources], pinned=True).to(device, non_blocking=True)
                    sources = unpack(buffer, [s.shape for s in sources], [s.dtype for s in sources])
                self.note_stream(device, shared=True)
            made, segments = sources[: len(self.made)], sources[len(self.made) :]
            self._there = made, dict(zip(self.segments, segments, strict=True))
        self.wait()
        return self._there

    def note_stream(self, device: torch.device, *, shared: bool) -> None:
        """Remember where they come to the device; with `shared` other streams use them in no order that a tower keeps."""
        self.stream = _torch.raw_stream(device)
        if shared:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Make the current stream see what is on the device, and keep its memory until it is done with it."""
        if self.stream is None:
            return
        tensors, segments = (self.tensors, self.segments) if self._there is None else self._there
        on_gpu = [t for t in (*tensors, *segments.values()) if t.device.type == "cuda"]
        if not on_gpu or _torch.raw_stream(on_gpu[0].device) == self.stream:
            return
        stream = torch.cuda.current_stream(on_gpu[0].device)
        if self.ready is not None:
            stream.wait_event(self.ready)
        for tensor in on_gpu:
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
        self._host = body.host_prologue
        by_grid = self._host is not None and not self.items and not self.other_sizes
        self._by_frame = FrameByFrame() if by_grid else None
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
        known = self._shared.setdefault(bucket, [])
        if not kernels or any(kernel.needs_longest for kernel in kernels.values()) or (kernels, bounds) in known:
            return
        known.append((kernels, bounds))
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
        like: Layout | None = None,
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
            like: one of as many rows, whose segments have to have room in the bounds as well.

        Raises:
            Misfit: the padded layout is not safe.
            Exception: whatever the tower's own metadata functions raise for a bad grid.
        """
        if not keep or self.body.hoisted.reads_state:
            return self._compute(args, layout, rows, bucket, measure, shared, like)
        items = tuple(tuple(args[i].tolist()) for i in self.items)
        if any(len(i) != len(layout or ()) for i in items):
            return self._compute(args, layout, rows, bucket, measure, shared, like)
        key = (layout, items, rows, bucket, like, *[args[i] for i in self.other_sizes])
        values = self._values.get(key)
        if values is not None and shared and not values.shared:  # made before the warm-up
            self._drop(lambda known: known == key)
            values = None
        if values is None:
            values = self._compute(args, layout, rows, bucket, measure, shared, like)
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
        lists = values.unchecked
        with torch.inference_mode(False), torch.no_grad():
            if self._host is None:
                exact = self.get(args, layout, rows, None)
                tensors, boundaries = exact.tensors, exact.boundaries
            else:
                # Of one frame the prologue's own results are kept: put together or not is the same.
                alone = layout is not None and len(layout) == 1 and layout[0][:-2] in ((), (1,))
                known = self._assembled(args, layout or ()) if alone else None
                tensors = [tensor_of(m) for m in known or self._prologue(args, layout, (), rows)]
                boundaries = self._boundaries(args, tensors, rows)
            values.unchecked = None
            try:
                self._check_closed(values.made, lists, boundaries, rows)
                self._check_equal(values.made, tensors, rows)
            except Misfit as misfit:
                values.misfit = misfit
                if self._by_frame is not None:  # it may be at fault: from now on without it, and this layout once more
                    self._by_frame = None
                    self._drop(lambda key: True)
                raise

    def _compute(
        self,
        args: Sequence[Any],
        layout: Layout | None,
        rows: int,
        bucket: Bucket | None,
        measure: bool,
        shared: bool,
        like: Layout | None,
    ) -> LayoutValues:
        unit = self.body.bound.symbols.unit
        total = rows if bucket is None else bucket.patches
        tail = _tail_like(layout, tail_grid(total - rows, math.isqrt(unit))) if layout is not None and total > rows else ()
        device = args[self.body.bound.pixels].device
        with torch.inference_mode(False), torch.no_grad():
            assembled = None if bucket is None or layout is None else self._assembled(args, layout, tail)
            made = self._prologue(args, layout, tail, total) if assembled is None else assembled
            lists = self._boundaries(args, made, total)
            wide = lists if like is None else self._boundaries_of((*like, *tail), args, total) or lists
            values = self._with_segments(made, lists, wide, rows, bucket, measure, shared)
            values.shared = shared
            if total == rows and assembled is None:
                values.boundaries = lists
            else:
                values.unchecked = lists
            on_host = self._host is not None or device.type == "cpu"
            if on_host and bucket is not None:
                values.packed = pack(self._read_by_pieces(values), pinned=device.type == "cuda")
            if self._host is None:
                self.check(args, layout, rows, values)
        if not on_host:  # those of buckets are made and used in the order that a tower keeps its streams in
            values.note_stream(device, shared=bucket is None)
        return values

    def _read_by_pieces(self, values: LayoutValues) -> list[Sequence[Tensor]]:
        """What a capture copies, as `pack` takes it."""
        made = [values.made[index] for index, _, _ in self._facts().axes]
        pieces: list[Sequence[Tensor]] = [(m,) if isinstance(m, Tensor) else m.pieces() for m in made]
        return pieces + [(s,) for s in values.segments.values()]

    def _assembled(self, args: Sequence[Any], layout: Layout, tail: Layout = ()) -> list[Assembled] | None:
        """Results of the prologue on the host, put together from frames; None where they cannot be."""
        if self._by_frame is None or not self._on_host(args, layout, tail, _patches((*layout, *tail))):
            return None
        host = self._host
        assert host is not None  # `_on_host` says so
        return self._by_frame((*layout, *tail), lambda part: self._run(host, args, part, (), _patches(part)))

    def _on_host(self, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int) -> bool:
        """Whether the prologue runs on the host."""
        if self._host is not None and self._host_agrees is not True:
            device = args[self.body.bound.pixels].device.type
            self._host_agrees = device == "cpu" or self._agrees(args, layout, tail, total)
            if not self._host_agrees:
                self._host = self._by_frame = None
        return self._host is not None

    def _prologue(self, args: Sequence[Any], layout: Layout | None, tail: Layout, total: int) -> tuple[Tensor, ...]:
        """Results of the prologue on a layout and a tail, where `_host` runs: on the host."""
        on_host = self._on_host(args, layout, tail, total)
        module = self._host if on_host else None
        return self._run(self.body.hoisted.prologue if module is None else module, args, layout, tail, total)

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

    def _check_shapes(self, args: Sequence[Any], tensors: Sequence[Tensor | Assembled], n: int) -> None:
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

    def _boundaries(self, args: Sequence[Any], tensors: Sequence[Tensor | Assembled], total: int) -> dict[int, list[int]]:
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

    def _boundaries_of(self, layout: Layout, args: Sequence[Any], total: int) -> dict[int, list[int]] | None:
        """Those of another layout than the call's; None where the tower does not take it: then no call will have it."""
        try:
            return self._boundaries(args, self._prologue(args, (), layout, total), total)
        except Exception as error:
            _torch.log.info("metadata of %s: %s", layout, error)
            return None

    def _check_closed(
        self, made: Sequence[Tensor | Assembled], lists: dict[int, list[int]], exact: dict[int, list[int]], rows: int
    ) -> None:
        unit = self.body.bound.symbols.unit
        for index, cu in lists.items():
            if cu[: len(exact[index])] != exact[index]:
                raise Misfit("segments_differ", f"segments {index} of {rows} real rows depend on the padding")
        for index, index_rows, source_rows in self.body.gathers:
            order, real, limit = tensor_of(made[index]), rows // unit * index_rows, rows // unit * source_rows
            closed = (order[:real] < limit).all() & (order[:real] >= 0).all() & (order[real:] >= limit).all()
            if not bool(closed):
                raise Misfit("gather_crosses_padding", f"metadata {index} moves rows across row {limit}")

    def _check_equal(self, padded: Sequence[Tensor | Assembled], exact: Sequence[Tensor], rows: int) -> None:
        """The contract of metadata: what belongs to a real row is the same with and without dummy items."""
        for index, name, axis in self._facts().axes:
            if index in self.segment_rows:
                continue  # checked by their boundaries; handed out as the unpadded grid gives them
            a, b = tensor_of(padded[index]), exact[index]
            real = a if axis is None else a.narrow(axis, 0, b.shape[axis])
            if not torch.equal(real, b):
                raise Misfit("metadata_differs", f"metadata {name} of {rows} real rows depends on the padding")

    def _with_segments(
        self,
        made: Sequence[Tensor | Assembled],
        lists: dict[int, list[int]],
        wide: dict[int, list[int]],
        rows: int,
        bucket: Bucket | None,
        measure: bool,
        shared: bool,
    ) -> LayoutValues:
        bounds, most = {}, 0
        for index, cu in lists.items():
            real = rows // self.body.bound.symbols.unit * self.segment_rows[index]
            most = max(most, bisect_right(wide[index], real) - 1)
            bounds[index] = SegmentBounds.of(cu).joined(SegmentBounds.of(wide[index]))
        if self.choice is None:  # no attention, no segments
            return LayoutValues(made, {}, {}, {}, most)
        kernels, bounds = self._served_by(bucket, bounds, self.choice, measure, shared)
        segments = {index: kernels[index].metadata(cu, bounds[index]) for index, cu in lists.items()}
        for index in segments:
            where = made[index]
            if isinstance(where, Tensor):
                segments[index] = segments[index].to(where.device, non_blocking=True)
        return LayoutValues(made, segments, kernels, bounds, most)

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


def tensor_of(made: Tensor | Assembled) -> Tensor:
    """A result of the prologue as a tensor."""
    return made if isinstance(made, Tensor) else made.tensor()


def _patches(layout: Layout) -> int:
    return sum(map(math.prod, layout))


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
