"""Few bounds for many layouts: each distinct one is a capture."""

from __future__ import annotations

from ..bucketing import capacity_tier
from .base import SegmentBounds, VarlenKernel

__all__ = ["tiered"]

_LONGEST_TIERS = (64, 256, 1024, 8192)


def tiered(exact: SegmentBounds, kernel: VarlenKernel, *, shared: bool = False) -> SegmentBounds:
    """The bounds that a layout within `exact` is captured with: close ones where a kernel's cost grows with them.

    With `shared` other layouts are to use the capture, which cut the same rows into more segments, such as cut-off windows.
    """
    if kernel.needs_longest:
        longest = min(capacity_tier(exact.longest), exact.rows)
        return SegmentBounds(exact.rows, min(capacity_tier(exact.segments), exact.rows), longest)
    longest = next((t for t in _LONGEST_TIERS if t >= exact.longest), exact.rows)
    least, rows_each = (2 * exact.segments, 16) if shared else (exact.segments, 64)
    segments = max(capacity_tier(least), capacity_tier(exact.rows // rows_each))
    return SegmentBounds(exact.rows, min(segments, exact.rows), min(longest, exact.rows))
