"""prologue_by_frame: functions of the grid put together from frames, where that gives what the functions give."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import hoisted, metadata
from torch import Tensor

from vitcg_backend import ops
from vitcg_backend.passes.graph import Role
from vitcg_backend.passes.prologue_by_frame import _Parts, prologue_by_frame

GRIDS = (
    [[1, 2, 4]],
    [[3, 2, 4]],
    [[1, 2, 4], [2, 6, 2], [1, 2, 4]],
    [[2, 4, 4], [1, 2, 2], [5, 2, 4]],
)


def sizes(grid: Tensor) -> list[int]:
    return [h * w for t, h, w in grid.tolist() for _ in range(t)]


def borders(grid: Tensor) -> Tensor:
    """Running ends of the frames."""
    return torch.tensor([0, *sizes(grid)], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def turned(grid: Tensor) -> Tensor:
    """The rows of each frame in reverse."""
    ends = borders(grid).tolist()
    return torch.cat([torch.arange(b - 1, a - 1, -1) for a, b in itertools.pairwise(ends)])


def within(grid: Tensor) -> tuple[Tensor, int]:
    """Place of each row in its frame, as a share of it; and the longest frame."""
    return torch.cat([torch.arange(n) / n for n in sizes(grid)]), max(sizes(grid))


def frame_of_item(grid: Tensor) -> Tensor:
    """The number of each row's frame in its item."""
    return torch.cat([torch.arange(t).repeat_interleave(h * w) for t, h, w in grid.tolist()])


def share_of_all(grid: Tensor) -> Tensor:
    """Place of each row in the whole call, as a share of it."""
    return torch.arange(sum(sizes(grid))) / sum(sizes(grid))


def item_of_row(grid: Tensor) -> Tensor:
    """The number of each row's item."""
    return torch.arange(len(grid)).repeat_interleave(grid.prod(1))


def into_the_next(grid: Tensor) -> Tensor:
    """Each row's number plus one, so that a frame points at the frame behind it."""
    return torch.arange(sum(sizes(grid))) + 1


FUNCTIONS = (borders, turned, within, frame_of_item, share_of_all, item_of_row, into_the_next)
for _function in FUNCTIONS:
    ops.register_function(f"tests.{_function.__name__}", _function)


def kinds(function: Callable[..., Any], columns: int = 3) -> tuple[bool, list[str]] | None:
    """The rule by which a function is taken apart."""
    rule = _Parts(f"tests.{function.__name__}", "{}")._rule(columns)
    return None if rule is None else (rule[0], [kind.join.__name__ for kind in rule[1]])


def test_rules_are_found_on_small_grids() -> None:
    """Frames before items, and nothing for what depends on the rest of the call or points beyond its part."""
    assert kinds(borders) == (True, ["_borders"])
    assert kinds(turned) == (True, ["_shifted"])
    assert kinds(within) == (True, ["_rows", "_longest"])
    assert kinds(frame_of_item) == (False, ["_rows"])
    assert kinds(share_of_all) is None
    assert kinds(item_of_row) is None
    assert kinds(into_the_next) is None
    assert kinds(into_the_next, columns=2) is None  # and a function that rejects every probe


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gives_what_the_function_gives(function: Callable[..., Any]) -> None:
    """Over and over, on grids of new and of known frames; what is given out is not what is kept."""
    key = f"tests.{function.__name__}"
    parts = _Parts(key, "{}")
    for rows in (*GRIDS, *reversed(GRIDS)):
        grid = torch.tensor(rows)
        found = parts(grid)
        for ours, theirs in zip(found, ops.run(key, grid, [], "{}"), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames not used for longest go."""
    monkeypatch.setattr(sys.modules[_Parts.__module__], "MAX_BYTES", 15 * 8)
    parts = _Parts("tests.turned", "{}")
    for width in (2, 4, 6, 8):
        parts(torch.tensor([[1, 1, width]]))
    assert list(parts._known) == [(1, 1, 6), (1, 1, 8)]
    assert parts._bytes == 14 * 8


def test_a_part_that_does_not_suit_is_not_joined() -> None:
    """A function that points elsewhere only in some frames is called as it is for a grid that has one."""

    def odd(grid: Tensor) -> Tensor:
        rows = turned(grid)
        return rows + 1 if [1, 2, 6] in grid.tolist() else rows

    ops.register_function("tests.odd", odd)
    parts = _Parts("tests.odd", "{}")
    for rows in ([[1, 2, 4]], [[1, 2, 4], [1, 2, 6]]):
        assert torch.equal(parts(torch.tensor(rows))[0], odd(torch.tensor(rows)))


def test_a_prologue_without_the_operator() -> None:
    """Functions of the grid and of other tensors: the same numbers, and no operator left to dispatch."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        return x * metadata("frame_of_item", g)[:, None].cos() + metadata("share_of_all", g)[:, None]

    result = hoisted(function)
    quick = prologue_by_frame(result.prologue)
    assert not [n for n in quick.graph.nodes if n.target in (ops.METADATA, torch.ops.vitcg.metadata)]
    for rows in GRIDS:
        grid = torch.tensor(rows)
        roles = [result.bound.placeholders[p].meta["role"] for p in result.prologue_inputs]
        inputs = [grid if role == Role.GRID else int(grid.prod(1).sum()) for role in roles]
        for ours, theirs in zip(quick(*inputs), result.prologue(*inputs), strict=True):
            assert torch.equal(ours, theirs)
