"""One tower, eager and compiled, call by call: equal within the error budget, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import vitcg_backend
from vitcg_backend import testing

from .processing import Packed

__all__ = ["Comparison", "Row"]

WARMUPS, REPEATS = 1, 3


@dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
        input: what was in it.
        grid: frames, height and width of each item, in patches.
        num_patches: rows into the tower.
        num_tokens: rows out, after the spatial merge.
        bucket_tokens: tokens of the bucket that served it, None if none did.
        padded_fraction: padded share of the bucket's rows.
        hit: whether a bucket served it.
        reason: why not.
        max_error: largest absolute difference from eager.
        budget_used: error against float64 over the error allowed; at most 1 is right.
        first_s: seconds of the compiled tower's first run of this call, compilation and capture included.
        eager_ms: median milliseconds of the eager tower.
        vitcg_ms: median milliseconds of the compiled tower.
        ratio: eager over compiled.
    """

    input: str
    grid: list[list[int]]
    num_patches: int
    num_tokens: int
    bucket_tokens: int | None
    padded_fraction: float
    hit: bool
    reason: str | None
    max_error: float
    budget_used: float
    first_s: float
    eager_ms: float
    vitcg_ms: float
    ratio: float


class Comparison:
    """An eager tower and the same tower compiled with ``backend="vitcg"``."""

    def __init__(self, tower: torch.nn.Module, options: dict[str, Any]) -> None:
        self.tower = tower
        self.compiled = torch.compile(tower, backend="vitcg", options=options)
        parameter = next(tower.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._eager: dict[int, tuple[Any, Any, float]] = {}

    @torch.no_grad()
    def row(self, name: str, packed: Packed) -> Row:
        """Run, check and time one call."""
        args = (packed.pixel_values.to(self.device, self.dtype), packed.grid_thw.to(self.device))
        eager, reference, eager_ms = self._eager_side(packed, args)
        started = time.perf_counter()
        outputs = self.compiled(*args)
        self._synchronize()
        first_s = time.perf_counter() - started
        record = vitcg_backend.stats(self.compiled).last
        report = testing.check(outputs, eager, reference)
        pairs = zip(testing.flatten(outputs), testing.flatten(eager), strict=True)
        vitcg_ms = self._milliseconds(lambda: self.compiled(*args))
        return Row(
            input=name,
            grid=packed.grid_thw.tolist(),
            num_patches=record.num_patches,
            num_tokens=record.num_tokens,
            bucket_tokens=record.bucket_tokens,
            padded_fraction=record.padded_fraction,
            hit=record.hit,
            reason=record.reason,
            max_error=max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs),
            budget_used=report.worst.severity if report.worst else 0.0,
            first_s=first_s,
            eager_ms=eager_ms,
            vitcg_ms=vitcg_ms,
            ratio=eager_ms / vitcg_ms,
        )

    def _eager_side(self, packed: Packed, args: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any, float]:
        """Eager's outputs, the float64 reference and eager's time: once for an input that comes again."""
        if id(packed) not in self._eager:
            eager = self.tower(*args)
            reference = testing.reference_float64(self.tower, *args)
            self._eager[id(packed)] = (eager, reference, self._milliseconds(lambda: self.tower(*args)))
        return self._eager[id(packed)]

    def _milliseconds(self, call: Callable[[], Any]) -> float:
        times = []
        for _ in range(WARMUPS + REPEATS):
            self._synchronize()
            started = time.perf_counter()
            call()
            self._synchronize()
            times.append((time.perf_counter() - started) * 1e3)
        return median(times[WARMUPS:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
