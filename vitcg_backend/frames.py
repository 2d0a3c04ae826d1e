"""The host's prologue, put together from the frames of a layout.

A layout that nobody has seen before mostly consists of frames that somebody has. What the prologue gives for one frame (or one
item) is kept, and a layout costs a few copies in place of a loop over its items. That is done where every result is, on a few
small grids, one of

* *rows*: the rows of the parts, one after another (positions, interpolation weights);
* *shifted*: the same, counted from the part's first row (a window order);
* *borders*: running ends of segments, each part's counted from the end of the part before it (cu_seqlens);
* *longest*: the largest of the parts (a whole number, see `ops`).

It is no proof for other grids, so `LayoutCache.check` compares each layout with the prologue itself.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops
from .bucketing import Layout

__all__ = ["Assembled", "FrameByFrame"]

MAX_BYTES = 32 << 20
"""Cap of what is kept for the parts of one prologue: a frame of 4096 patches takes 0.2 MiB."""

Part = tuple[int, ...]
Run = Callable[[Any], Sequence[Tensor]]  # the prologue of a grid


@dataclass(frozen=True)
class _Kind:
    """How a result of parts is put together, and what a part must be for that."""

    join: Callable[[Sequence[Tensor]], Tensor]
    suits: Callable[[Tensor], bool]


@dataclass(frozen=True)
class PartResult:
    """One result of one part, with what is asked of it again and again.

    Attributes:
        tensor: it, dense, on the host.
        rows: its length.
        ends: its numbers but the first, where they are borders.
    """

    tensor: Tensor
    rows: int
    ends: list[int]


@dataclass(frozen=True)
class Assembled:
    """A result of the prologue as the results of its parts.

    Attributes:
        kind: how they are put together.
        parts: they.
    """

    kind: _Kind
    parts: Sequence[PartResult]

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole, and of each part."""
        return self.parts[0].tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        rows = [part.rows for part in self.parts]
        if self.kind is _BORDERS:
            return (sum(rows) - len(rows) + 1,)
        return max(rows) if self.kind is _LONGEST else sum(rows), *self.parts[0].tensor.shape[1:]

    def tensor(self) -> Tensor:
        """The whole."""
        return self.kind.join(self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [part.tensor for part in self.parts]

    def pieces(self) -> list[Tensor]:
        """Dense tensors whose bytes, one after another, are the whole's."""
        parts = self._tensors()
        return parts if self.kind is _ROWS else [self.kind.join(parts)]

    def tolist(self) -> list[int]:
        """The whole's numbers."""
        if self.kind is not _BORDERS:
            return self.tensor().tolist()  # type: ignore[no-any-return]
        return _running([part.ends for part in self.parts])


class FrameByFrame:
    """Results of one prologue for the parts that have been seen."""

    def __init__(self) -> None:
        self._rules: dict[int, tuple[bool, list[_Kind]] | None] = {}  # by the number of columns
        self._known: OrderedDict[Part, list[PartResult]] = OrderedDict()
        self._bytes = 0

    def __call__(self, layout: Layout, run: Run) -> list[Assembled] | None:
        """What the prologue gives for a layout; None where it cannot be put together.

        Args:
            layout: the grid.
            run: the prologue, on the host.
        """
        columns = len(layout[0])
        if columns not in self._rules:
            self._rules[columns] = _rule(columns, run)
        rule = self._rules[columns]
        if rule is None:
            return None
        each_frame, kinds = rule
        parts = [self._part(part, kinds, run) for part in _parts(layout, each_frame)]
        if not all(parts):
            return None
        return [Assembled(kind, results) for kind, results in zip(kinds, zip(*parts, strict=True), strict=True)]

    def _part(self, part: Part, kinds: Sequence[_Kind], run: Run) -> list[PartResult]:
        """Results of one part; none where they do not suit the rule."""
        found = self._known.get(part)
        if found is not None:
            self._known.move_to_end(part)
            return found
        results = run((part,))
        if len(results) != len(kinds) or not all(kind.suits(t) for kind, t in zip(kinds, results, strict=True)):
            return []
        self._known[part] = [
            PartResult(t, len(t), t.tolist()[1:] if kind is _BORDERS else []) for kind, t in zip(kinds, results, strict=True)
        ]
        self._bytes += _num_bytes(results)
        while self._bytes > MAX_BYTES and len(self._known) > 1:
            self._bytes -= _num_bytes([result.tensor for result in self._known.popitem(last=False)[1]])
        return self._known[part]


def _rule(columns: int, run: Run) -> tuple[bool, list[_Kind]] | None:
    """Whether parts are frames rather than items, and how each result is put together; None where it cannot be."""
    grids: list[Any] = []
    wholes = []
    for probe in ops.PROBES:
        grid = tuple(item[3 - columns :] for item in probe)
        try:
            wholes.append(run(grid))
        except Exception:  # e.g. a function that takes one frame an item; the other probes decide
            continue
        grids.append(grid)
    if len(grids) < 2:
        return None
    for each_frame in (True, False) if columns == 3 else (False,):
        try:
            split = [[run((part,)) for part in _parts(grid, each_frame)] for grid in grids]
        except Exception:  # it does not take every part by itself
            continue
        results = range(len(wholes[0]))
        kinds = [next((kind for kind in _KINDS if _fits(kind, split, wholes, i)), None) for i in results]
        if None not in kinds:
            return each_frame, kinds  # type: ignore[return-value]  # none of them is None
    return None


def _parts(items: Iterable[Sequence[int]], each_frame: bool) -> list[Part]:
    if not each_frame:
        return [tuple(item) for item in items]
    return [(1, *size) for frames, *size in items for _ in range(frames)]


def _fits(kind: _Kind, split: Sequence[Sequence[Sequence[Tensor]]], wholes: Sequence[Sequence[Tensor]], index: int) -> bool:
    """Whether a result of every probe is its parts' joined like this."""
    for parts, whole in zip(split, wholes, strict=True):
        own = [part[index] for part in parts]
        if not all(map(kind.suits, own)) or len({(t.dtype, t.shape[1:]) for t in (*own, whole[index])}) > 1:
            return False
        if not torch.equal(kind.join(own), whole[index]):
            return False
    return True


def _rows(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _shifted(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    starts = itertools.accumulate(map(len, parts), initial=0)
    return torch.cat([part + start for part, start in zip(parts, starts, strict=False)])


def _stays_within(part: Tensor) -> bool:
    """Whether a part points at its own rows only: a shifted index could point anywhere else."""
    counts = part.dim() == 1 and len(part) > 0 and not part.dtype.is_floating_point
    return counts and int(part.min()) >= 0 and int(part.max()) < len(part)


def _running(parts: Sequence[Sequence[int]]) -> list[int]:
    """Ends of segments, those of each part counted from the last of the part before it; 0 in front."""
    ends, end = [0], 0
    for inner in parts:
        ends += [end + border for border in inner]
        end = ends[-1]
    return ends


def _borders(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor(_running([part.tolist()[1:] for part in parts]), dtype=parts[0].dtype)


def _begins_with_0(part: Tensor) -> bool:
    return part.dim() == 1 and len(part) > 0 and not part.dtype.is_floating_point and int(part[0]) == 0


def _longest(parts: Sequence[Tensor]) -> Tensor:
    return max(parts, key=len)


_ROWS = _Kind(_rows, lambda part: part.dim() > 0)
_BORDERS = _Kind(_borders, _begins_with_0)
_LONGEST = _Kind(_longest, lambda part: part.dim() == 2 and part.shape[1] == 0)
_KINDS = (_ROWS, _Kind(_shifted, _stays_within), _BORDERS, _LONGEST)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
