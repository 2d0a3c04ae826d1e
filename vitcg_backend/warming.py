"""Captures before the first call: `warmup(tower, ...)`, the largest bucket first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .backend import live_towers, stats, vitcg
from .bucketing import Layout, num_patches
from .errors import OptionError, Refused
from .options import Options
from .owners import compiled_part, ids_of, not_compiled
from .planning import Planner
from .runtime import CompiledTower

__all__ = ["Warmed", "picture", "pictures", "stand_ins", "warmup"]

_LARGEST = (1024, 256)
"""Output tokens of the largest picture that a call of a warm-up is made of, in turns over the sizes: attention to one of 8192
takes three times all else, and costs.py tells attention from all else by layouts that differ in it."""

Grid = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Warmed:
    """What a warm-up did.

    Attributes:
        captured: budgets (output tokens; images for a tower of one image a row) that have a capture now, in the order in which
            they got it.
        skipped: budget or size of a call, in the same unit -> why there is no capture for it.
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
    grids: Grid | Iterable[Grid] | None = None,
    sizes: Iterable[int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Warmed:
    """Capture buckets of a compiled tower, the largest first, so that later ones fit into its memory.

    Each call that is expected runs once, on zeros: what is captured is what such a call uses. For a budget or a size it is
    what one picture of that many tokens uses, and any pictures and clips beside it. Buckets that no call of these can reach
    are left alone. The graph of a tower with a grid is compiled by the smallest of the calls first. A tower of
    one image a row must have been called once: the images' shape and dtype, and what comes beside them, are taken from the
    calls that it was traced with, and each such graph is warmed up.

    In the end memory that torch holds and nothing uses goes back to the device, as by `torch.cuda.empty_cache`.

    Args:
        tower: the result of ``torch.compile(tower, backend="vitcg")``, or a tower after ``tower.compile(backend="vitcg")``;
            it takes ``(pixels, grid_thw=...)``, padded images as ``(pixel_values, image_sizes=...)``, or one image a row and
            no grid.
        grids: the calls to expect, each a list of ``(frames, height, width)`` in patches, or a tensor ``[items, 3]`` as the
            tower takes it; a tensor by itself is one call.
        sizes: output tokens instead, each as one picture, or numbers of images; ``None`` for both = every budget of the ladder.
            A picture of more than 256 tokens may be stood for by several.
        progress: called with one line of text after each step; by default a bar on stderr if that is a terminal.

    Raises:
        OptionError: `grids` and `sizes` are both given, a value is not allowed, a size is above the largest budget, the tower
            is not compiled by this backend, or takes one image a row and was not called yet.
    """
    if grids is not None and sizes is not None:
        raise OptionError("warmup: give grids or sizes, not both.")
    eager = getattr(tower, "_orig_mod", tower)
    options = _options_of(tower)
    started = time.perf_counter()
    steps = _image_steps(eager, options, grids, sizes) or _grid_steps(tower, eager, options, grids, sizes)
    steps.sort(key=lambda step: step.size, reverse=True)
    parts = _graphs_of(eager, options)
    say = progress or _bar
    skipped: dict[int, str] = {}
    captured = list(_captured(parts))
    for number, step in enumerate(steps, 1):
        if not all(part.has_room(step.size) for part in parts):
            skipped[step.size] = "memory_limit_mib is reached"
            continue
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.warming(step.stands_for))
            step.call()
        parts = _graphs_of(eager, options)
        captured += sorted(_captured(parts) - set(captured), reverse=True)
        last = stats(eager).last
        if last is not None and last.reason is not None:
            skipped[step.size] = last.reason
        seconds, held = time.perf_counter() - started, sum(part.captured_bytes for part in parts)
        what = f"{step.size} {step.unit}, {len(captured)} captures, {seconds:.1f} s, {held >> 20} MiB"
        say(f"warm-up {number}/{len(steps)}: {what}")
    if torch.cuda.is_initialized():  # what the uncaptured runs took is of no use to replays, and as much as these hold
        _torch.release_workspaces()
        torch.cuda.empty_cache()
    held = sum(part.captured_bytes for part in parts)
    return Warmed(tuple(captured), skipped, time.perf_counter() - started, held)


@dataclass(frozen=True)
class _Step:
    """One call: its size in what budgets count, that unit's name, what makes the call, and the layout that it stands for."""

    size: int
    unit: str
    call: Callable[[], None]
    stands_for: Layout | None = None


