"""What replays and uncaptured runs cost: measured at a bucket's first use, estimated from those measurements elsewhere.

Seconds of a run are taken as ``fixed + rate * tokens + quadratic * squares``, where `squares` is the sum of the squared
frames' rows (what attention works on). Attention is the same however a call is packed, so packing looks at the first two
terms, and a measurement counts without its third.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .bucketing import Layout

__all__ = ["CLEAR", "LONG_S", "MARGIN", "Costs", "Stopwatch", "once", "seconds", "squares"]

FIXED_TOKENS = 160.0
"""The fixed part of a replay in tokens, before anything is known: 1.1 ms at 7 us a token (27 layers, 1152 wide, H200)."""

ENOUGH_S = 0.1  # of runs of one kind: a slow tower's first use is not drawn out
ENOUGH_ON_GPU_S = 0.02  # its clock is of another kind: two runs of 15 ms differ by far less than MARGIN

LONG_S = 0.05
"""From here on the first replay on a GPU counts: what a graph's first launch takes besides is then about 1 %."""

MARGIN = 0.03
"""By this share the uncaptured path has to be faster, which also keeps the host busy, or a larger bucket than a smaller one."""

CLEAR = 2.0
"""An uncaptured run that took so many times what a replay takes is not timed a second time: the host takes ten times as long to
launch a small call."""


def seconds(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """The least time of each of `runs` over three rounds, or fewer of slow ones, until the device is done.

    In turns and in alternating order, because a device gets slower while it is busy: what ran last would lose. It waits: for
    first uses only.
    """
    best = [math.inf] * len(runs)
    spent, enough = 0.0, ENOUGH_ON_GPU_S if device.type == "cuda" else ENOUGH_S
    for number in range(3):
        if number and spent >= enough * len(runs):
            break
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            took = once(runs[index], device)
            best[index] = min(best[index], took)
            spent += took
    return best


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run until the device is done."""
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # not the device: another thread may be capturing on it
        watch = Stopwatch(device)
        run()
        watch.stop()
        return watch.seconds()


class Stopwatch:
    """The time from here to `stop`, on the current stream of a GPU as the device comes by: nothing waits before it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._now()

    def stop(self) -> None:
        """What is queued from now on does not count."""
        self._end = self._now()

    def seconds(self) -> float:
        """Wait for the device, if it is not yet there."""
        if self._device.type != "cuda":
            return self._end - self._begin  # type: ignore[no-any-return]
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e-3  # type: ignore[no-any-return]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event


def squares(layout: Layout | None) -> int:
    """Sum over all frames of the square of their rows, 0 without a layout."""
    return sum(math.prod(frames) * (h * w) ** 2 for *frames, h, w in layout or ())


@dataclass(frozen=True)
class _Sample:
    tokens: int
    squares: int
    seconds: float


@dataclass
class Costs:
    """Measurements of one tower.

    Attributes:
        fixed: fixed part of a replay, in seconds (in tokens while nothing is known).
        rate: seconds of one more token of a bucket (1 while nothing is known).
        quadratic: seconds of one more square.
    """

    fixed: float = FIXED_TOKENS
    rate: float = 1.0
    quadratic: float = 0.0
    _replays: dict[int, _Sample] = field(default_factory=dict)
    _uncaptured: dict[int, _Sample] = field(default_factory=dict)

    def learn_replay(self, budget: int, layout: Layout | None, measured: float) -> None:
        """A replay of the bucket of `budget` tokens on `layout`, copies in and out included, in seconds."""
        self._replays[budget] = _Sample(budget, squares(layout), measured)
        self._fit()

    def learn_uncaptured(self, budget: int, tokens: int, layout: Layout | None, measured: float) -> None:
        """An uncaptured run of `tokens` tokens, for which `budget` would be the bucket, in seconds."""
        self._uncaptured[budget] = _Sample(tokens, squares(layout), measured)

    def knows(self, budget: int) -> bool:
        """Whether a replay of this bucket has been measured."""
        return budget in self._replays

    def knows_uncaptured(self, budget: int) -> bool:
        """Whether an uncaptured run of a size of this bucket has been measured."""
        return budget in self._uncaptured

    def table(self, budgets: Sequence[int]) -> list[float]:
        """Cost of a replay of each bucket apart from attention: measured, or estimated in between.

        An estimate is at most the next larger bucket's measurement, so that the smaller one gets its first use, but at
        least the next smaller one's: only what has been measured is preferred to a bucket that fits more closely.
        """
        measured = {b: max(s.seconds - self.quadratic * s.squares, 0.0) for b, s in self._replays.items()}
        costs, most, least = [], math.inf, 0.0
        for budget in reversed(budgets):
            most = measured.get(budget, most)
            costs.append(min(self.fixed + self.rate * budget, most) if budget not in measured else most)
        costs.reverse()
        for rung, budget in enumerate(budgets):
            least = measured.get(budget, least)
            costs[rung] = max(costs[rung], least)
        return costs

    def uncaptured(self, budget: int, tokens: int) -> float | None:
        """Seconds of an uncaptured run apart from attention, None while none of this bucket's sizes was measured."""
        sample = self._uncaptured.get(budget)
        if sample is None:
            return None
        return sample.seconds + self.rate * (tokens - sample.tokens) - self.quadratic * sample.squares

    def _fit(self) -> None:
        """Weighted least squares over the measured replays; with few or odd ones a proportion of the default."""
        samples = list(self._replays.values())
        if len(samples) >= 4:
            for terms in (3, 2):
                rows = [[1.0, float(s.tokens), float(s.squares)][:terms] for s in samples]
                found = _least_squares(rows, [s.seconds for s in samples])
                if found is not None and min(found) >= 0 and found[1] > 0:
                    self.fixed, self.rate, self.quadratic = (*found, 0.0)[:3]
                    return
        self.rate = sum(s.seconds for s in samples) / sum(FIXED_TOKENS + s.tokens for s in samples)
        self.fixed, self.quadratic = FIXED_TOKENS * self.rate, 0.0


def _least_squares(rows: list[list[float]], values: list[float]) -> list[float] | None:
    """Least squares of the relative errors; None where the measurements do not determine the terms."""
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(len(rows[0]))]
    weighted = [[x / s / v for x, s in zip(row, scale, strict=True)] for row, v in zip(rows, values, strict=True)]
    left = torch.tensor(weighted, dtype=torch.float64)
    if int(torch.linalg.matrix_rank(left)) < left.shape[1]:
        return None
    found = torch.linalg.lstsq(left, torch.ones(len(values), 1, dtype=torch.float64)).solution.flatten().tolist()
    return [x / s for x, s in zip(found, scale, strict=True)]
