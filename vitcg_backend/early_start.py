"""Work of other processes and of C++, begun while Python has something else to do: the first call waits for less of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import _torch
from .attention import SegmentBounds, tiered
from .attention.measured import MeasuredChoice
from .layouts import LayoutCache
from .passes import CompiledBody

__all__ = ["start_attention"]


def start_attention(choice: MeasuredChoice, body: CompiledBody, args: Sequence[Any], budgets: Sequence[int]) -> None:
    """Let the candidates be compiled for the segments of the first call (`MeasuredChoice.start`) before the pieces are, and the
    first of them for those of one picture of each size.

    Args:
        choice: among the attention kernels.
        body: the graph, taken apart; its pieces are not yet compiled.
        args: arguments of the first call.
        budgets: output tokens (or images, one a row) of the captures to come.
    """
    try:
        first, later = _bounds(choice, body, args, budgets)
    except Exception as error:  # a call that eager rejects, say
        _torch.log.info("attention kernels are not compiled early: %s: %s", type(error).__name__, error)
        return
    choice.start(first, later)


def _bounds(
    choice: MeasuredChoice, body: CompiledBody, args: Sequence[Any], budgets: Sequence[int]
) -> tuple[dict[int, SegmentBounds], dict[int, list[SegmentBounds]]]:
    """By index of a cu_seqlens: exact bounds of the first call, and those of captures for one picture of each size."""
    bound, layouts = body.bound, LayoutCache(body, None)
    layout = None if bound.grid is None else tuple(map(tuple, args[bound.grid].tolist()))
    rows = args[bound.pixels].shape[bound.pixel_axis] // bound.pixels_per_row
    first = {i: SegmentBounds.of(cu) for i, cu in layouts.get(args, layout, rows, None).boundaries.items()}
    later = {}
    for index, exact in first.items():
        # One segment for each item or frame: a larger picture has a longer one. Windows are as long as these.
        whole = layout is not None and exact.segments in (len(layout), sum(math.prod(frames) for *frames, _, _ in layout))
        sizes = [layouts.segment_rows[index] * budget for budget in budgets]
        pictures = [SegmentBounds(size, 1, size if whole else min(exact.longest, size)) for size in sizes]
        later[index] = [tiered(picture, choice.default, shared=True) for picture in pictures]
    return first, later
