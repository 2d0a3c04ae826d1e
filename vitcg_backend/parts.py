"""A call in parts: whether its grid may be cut there, the arguments of a part, and the results put together.

Cutting is right where each part is independent of the others: every attention segment and every gather lies inside one
part, and the prologue of the part's own grid is what the prologue of the whole grid has for those rows. Both are looked at
on the values of each layout, never assumed for a family: attention over a whole clip keeps it in one part. That the rows
between two such borders depend on nothing else is what `prove_padding` has shown for padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .bucketing import Layout
from .layouts import LayoutCache, Misfit, grid_tensor
from .packed import copy_all
from .passes import CompiledBody
from .passes.graph import Role, token_axes
from .planning import Part, Plan

__all__ = ["Joined", "Parts", "tokens_of_image"]


_MAX_CHECKED = 1024


class Parts:
    """The cuts of one tower's calls; each plan is checked once.

    Args:
        body: the compiled graph.
        layouts: where metadata is kept.
    """

    def __init__(self, body: CompiledBody, layouts: LayoutCache) -> None:
        self.body, self.layouts = body, layouts
        self._checked: dict[Layout | int, Plan] = {}

    def possible(self) -> bool:
        """Whether calls may be cut at all: items of three sizes and nothing else to them, or images, one a row; and results
        one row after another.
        """
        body, bound = self.body, self.body.bound
        if tokens_of_image(body):
            views = all(_offset_in(body, *pair) is not None for pair in body.program.views.items())
            return body.tail is None and views and all(_is_by_rows(body, value) for value in _slots(body))
        if body.tail is not None or body.hoisted.reads_state or bound.pixels_per_row != 1 or bound.grid is None:
            return False
        roles = {node.meta["role"] for node in bound.placeholders}
        columns = bound.placeholders[bound.grid].meta["val"].shape[-1]
        whole_rows = all(rows == bound.symbols.unit for rows in self.layouts.segment_rows.values())
        if body.program.views:
            return False
        return columns == 3 and Role.ITEMS not in roles and whole_rows and all(_is_by_rows(body, v) for v in _slots(body))

    def clear(self) -> None:
        """Check every plan again."""
        self._checked.clear()

    def cut(self, args: Sequence[Any], part: Part) -> list[Any]:
        """The arguments of a part: its pixel rows (a view where they lie together), its own grid, and their sizes."""
        bound = self.body.bound
        arguments = list(args)
        for position in (bound.pixels, *bound.batch):
            rows = [args[position].narrow(bound.pixel_axis, start, count) for start, count in part.ranges]
            arguments[position] = rows[0] if len(rows) == 1 else torch.cat(rows, bound.pixel_axis)
        if bound.grid is not None:
            grid = args[bound.grid]
            arguments[bound.grid] = grid_tensor(part.layout or (), grid.dtype, grid.device)
        self.layouts.sizes.fill(arguments, part.rows // bound.symbols.unit, len(part.layout or ()))
        return arguments

    def joined(self, args: Sequence[Any], layout: Layout | None, rows: int) -> Joined:
        """Where the results of the parts go."""
        metadata: Sequence[Tensor] = ()
        if any(kind == "metadata" for kind, _ in self.body.program.outputs):
            metadata = self.layouts.get(args, layout, rows, None).on(args[self.body.bound.pixels].device)[0]
        return Joined(self.body, args, rows, metadata)

    def check(self, args: Sequence[Any], layout: Layout | None, rows: int, plan: Plan) -> None:
        """Look whether the parts of a plan are independent of one another, once for a layout: while the device works on them.

        Raises:
            Misfit: they are not; the reason is ``parts_depend``.
            Exception: what the tower's own metadata functions raise for a bad grid.
        """
        key = rows if layout is None else layout
        if self._checked.get(key) is not plan:
            self._check(args, self.layouts.get(args, layout, rows, None).tensors, plan)
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[key] = plan

    def _check(self, args: Sequence[Any], whole: Sequence[Tensor], plan: Plan) -> None:
        borders = {index: whole[index].tolist() for index in self.layouts.segment_rows}
        for part in plan.parts:
            own = self.layouts.get(self.cut(args, part), part.layout, part.rows, None).tensors
            _check_segments(self.layouts, borders, own, part)
            _check_metadata(self.body, self.layouts, whole, own, part)


def tokens_of_image(body: CompiledBody) -> int:
    """Output tokens of a row in a tower that takes one image a row and no grid, 0 for any other tower."""
    bound = body.bound
    pixels = bound.placeholders[bound.pixels].meta["val"]
    if bound.grid is not None or bound.pixel_axis != 0 or pixels.dim() < 3:
        return 0
    return max((_tokens_a_row(value, bound.symbols) for value in body.program.output_values), default=1)


def _tokens_a_row(value: Any, symbols: Any) -> int:
    """Of a result ``[batch, ..., width]`` the sizes between the two."""
    if token_axes(value, symbols) != [0]:
        return 1
    return math.prod(size for size in value.shape[1:-1] if isinstance(size, int))


def _slots(body: CompiledBody) -> list[Any]:
    """The results that the body computes."""
    return [v for (kind, _), v in zip(body.program.outputs, body.program.output_values, strict=True) if kind == "slot"]


def _offset_in(body: CompiledBody, view: int, owner: int) -> int | None:
    """Elements from the begin of a result to that of another which is a view of it; None where that changes with n."""
    offsets = [body.bound.symbols.linear(body.program.output_values[i].storage_offset()) for i in (view, owner)]
    if None in offsets:
        return None
    (factor, rest), (own_factor, own_rest) = offsets  # type: ignore[misc]  # None is no element, says the line above
    return rest - own_rest if factor == own_factor and rest >= own_rest else None


def _check_segments(layouts: LayoutCache, whole: dict[int, list[int]], own: Sequence[Tensor], part: Part) -> None:
    for index in layouts.segment_rows:
        borders, place = own[index].tolist(), 0
        for start, count in part.ranges:
            ends = _within(whole[index], start, count)
            if ends != _within(borders, place, count) or ends[:1] != [0] or ends[-1:] != [count]:
                raise Misfit("parts_depend", f"segments {index} cross row {start} or {start + count}")
            place += count


def _check_metadata(
    body: CompiledBody, layouts: LayoutCache, whole: Sequence[Tensor], own: Sequence[Tensor], part: Part
) -> None:
    """Rows of the whole grid's metadata are those of the part's own; gathers count from the part's first row and stay in it."""
    symbols = body.bound.symbols
    sources = {index: source for index, _, source in body.gathers}
    for index, node in enumerate(body.hoisted.metadata):
        if index in layouts.segment_rows or not body.program.reads(index):
            continue
        axes = token_axes(node.meta["val"], symbols)
        form = symbols.linear(node.meta["val"].shape[axes[0]]) if len(axes) == 1 else None
        expected = whole[index]
        if form is not None and form[1] == 0:
            pieces, place = [], 0
            for start, count in part.ranges:
                first, step = form[0] * start // symbols.unit, form[0] * count // symbols.unit
                piece = expected.narrow(axes[0], first, step)
                if index in sources:
                    piece = piece - sources[index] * (start - place) // symbols.unit
                    low, high = (sources[index] * row // symbols.unit for row in (place, place + count))
                    if not bool(((piece >= low) & (piece < high)).all()):
                        raise Misfit("parts_depend", f"metadata {node.name} moves rows across row {start} or {start + count}")
                pieces.append(piece)
                place += count
            expected = torch.cat(pieces, axes[0])
        if not torch.equal(expected, own[index]):
            raise Misfit("parts_depend", f"metadata {node.name} of a part depends on the rest of the call")


def _within(cu_seqlens: Sequence[int], start: int, count: int) -> list[int]:
    """Borders from row `start` to row ``start + count``, counted from there."""
    return [row - start for row in cu_seqlens if start <= row <= start + count]


def _is_by_rows(body: CompiledBody, value: Any) -> bool:
    """Whether a result has one token axis, with a whole number of rows for each token."""
    symbols = body.bound.symbols
    axes = token_axes(value, symbols)
    form = symbols.linear(value.shape[axes[0]]) if len(axes) == 1 else None
    return form is not None and form[0] > 0 and form[1] == 0


class Joined:
    """The results of a call, filled part by part.

    Args:
        body: the compiled graph.
        args: the arguments of the call.
        rows: its rows.
        metadata: the prologue's values for the whole grid: results that are metadata are copies of these.
    """

    def __init__(self, body: CompiledBody, args: Sequence[Any], rows: int, metadata: Sequence[Tensor]) -> None:
        self.body = body
        self.tokens = rows // body.bound.symbols.unit
        self._views = body.program.views
        self.results: list[Any] = []
        for kind, what in body.program.outputs:
            known = {"argument": lambda w: args[w], "metadata": lambda w: metadata[w].clone(), "constant": lambda w: w}
            self.results.append(None if kind == "slot" else known[kind](what))

    def add(self, part: Part, results: Sequence[Any]) -> None:
        """Copy the rows of a part to their place."""
        symbols = self.body.bound.symbols
        targets, sources = [], []
        for index, (kind, _) in enumerate(self.body.program.outputs):
            if kind != "slot" or index in self._views:
                continue
            result, fake = results[index], self.body.program.output_values[index]
            axes = token_axes(fake, symbols)
            if self.results[index] is None:
                self.results[index] = self._empty(fake, result)
                for view in (i for i, owner in self._views.items() if owner == index):
                    shape, stride = self._laid_out(self.body.program.output_values[view])
                    offset = _offset_in(self.body, view, index)
                    self.results[view] = self.results[index].as_strided(shape, stride, offset)
            each = symbols.linear(fake.shape[axes[0]])[0]  # type: ignore[index]  # `Parts` has seen that it is linear
            place = 0
            for start, count in part.ranges:
                first, tokens = start // symbols.unit * each, count // symbols.unit * each
                targets.append(self.results[index].narrow(axes[0], first, tokens))
                sources.append(result.narrow(axes[0], place, tokens))
                place += tokens
        copy_all(targets, sources)

    def _empty(self, fake: Any, like: Tensor) -> Tensor:
        """An uninitialised result of the whole call, with eager's strides."""
        return torch.empty_strided(*self._laid_out(fake), dtype=like.dtype, device=like.device)

    def _laid_out(self, fake: Any) -> tuple[list[int], list[int]]:
        """Sizes and strides of a result of the whole call."""
        return [self._number(x) for x in fake.shape], [self._number(x) for x in fake.stride()]

    def _number(self, size: Any) -> int:
        form = self.body.bound.symbols.linear(size)
        assert form is not None  # `Parts` has seen that results are linear
        return form[0] * self.tokens + form[1]
