"""frames: a prologue put together from frames, where that gives what it gives itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitcg_backend import frames
from vitcg_backend.frames import FrameByFrame, _rule

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


def prologue(function: Callable[..., Any]) -> Callable[[Any], list[Tensor]]:
    """A prologue whose results are those of a function; a whole number is the length of an empty tensor."""

    def run(layout: Any) -> list[Tensor]:
        results = function(torch.tensor(layout))
        results = results if isinstance(results, tuple) else (results,)
        return [r if isinstance(r, Tensor) else torch.empty(r, 0, dtype=torch.uint8) for r in results]

    return run


def kinds(function: Callable[..., Any], columns: int = 3) -> tuple[bool, list[str]] | None:
    """The rule by which a prologue is taken apart."""
    rule = _rule(columns, prologue(function))
    return None if rule is None else (rule[0], [kind.join.__name__ for kind in rule[1]])


def layout_of(rows: list[list[int]]) -> Any:
    return tuple(map(tuple, rows))


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
def test_gives_what_the_prologue_gives(function: Callable[..., Any]) -> None:
    """Over and over, on grids of new and of known frames: values, shapes, dtypes and bytes."""
    by_frame, run = FrameByFrame(), prologue(function)
    for rows in (*GRIDS, *reversed(GRIDS)):
        found = by_frame(layout_of(rows), run)
        if found is None:
            assert function in (share_of_all, item_of_row, into_the_next)
            continue
        for ours, theirs in zip(found, run(rows), strict=True):
            assert torch.equal(ours.tensor(), theirs)
            assert (ours.dtype, tuple(ours.shape), ours.tolist()) == (theirs.dtype, tuple(theirs.shape), theirs.tolist())
            assert b"".join(piece.numpy().tobytes() for piece in ours.pieces()) == theirs.numpy().tobytes()


def test_known_frames_are_not_asked_for_again() -> None:
    """A layout of known frames costs no run of the prologue."""
    by_frame, asked = FrameByFrame(), []

    def run(layout: Any) -> list[Tensor]:
        asked.append(layout)
        return prologue(turned)(layout)

    by_frame(((2, 2, 4), (1, 2, 2)), run)
    asked.clear()
    by_frame(((1, 2, 2), (3, 2, 4), (1, 2, 2)), run)
    assert asked == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames not used for longest go."""
    monkeypatch.setattr(frames, "MAX_BYTES", 15 * 8)
    by_frame = FrameByFrame()
    for width in (2, 4, 6, 8):
        by_frame(((1, 1, width),), prologue(turned))
    assert list(by_frame._known) == [(1, 1, 6), (1, 1, 8)]
    assert by_frame._bytes == 14 * 8


def test_a_part_that_does_not_suit_is_not_joined() -> None:
    """A prologue that points elsewhere only in some frames is run as it is for a grid that has one."""

    def odd(grid: Tensor) -> Tensor:
        rows = turned(grid)
        return rows + 1 if [1, 2, 6] in grid.tolist() else rows

    by_frame = FrameByFrame()
    assert by_frame(((1, 2, 4),), prologue(odd)) is not None
    assert by_frame(((1, 2, 4), (1, 2, 6)), prologue(odd)) is None
