"""The tile table: which rows each program of the Triton kernel works on, laid out on the host before a replay.

A launch grid of ``longest x segments`` tiles is ruinous when a bucket has room for a thousand segments, most of them
empty. Here the host writes one table row for each tile that exists, and the kernel walks the table:

    table[start]            used tiles, 0, 0, 0
    table[start + 1 + i]    first row of the segment, its rows, first row of tile i, end of the segment

A tile whose segment has 0 rows lies in the padded tail: the kernel writes zeros to its rows. Unused table rows are 0.
A tile is 64, 128 or 192 rows high; which is better depends on the head size, which the table does not know, so it holds
one such section for each height that a kernel may choose under these bounds.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import SegmentBounds

__all__ = ["capacity", "heights", "section_start", "tile_table"]

_MANY = 32  # tiles of one segment, from which on whole columns are faster than rows


def heights(bounds: SegmentBounds) -> tuple[int, ...]:
    """Tile heights, in rows, that a table for `bounds` holds a section for."""
    if bounds.longest <= 64:
        return (64,)
    return (64, 128) if bounds.longest <= 256 else (64, 128, 192)


def capacity(bounds: SegmentBounds, height: int) -> int:
    """The most tiles of `height` rows that segments within `bounds` and one padded tail can need.

    n segments that are not empty have ``sum(ceil(rows_i / height)) <= n + (rows - n) // height`` tiles, growing in n.
    """
    pieces = min(bounds.segments + 1, bounds.rows)
    return pieces + (bounds.rows - pieces) // height


def section_start(bounds: SegmentBounds, height: int) -> int:
    """Index of the table row that holds the number of used tiles of `height` rows."""
    return sum(1 + capacity(bounds, lower) for lower in heights(bounds) if lower < height)


def tile_table(cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
    """The table of one call.

    Args:
        cu_seqlens: checked prefix sums, ``[segments + 1]``; rows after the last one are a padded tail.
        bounds: the bucket's bounds.

    Returns:
        int32 ``[sum(1 + capacity), 4]`` on the CPU, the tiles of the longest segments first: they take longest, and a
        long tile that starts last keeps one multiprocessor busy alone.
    """
    pieces = [(start, end - start, end) for start, end in itertools.pairwise(cu_seqlens) if start < end]
    pieces.sort(key=lambda piece: -piece[1])
    if cu_seqlens[-1] < bounds.rows:
        pieces.append((cu_seqlens[-1], 0, bounds.rows))
    table = array("i")
    for height in heights(bounds):
        tiles = _section(pieces, height)
        table.extend((len(tiles) // 4, 0, 0, 0))
        table.extend(tiles)
        table.frombytes(bytes(4 * (4 * capacity(bounds, height) - len(tiles))))
    return torch.frombuffer(table, dtype=torch.int32).view(-1, 4)


def _section(pieces: Sequence[tuple[int, int, int]], height: int) -> array[int]:
    """Four ints for each tile of `pieces`, which are (first row, rows attended to, end)."""
    tiles = array("i")
    at_once = 0
    for start, keys, end in pieces:  # the longest come first: the columns of each of these at once
        if end - start <= _MANY * height:
            break
        firsts = range(start, end, height)
        rows = array("i", (start, keys, 0, end)) * len(firsts)
        rows[2::4] = array("i", firsts)
        tiles.extend(rows)
        at_once += 1
    rest = pieces[at_once:]
    tiles.extend([x for start, keys, end in rest for first in range(start, end, height) for x in (start, keys, first, end)])
    return tiles
