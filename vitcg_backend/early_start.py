"""Work of other processes and of C++, begun while Python has something else to do: the first call waits for less of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _torch
from .attention import SegmentBounds
from .attention.measured import MeasuredChoice
from .layouts import LayoutCache
from .passes import CompiledBody

__all__ = ["start_attention"]


def start_attention(choice: MeasuredChoice, body: CompiledBody, args: Sequence[Any]) -> None:
    """Let the candidates be compiled for the segments of the first call (`MeasuredChoice.start`) before the pieces are.

    Args:
        choice: among the attention kernels.
        body: the graph, taken apart; its pieces are not yet compiled.
        args: arguments of the first call.
    """
    bound = body.bound
    try:
        layout = None if bound.grid is None else tuple(map(tuple, args[bound.grid].tolist()))
        rows = args[bound.pixels].shape[bound.pixel_axis] // bound.pixels_per_row
        boundaries = LayoutCache(body, None).get(args, layout, rows, None).boundaries
    except Exception as error:  # a call that eager rejects, say
        _torch.log.info("attention kernels are not compiled early: %s: %s", type(error).__name__, error)
        return
    choice.start({index: SegmentBounds.of(cu) for index, cu in boundaries.items()})
