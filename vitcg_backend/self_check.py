"""The self-check: a bucket's result against the unpadded run, at the bucket's first use.

What belongs to nobody is spoilt for that one run: NaN in the padded pixel rows, NaN in memory that nothing has written yet
(the graph's pool, or what a CPU allocates), and the padded rows of the metadata in another order. Real rows must not notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .capture import Capture

__all__ = ["disagreement", "spoilt", "trouble"]

# Relative error of two runs of one body on different sizes: other kernels, other orders of summation, many layers deep. A
# padded row that leaks changes rows by their own size, far above these.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-9}


@contextlib.contextmanager
def spoilt(capture: Capture, rows: int, pool: Any) -> Any:
    """Inside: everything that a run of `capture` on `rows` real rows must not read is spoilt. Afterwards it is clean again.

    Args:
        capture: its inputs have been written and it has been recorded.
        rows: real rows.
        pool: the graph pool it was recorded into, None on a CPU.
    """
    capture.fill_tail(rows, float("nan"))
    capture.turn_tails(rows)
    try:
        if pool is None:
            with _torch.UnwrittenIsNan():
                yield
        else:
            _torch.poison_pool(pool, capture.device)
            yield
    finally:
        capture.fill_tail(rows, 0.0)
        capture.arena.owner = None  # so that the next call writes its metadata again


def trouble(capture: Capture, results: Sequence[Any], exact: Sequence[Any]) -> str | None:
    """Why a bucket's results are not those of the unpadded run, or None."""
    for number, (result, expected) in enumerate(zip(results, exact, strict=True)):
        if isinstance(result, Tensor):
            text = disagreement(result, expected, _token_axis(capture, number))
            if text is not None:
                return f"result {number} of bucket {capture.bucket.tokens}: {text}"
    return None


def _token_axis(capture: Capture, number: int) -> int:
    """Token axis of a result of the call, 0 for one without."""
    tail = capture.body.tail
    kind, index = ("body", number) if tail is None else tail.results[number]
    return (capture.token_axis(index) or 0) if kind == "body" else 0


def disagreement(result: Tensor, expected: Tensor, axis: int = 0) -> str | None:
    """Why `result` is not the result of the same computation as `expected`, or None.

    Non-finite values must be in the same places; finite ones agree in the relative norm over all rows and over the last row
    of the token axis `axis` by itself, the first that a wrong bound would spoil.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not result.dtype.is_floating_point:
        return None if torch.equal(result, expected) else "integers differ"
    finite, should_be = torch.isfinite(result), torch.isfinite(expected)
    if not torch.equal(finite, should_be):
        return f"{int((should_be & ~finite).sum())} values are not finite where the unpadded run's are"
    limit = _TOLERANCE.get(result.dtype, 5e-2)
    pairs = [("all rows", result, expected)]
    if result.dim() and result.shape[axis]:
        last = result.shape[axis] - 1
        pairs.append(("the last row", result.select(axis, last), expected.select(axis, last)))
    for name, a, b in pairs:
        a, b = (torch.where(x.isfinite(), x, 0).double() for x in (a, b))
        error, norm = float((a - b).norm()), float(b.norm())
        if error > limit * norm:
            return f"relative error {error / max(norm, 1e-30):.2e} over {name}, allowed {limit:.0e}"
    return None
