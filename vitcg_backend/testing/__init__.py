"""Towers, inputs and comparisons for tests of this backend and of code that uses it.

::

    from vitcg_backend import testing

    tower = testing.tiny_tower("qwen3_vl", dtype=torch.bfloat16)
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8), (2, 4, 4)))
    compiled = torch.compile(tower, backend="vitcg")
    with torch.no_grad():
        testing.assert_within_budget(
            compiled(pixels, grid_thw=grid),
            tower(pixels, grid_thw=grid),
            testing.reference_float64(tower, pixels, grid_thw=grid),
        )

The towers are those of transformers, built from their configuration classes with seeded random weights: nothing is
downloaded.
"""

from __future__ import annotations

from .error_budget import ErrorReport, TensorError, assert_within_budget, check
from .outputs import assert_bitwise, flatten, reference_float64
from .towers import make_inputs, published_tower, tiny_tower

__all__ = [
    "ErrorReport",
    "TensorError",
    "assert_bitwise",
    "assert_within_budget",
    "check",
    "flatten",
    "make_inputs",
    "published_tower",
    "reference_float64",
    "tiny_tower",
]
