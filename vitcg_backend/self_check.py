"""The self-check: a bucket's result against the unpadded run, at the bucket's first use."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["disagreement"]

# Relative error of two runs of one body on different sizes: other kernels, other orders of summation, many layers deep. A
# padded row that leaks changes rows by their own size, far above these.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-9}


def disagreement(result: Tensor, expected: Tensor) -> str | None:
    """Why `result` is not the result of the same computation as `expected`, or None.

    Non-finite values must be in the same places; finite ones agree in the relative norm over all rows and over the last row
    by itself, the first that a wrong bound would spoil.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not result.dtype.is_floating_point:
        return None if torch.equal(result, expected) else "integers differ"
    finite, should_be = torch.isfinite(result), torch.isfinite(expected)
    if not torch.equal(finite, should_be):
        return f"{int((should_be & ~finite).sum())} values are not finite where the unpadded run's are"
    limit = _TOLERANCE.get(result.dtype, 5e-2)
    for name, rows in (("all rows", slice(None)), ("the last row", slice(-1, None))):
        a = torch.where(finite, result, 0)[rows].double()
        b = torch.where(finite, expected, 0)[rows].double()
        error, norm = float((a - b).norm()), float(b.norm())
        if error > limit * norm:
            return f"relative error {error / max(norm, 1e-30):.2e} over {name}, allowed {limit:.0e}"
    return None
