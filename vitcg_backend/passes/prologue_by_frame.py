"""The host's prologue, put together from the frames of a layout.

Why: a layout that nobody has seen before mostly consists of frames that somebody has. What a metadata function gives for one
frame (or one item) is kept, and a layout costs a concatenation for each result in place of a loop over its items.

Preconditions: `prologue_on_host`. A function is taken apart only where every result of it is, on a few small grids, one of

* *rows*: the rows of the parts, one after another (positions, interpolation weights);
* *shifted*: the same, counted from the part's first row (a window order);
* *borders*: running ends of segments, each part's counted from the end of the part before it (cu_seqlens);
* *longest*: the largest of the parts (a whole number, see `ops`).

That is no proof for other grids, so `LayoutCache.check` compares each layout with the functions themselves.

Before::

    %meta = vitcg.metadata("…get_vision_position_ids", %grid, [], "{…}", %s77)

After::

    %meta = get_vision_position_ids_by_frame(%grid)
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .. import ops
from .bind_tokens import METADATA_TARGETS

__all__ = ["prologue_by_frame"]

MAX_BYTES = 32 << 20
"""Cap of what is kept for the parts of one function: a frame of 4096 patches takes 0.2 MiB at most."""

Part = tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    """How a result of parts is put together, and what a part must be for that."""

    join: Callable[[Sequence[Tensor]], Tensor]
    suits: Callable[[Tensor], bool]


def prologue_by_frame(prologue: fx.GraphModule) -> fx.GraphModule:
    """The same prologue with every metadata function taken apart where it can be, and called without the operator else."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in prologue.graph.nodes:
        if node.target in METADATA_TARGETS:
            key, grid, tensors, constants = node.args[:4]
            function = _function(key, constants)
            copies[node] = graph.call_function(function, (copies[grid], [copies[t] for t in tensors]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(prologue, graph, class_name="PrologueByFrame")


def _function(key: str, constants: str) -> Callable[[Tensor, Sequence[Tensor]], list[Tensor]]:
    parts = _Parts(key, constants)

    def by_frame(grid: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        if tensors:  # a value for each item, or a weight
            return ops.run(key, grid, tensors, constants)
        return parts(grid)

    by_frame.__name__ = key.rpartition(".")[2] + "_by_frame"
    return by_frame


class _Parts:
    """One function with one set of constants, and its results for the parts that have been seen."""

    def __init__(self, key: str, constants: str) -> None:
        self._key, self._constants = key, constants
        self._rules: dict[int, tuple[bool, list[_Kind]] | None] = {}  # by the number of columns
        self._known: OrderedDict[Part, list[Tensor]] = OrderedDict()
        self._bytes = 0

    def __call__(self, grid: Tensor) -> list[Tensor]:
        """What the function gives for this grid."""
        columns = grid.shape[1]
        if columns not in self._rules:
            self._rules[columns] = self._rule(columns)
        rule = self._rules[columns]
        if rule is not None:
            each_frame, kinds = rule
            parts = [self._part(part, kinds) for part in _parts(grid.tolist(), each_frame)]
            if all(parts):
                return [kind.join([part[i] for part in parts]) for i, kind in enumerate(kinds)]
        return ops.run(self._key, grid, [], self._constants)

    def _part(self, part: Part, kinds: Sequence[_Kind]) -> list[Tensor]:
        """Results of one part; none where they do not suit the rule."""
        found = self._known.get(part)
        if found is not None:
            self._known.move_to_end(part)
            return found
        found = self._alone(part)
        if len(found) != len(kinds) or not all(kind.suits(t) for kind, t in zip(kinds, found, strict=True)):
            return []
        self._known[part] = found
        self._bytes += _num_bytes(found)
        while self._bytes > MAX_BYTES and len(self._known) > 1:
            self._bytes -= _num_bytes(self._known.popitem(last=False)[1])
        return found

    def _alone(self, part: Part) -> list[Tensor]:
        return ops.run(self._key, torch.tensor([part]), [], self._constants)

    def _rule(self, columns: int) -> tuple[bool, list[_Kind]] | None:
        """Whether parts are frames rather than items, and how each result is put together; None where it cannot be."""
        grids, wholes = [], []
        for rows in ops.PROBES:
            grid = torch.tensor(rows)[:, 3 - columns :].clone()
            try:
                wholes.append(ops.run(self._key, grid, [], self._constants))
            except Exception:  # e.g. a function that takes one frame an item; the other probes decide
                continue
            grids.append(grid)
        if len(grids) < 2:
            return None
        for each_frame in (True, False) if columns == 3 else (False,):
            try:
                split = [[self._alone(part) for part in _parts(grid.tolist(), each_frame)] for grid in grids]
            except Exception:  # it does not take every part by itself
                continue
            results = range(len(wholes[0]))
            kinds = [next((kind for kind in _KINDS if _fits(kind, split, wholes, i)), None) for i in results]
            if None not in kinds:
                return each_frame, kinds  # type: ignore[return-value]  # none of them is None
        return None


def _parts(items: Sequence[Sequence[int]], each_frame: bool) -> list[Part]:
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
    lengths = [len(part) for part in parts]
    starts = torch.tensor(list(itertools.accumulate(lengths[:-1], initial=0)), dtype=parts[0].dtype)
    return torch.cat(list(parts)) + torch.repeat_interleave(starts, torch.tensor(lengths))


def _stays_within(part: Tensor) -> bool:
    """Whether a part points at its own rows only: a shifted index could point anywhere else."""
    counts = part.dim() == 1 and len(part) > 0 and not part.dtype.is_floating_point
    return counts and int(part.min()) >= 0 and int(part.max()) < len(part)


def _borders(parts: Sequence[Tensor]) -> Tensor:
    ends, end = [0], 0
    for part in parts:
        inner: list[int] = part.tolist()[1:]
        ends += [end + border for border in inner]
        end = ends[-1]
    return torch.tensor(ends, dtype=parts[0].dtype)


def _begins_with_0(part: Tensor) -> bool:
    return part.dim() == 1 and len(part) > 0 and not part.dtype.is_floating_point and int(part[0]) == 0


def _longest(parts: Sequence[Tensor]) -> Tensor:
    return max(parts, key=len)


_KINDS = (
    _Kind(_rows, lambda part: part.dim() > 0),
    _Kind(_shifted, _stays_within),
    _Kind(_borders, _begins_with_0),
    _Kind(_longest, lambda part: part.dim() == 2 and part.shape[1] == 0),
)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