def _options_of(tower: nn.Module) -> Options | None:
    """What a tower was compiled with; None where that is not known: by a function of the user's, or its forward alone."""
    if not isinstance(tower, nn.Module):
        raise OptionError(
            f"warmup: got {type(tower).__name__} {tower!r:.60}: give the result of torch.compile(tower, backend='vitcg')."
        )
    backend = _torch.backend_of(tower)
    if backend is None and compiled_part(tower) is not None:
        raise OptionError(f"warmup: {type(tower).__name__} {not_compiled(tower)}.")
    if backend is None:
        return None
    _, function, keywords = backend
    wrong = not_compiled(tower)
    if wrong is not None:
        name = type(getattr(tower, "_orig_mod", tower)).__name__
        raise OptionError(f"warmup: {name} {wrong}: give the result of torch.compile(tower, backend='vitcg').")
    return Options.parse(keywords.get("options"), keywords.get("mode")) if function is vitcg else None


def _graphs_of(eager: nn.Module, options: Options | None) -> list[CompiledTower]:
    """The graphs of a tower that calls use now: those of an earlier compile with other options may still be there."""
    return [part for part in live_towers(eager) if options is None or part.options == options]


def _grid_steps(
    tower: nn.Module,
    eager: nn.Module,
    options: Options | None,
    grids: Grid | Iterable[Grid] | None,
    sizes: Iterable[int] | None,
) -> list[_Step]:
    """The calls of a tower with a grid, which is compiled by the smallest of them."""
    merge = 1 if _takes_padded_images(eager) else _merge(eager)
    layouts = _layouts(grids, merge) if grids is not None else []
    if _takes_padded_images(eager) and any(frames != 1 for layout in layouts for frames, _, _ in layout):
        raise OptionError(f"warmup: {type(eager).__name__} takes images: expected 1 frame, height and width for each.")
    wanted = [] if sizes is None else _sizes(sizes, "output tokens")
    if options is not None:
        _look_at_largest(wanted, options)
    # Compiles. A call of one token would be a graph of its own: Dynamo takes sizes of 1 for constants.
    least = min(wanted) if wanted else min(max(_ladder(options)[0], 2), max(_LARGEST)) if options is not None else 16
    try:
        _call(tower, eager, min(layouts, key=num_patches, default=picture(least, merge)))
    except Refused as refusal:  # under `strict`: nothing can be warm before there is a graph
        if refusal.reason != "not_warmed_up":
            raise
    parts = _graphs_of(eager, options)
    if not parts:
        raise OptionError(f"warmup: this tower is not compiled with backend='vitcg', or it has no buckets.{_reasons(eager)}")
    if grids is not None:
        return [_Step(num_patches(x) // merge**2, "tokens", functools.partial(_call, tower, eager, x)) for x in layouts]
    any_segments = all(part.takes_any_segments for part in parts)
    most = min(part.planner.most_frames for part in parts) if any_segments else 1
    calls = stand_ins(wanted or parts[0].planner.ladder.budgets, merge, most)
    return [_Step(size, "tokens", functools.partial(_call, tower, eager, call), one) for size, call, one in calls]


def _look_at_largest(sizes: Iterable[int], options: Options) -> None:
    """Raises OptionError where no bucket will hold a picture of one of these sizes: a frame is not cut."""
    largest = _ladder(options)[-1]
    for size in sizes:
        if size > largest:
            raise OptionError(
                f"warmup: size {size}: the largest budget is {largest} output tokens, and a picture is not cut. Leave the size "
                "out, or compile with larger token_budgets or a larger max_tokens."
            )


def _ladder(options: Options) -> Sequence[int]:
    return Planner(options, unit=1).ladder.budgets  # in tokens, whatever the unit


def _image_steps(
    eager: nn.Module, options: Options | None, grids: Grid | Iterable[Grid] | None, sizes: Iterable[int] | None
) -> list[_Step]:
    """The calls of a tower of one image a row, none for a tower that no such graph was traced of."""
    parts = [part for part in _graphs_of(eager, options) if part.planner.tokens_of_image]
    if not parts:
        return []
    if grids is not None:
        name = type(eager).__name__
        raise OptionError(f"warmup: {name} takes one image a row and no grid: give sizes, which are numbers of images.")
    known = {budget for part in parts for budget in part.planner.ladder.budgets}
    counts = sorted(known) if sizes is None else _sizes(sizes, "images")
    wanted = [(n, [p for p in parts if sizes is not None or n in p.planner.ladder.budgets]) for n in counts]
    return [_Step(n, "images", functools.partial(_call_images, eager, own, n)) for n, own in wanted]


@torch.no_grad()
def _call_images(eager: nn.Module, parts: Sequence[CompiledTower], images: int) -> None:
    """Raises OptionError where no graph can be called as things are now."""
    served = [part.call_with(images, ids_of(eager)) for part in parts]
    if not any(served):
        what = f"{type(eager).__name__} has other parameters, or another autocast is on, than when it was last called"
        raise OptionError(f"warmup: {what}: call the compiled tower once first.")


def _reasons(eager: nn.Module) -> str:
    """What `stats` says of a tower without buckets."""
    return "".join(f" {reason}: {text}." for reason, text in stats(eager).refusals.items())


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


def pictures(tokens: int, merge: int, largest: int) -> Layout:
    """Pictures of `largest` output tokens and one of the rest, exactly `tokens` together."""
    sizes = [largest] * (tokens // largest) + [tokens % largest] * (tokens % largest > 0)
    return tuple(item for size in sizes for item in picture(size, merge))


def stand_ins(sizes: Iterable[int], merge: int, most: int) -> list[tuple[int, Layout, Layout | None]]:
    """A call for one picture of each size, in output tokens: the size, the call's layout of `most` pictures at most, and that
    of the one picture where it stands for that.
    """
    calls: list[tuple[int, Layout, Layout | None]] = []
    for rung, size in enumerate(sorted(sizes)):
        one, several = picture(size, merge), pictures(size, merge, _LARGEST[rung % 2])
        calls.append((size, one, None) if several == one or len(several) > most else (size, several, one))
    return calls


def _side(size: int) -> int:
    """The largest divisor that is at most the square root."""
    return next(side for side in range(int(size**0.5), 0, -1) if size % side == 0)


def _merge(tower: nn.Module) -> int:
    config: Any = getattr(tower, "config", None)
    merge = getattr(config, "spatial_merge_size", None)
    if not isinstance(merge, int):
        raise OptionError(
            f"warmup: {type(tower).__name__} has no config.spatial_merge_size, so its inputs cannot be made here. If it takes "
            f"one image a row, compile it and call it once first: its images are taken from that call.{_reasons(tower)}"
        )
    return merge


def _takes_padded_images(tower: nn.Module) -> bool:
    """Whether a tower takes images padded to one size and the size of each (`crops.py`)."""
    return list(inspect.signature(tower.forward).parameters)[:2] == ["pixel_values", "image_sizes"]


def _layouts(grids: Any, merge: int) -> list[Layout]:
    """The calls that grids stand for: a tensor is one call, anything else holds one in each place."""
    return [_layout(grid, merge) for grid in ([grids] if hasattr(grids, "tolist") else _listed("grids", grids))]


def _layout(grid: Any, merge: int) -> Layout:
    """The rows of a grid, whatever whole numbers they are made of; a row by itself is a call of one item."""
    try:
        rows = list(grid.tolist() if hasattr(grid, "tolist") else grid)
        rows = rows if hasattr(rows[0], "__iter__") else [rows]
        layout: tuple[tuple[int, ...], ...] = tuple(tuple(map(operator.index, row)) for row in rows)
    except (IndexError, TypeError):
        layout = ()
    if not layout or any(len(row) != 3 or min(row) < 1 or row[1] % merge or row[2] % merge for row in layout):
        raise OptionError(
            f"warmup: grid {grid!r}: expected (frames, height, width) in patches for each item of a call, "
            f"whole numbers (a tensor of integers), height and width multiples of {merge}."
        )
    return layout  # type: ignore[return-value]  # of three numbers each, as has been seen


def _sizes(sizes: Any, unit: str) -> list[int]:
    return [_size(size, unit) for size in _listed("sizes", sizes)]


def _size(size: Any, unit: str) -> int:
    number = operator.index(size) if hasattr(size, "__index__") and not isinstance(size, bool) else 0
    if number < 1:
        raise OptionError(f"warmup: size {size!r}: expected {unit}, a whole number of at least 1.")
    return number


def _listed(name: str, given: Any) -> list[Any]:
    listed = [] if isinstance(given, str) or not hasattr(given, "__iter__") else list(given)
    if not listed:
        raise OptionError(f"warmup: {name}={given!r}: expected a list, with one call in each place and at least one.")
    return listed


@torch.no_grad()
def _call(tower: nn.Module, eager: nn.Module, layout: Layout) -> None:
    config: Any = eager.config
    weight = next(eager.parameters())
    channels = config.in_channels if hasattr(config, "in_channels") else config.num_channels
    if _takes_padded_images(eager):
        sizes = torch.tensor([(h, w) for _, h, w in layout], device=weight.device) * config.patch_size
        largest = [max(sides) * config.patch_size for sides in zip(*layout, strict=True)][1:]
        images = torch.zeros(len(layout), channels, *largest, dtype=weight.dtype, device=weight.device)
        tower(images, image_sizes=sizes)
        return
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    pixels = torch.zeros(num_patches(layout), width, dtype=weight.dtype, device=weight.device)
    tower(pixels, grid_thw=torch.tensor(layout, dtype=torch.int64, device=weight.device))


def _bar(text: str) -> None:
    """A line that the next one overwrites, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
