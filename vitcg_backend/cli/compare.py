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

ROUNDS = {"cpu": 3, "cuda": 20}  # both towers have run the call before: warm-ups are not needed


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
        self.compiled: Any = torch.compile(tower, backend="vitcg", options=options)
        parameter = next(tower.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._expected: dict[int, tuple[Any, Any]] = {}

    @torch.no_grad()
    def row(self, name: str, packed: Packed) -> Row:
        """Run, check and time one call."""
        args = (packed.pixel_values.to(self.device, self.dtype), packed.grid_thw.to(self.device))
        if id(packed) not in self._expected:  # an input may come again
            self._expected[id(packed)] = (self.tower(*args), testing.reference_float64(self.tower, *args))
        eager, reference = self._expected[id(packed)]
        outputs, first_ms = self._timed(self.compiled, args)
        record = vitcg_backend.stats(self.tower).last
        if record is None:
            raise RuntimeError("the backend was not called: torch.compile ran the tower eagerly")
        pairs = zip(testing.flatten(outputs), testing.flatten(eager), strict=True)
        eager_ms, vitcg_ms = self._in_turns(args)
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
            budget_used=testing.check(outputs, eager, reference).worst,
            first_s=first_ms / 1e3,
            eager_ms=eager_ms,
            vitcg_ms=vitcg_ms,
            ratio=eager_ms / vitcg_ms,
        )

    def _in_turns(self, args: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
        """Median milliseconds of both towers, run in turns so that what else the machine does meets both."""
        rounds = [
            [self._timed(tower, args)[1] for tower in (self.tower, self.compiled)] for _ in range(ROUNDS[self.device.type])
        ]
        eager, compiled = zip(*rounds, strict=True)
        return median(eager), median(compiled)

    def _timed(self, tower: Callable[..., Any], args: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, float]:
        self._synchronize()
        started = time.perf_counter()
        outputs = tower(*args)
        self._synchronize()
        return outputs, (time.perf_counter() - started) * 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
