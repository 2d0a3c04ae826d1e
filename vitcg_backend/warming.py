"""Captures before the first call: `warmup(tower, ...)`, the largest bucket first."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .backend import live_towers, stats
from .bucketing import Layout, num_patches
from .errors import OptionError
from .runtime import CompiledTower

__all__ = ["Warmed", "picture", "warmup"]

Grid = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Warmed:
    """What a warm-up did.

    Attributes:
        captured: budgets (output tokens) that have a capture now, in the order in which they got it.
        skipped: budget or tokens of a call -> why there is no capture for it.
        seconds: of the whole warm-up, compilation included.
        bytes: static buffers and graph pools of the tower.
    """

    captured: tuple[int, ...]
    skipped: dict[int, str]
    seconds: float
    bytes: int

    def __str__(self) -> str:
        text = f"captured {len(self.captured)} buckets in {self.seconds:.1f} s, {self.bytes / 2**20:.0f} MiB"
        return text + "".join(f"\n  {tokens} tokens: {why}" for tokens, why in self.skipped.items())


def warmup(
    tower: nn.Module,
    *,
    grids: Iterable[Grid] | None = None,
    sizes: Iterable[int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Warmed:
    """Capture buckets of a compiled tower, the largest first, so that later ones fit into its memory.

    An uncompiled graph is compiled by the smallest of the calls first.

    Each call that is expected runs once, on zeros: what is captured is what such a call uses. Buckets that no call of
    these can reach are left alone.

    Args:
        tower: the result of ``torch.compile(tower, backend="vitcg")``, or a tower after ``tower.compile(backend="vitcg")``;
            it takes ``(pixels, grid_thw=...)``.
        grids: the calls to expect, each a list of ``(frames, height, width)`` in patches.
        sizes: output tokens instead, each as one picture; ``None`` for both = every budget of the ladder.
        progress: called with one line of text after each step; by default a bar on stderr if that is a terminal.

    Raises:
        OptionError: `grids` and `sizes` are both given, a value is not allowed, or the tower is not compiled by this backend.
    """
    if grids is not None and sizes is not None:
        raise OptionError("warmup: give grids or sizes, not both.")
    eager = getattr(tower, "_orig_mod", tower)
    merge = _merge(eager)
    started = time.perf_counter()
    layouts = [_layout(grid, merge) for grid in grids] if grids is not None else None
    if sizes is not None:
        layouts = [picture(_size(size), merge) for size in sizes]
    # Compiles. A call of one token would be a graph of its own: Dynamo takes sizes of 1 for constants.
    _call(tower, eager, min(layouts, key=num_patches) if layouts else picture(16, merge))
    parts = live_towers(eager)
    if not parts:
        raise OptionError("warmup: this tower is not compiled with backend='vitcg', or the backend refused its graph.")
    if layouts is None:
        layouts = [picture(budget, merge) for budget in parts[0].planner.ladder.budgets]
    layouts.sort(key=num_patches, reverse=True)
    say = progress or _bar
    skipped: dict[int, str] = {}
    captured = list(_captured(parts))
    for number, layout in enumerate(layouts, 1):
        tokens = num_patches(layout) // merge**2
        if not all(part.has_room(tokens) for part in parts):
            skipped[tokens] = "memory_limit_mib is reached"
            continue
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.warming())
            _call(tower, eager, layout)
        parts = live_towers(eager)
        captured += sorted(_captured(parts) - set(captured), reverse=True)
        last = stats(eager).last
        if last is not None and last.reason is not None:
            skipped[tokens] = last.reason
        seconds, held = time.perf_counter() - started, sum(part.captured_bytes for part in parts)
        say(f"warm-up {number}/{len(layouts)}: {tokens} tokens, {len(captured)} captures, {seconds:.1f} s, {held >> 20} MiB")
    held = sum(part.captured_bytes for part in parts)
    return Warmed(tuple(captured), skipped, time.perf_counter() - started, held)


def _captured(parts: Iterable[CompiledTower]) -> set[int]:
    return {budget for part in parts for budget in part.budgets_captured}


def picture(tokens: int, merge: int) -> Layout:
    """One picture of exactly `tokens` output tokens, as near to a square as that allows; two where it would be a strip.

    Segments as long as those of real pictures decide which of a bucket's capacities is captured.
    """
    for first in range(tokens, tokens // 2, -1):
        sides = [(side, size // side) for size in (first, tokens - first) if size for side in [_side(size)]]
        if all(wide <= 4 * high for high, wide in sides[:1]):
            return tuple((1, high * merge, wide * merge) for high, wide in sides)
    return ((1, merge, tokens * merge),)


def _side(size: int) -> int:
    """The largest divisor that is at most the square root."""
    return next(side for side in range(int(size**0.5), 0, -1) if size % side == 0)


def _merge(tower: nn.Module) -> int:
    config: Any = getattr(tower, "config", None)
    merge = getattr(config, "spatial_merge_size", None)
    if not isinstance(merge, int):
        raise OptionError(
            f"warmup: {type(tower).__name__} has no config.spatial_merge_size, so its inputs cannot be made here."
        )
    return merge


def _layout(grid: Grid, merge: int) -> Layout:
    rows: Any = [grid] if grid and isinstance(grid[0], int) else grid
    layout = tuple(tuple(row) for row in rows)
    if not layout or any(len(row) != 3 or min(row) < 1 or row[1] % merge or row[2] % merge for row in layout):
        raise OptionError(
            f"warmup: grid {grid!r}: expected (frames, height, width) in patches for each item of a call, "
            f"height and width multiples of {merge}."
        )
    return layout


def _size(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"warmup: size {size!r}: expected output tokens, a whole number of at least 1.")
    return size


@torch.no_grad()
def _call(tower: nn.Module, eager: nn.Module, layout: Layout) -> None:
    config: Any = eager.config
    weight = next(eager.parameters())
    channels = config.in_channels if hasattr(config, "in_channels") else config.num_channels
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    pixels = torch.zeros(num_patches(layout), width, dtype=weight.dtype, device=weight.device)
    tower(pixels, grid_thw=torch.tensor(layout, dtype=torch.int64, device=weight.device))


def _bar(text: str) -> None:
    """A line that the next one overwrites, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
