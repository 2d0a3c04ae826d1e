"""The error budget: an output may be twice as far from float64 as eager's own.

Note [Error budget]: no tolerance is picked by hand. The output under test and eager's are both compared with the same
tower run in float64; the output may be at most `factor` (twice) as far from it as eager is, in each of two relative
errors of each tensor::

    rms error = ||out - ref||_2   / ||ref||_2
    max error = ||out - ref||_inf / ||ref||_inf

Where eager happens to be exact or nearly so, twice its error would forbid a single different rounding. So the budget
has a floor: half an ulp of the output's dtype (`torch.finfo.eps`) for the rms error, one for the max error. What is
rounded correctly, or to the wrong neighbour here and there, always passes. One layer of a tower already has an rms
error of a third of an ulp in bfloat16 and of one and a half in float32, twice which is above the floor: it decides for
copies and single operations only.

The largest of few errors is a matter of luck: an output of one token has 32 values, and eager's worst one may happen to
be small. What n values with eager's rms error lead one to expect is sqrt(2 ln n) times that error, so this counts as
eager's max error where the one seen is smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .outputs import describe, named_leaves

__all__ = ["ErrorReport", "TensorError", "assert_within_budget", "check"]

RMS_FLOOR_ULPS = 0.5
MAX_FLOOR_ULPS = 1.0


@dataclass(frozen=True)
class TensorError:
    """Relative errors of one output tensor against float64 (Note [Error budget]).

    Attributes:
        name: where the tensor is in the output, such as ``deepstack_features[1]``.
        rms_error: of the output under test.
        max_error: of the output under test.
        eager_rms_error: eager's own.
        eager_max_error: eager's own.
        rms_budget: what `rms_error` may be.
        max_budget: what `max_error` may be.
        problem: what makes a comparison of values pointless (another shape, a NaN that eager has not), or "".
    """

    name: str
    rms_error: float = 0.0
    max_error: float = 0.0
    eager_rms_error: float = 0.0
    eager_max_error: float = 0.0
    rms_budget: float = 0.0
    max_budget: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Within both budgets, and no problem."""
        return self.budget_used <= 1

    @property
    def budget_used(self) -> float:
        """Error over budget, the larger of the two: at most 1 is right; infinite with a problem."""
        pairs = ((self.rms_error, self.rms_budget), (self.max_error, self.max_budget))
        return math.inf if self.problem else max(error / budget if budget else 0.0 for error, budget in pairs)

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        rms = f"rms error {self.rms_error:.3g} (eager {self.eager_rms_error:.3g}, budget {self.rms_budget:.3g})"
        worst = f"max error {self.max_error:.3g} (eager {self.eager_max_error:.3g}, budget {self.max_budget:.3g})"
        return f"{self.name}: {rms}, {worst}"


@dataclass(frozen=True)
class ErrorReport:
    """The errors of all tensors of an output, in order."""

    tensors: tuple[TensorError, ...]

    @property
    def ok(self) -> bool:
        """Every tensor is within its budget."""
        return all(tensor.ok for tensor in self.tensors)

    @property
    def worst(self) -> float:
        """The largest share of its budget that a tensor uses (`TensorError.budget_used`); 0 without tensors."""
        return max((tensor.budget_used for tensor in self.tensors), default=0.0)

    @property
    def worst_tensor(self) -> TensorError | None:
        """The tensor that uses this share; None for an output without tensors."""
        return max(self.tensors, key=lambda tensor: tensor.budget_used, default=None)

    def __str__(self) -> str:
        return "\n".join(f"{'ok  ' if tensor.ok else 'FAIL'} {tensor}" for tensor in self.tensors)


def check(outputs: Any, eager: Any, reference: Any, *, factor: float = 2.0) -> ErrorReport:
    """Measure `outputs` and `eager` against `reference` (Note [Error budget]).

    NaN and infinities pass only where eager has the same; there and nowhere else values are not compared. Tensors of
    integers and booleans must equal eager's.

    Args:
        outputs: what is tested: any nesting of tensors, of eager's structure, shapes and dtypes.
        eager: eager's output for the same arguments.
        reference: the float64 output for the same arguments (`reference_float64`).
        factor: how many times eager's error is allowed.
    """
    ours, theirs, exact = (dict(named_leaves(each)) for each in (outputs, eager, reference))
    if not list(ours) == list(theirs) == list(exact):
        names = f"{list(ours)}, eager {list(theirs)}, reference {list(exact)}"
        return ErrorReport((TensorError("output", problem=f"the tensors differ: {names}"),))
    return ErrorReport(tuple(_compare(name, ours[name], theirs[name], exact[name], factor) for name in ours))


def assert_within_budget(outputs: Any, eager: Any, reference: Any, *, factor: float = 2.0) -> None:
    """Raise AssertionError, with the worst tensor, its errors and eager's, unless `check` finds all in their budget."""
    report = check(outputs, eager, reference, factor=factor)
    if not report.ok:
        what = f"error against float64 above {factor:g} times eager's own"
        raise AssertionError(f"{what}; worst is {report.worst_tensor}\nall tensors:\n{report}")


def _compare(name: str, out: Any, eager: Any, ref: Any, factor: float) -> TensorError:
    if not isinstance(out, Tensor) or not isinstance(eager, Tensor):
        same = type(out) is type(eager) and out == eager
        return TensorError(name, problem="" if same else f"{out!r} instead of {eager!r}")
    if describe(out) != describe(eager):
        return TensorError(name, problem=f"{describe(out)} instead of {describe(eager)}")
    if ref.shape != eager.shape:
        return TensorError(name, problem=f"the reference is {describe(ref)} where eager is {describe(eager)}")
    out, eager, ref = out.detach(), eager.detach(), ref.detach().to(eager.device)
    if not eager.is_floating_point():
        wrong = int((out != eager).sum())
        return TensorError(name, problem=f"{wrong} of {out.numel()} exact values differ from eager" if wrong else "")
    finite = eager.isfinite()
    same = (out == eager) | (out.isnan() & eager.isnan())
    if wrong := int(torch.where(finite, ~out.isfinite(), ~same).sum()):
        return TensorError(name, problem=f"NaN or infinity unlike eager's at {wrong} of {out.numel()} positions")
    if not bool(ref[finite].isfinite().all()):
        return TensorError(name, problem="the reference is not finite where eager is")
    rms, worst = _relative_errors(out[finite], ref[finite])
    eager_rms, eager_worst = _relative_errors(eager[finite], ref[finite])
    expected_worst = eager_rms * _expected_max_over_rms(ref[finite])
    ulp = torch.finfo(out.dtype).eps
    return TensorError(
        name,
        rms_error=rms,
        max_error=worst,
        eager_rms_error=eager_rms,
        eager_max_error=eager_worst,
        rms_budget=max(factor * eager_rms, RMS_FLOOR_ULPS * ulp),
        max_budget=max(factor * max(eager_worst, expected_worst), MAX_FLOOR_ULPS * ulp),
    )


def _relative_errors(values: Tensor, ref: Tensor) -> tuple[float, float]:
    """(rms, max) error of finite `values`, relative to `ref`; absolute where `ref` is all zero."""
    if values.numel() == 0:
        return 0.0, 0.0
    ref = ref.double()
    error = values.double() - ref
    scales = (float(ref.norm()) or float(ref.numel()) ** 0.5, float(ref.abs().max()) or 1.0)
    return float(error.norm()) / scales[0], float(error.abs().max()) / scales[1]


def _expected_max_over_rms(ref: Tensor) -> float:
    """What makes a relative rms error the relative max error that normally distributed errors of that size have on average."""
    if ref.numel() < 2:
        return 1.0
    ref = ref.double()
    rms, largest = float(ref.norm()) / float(ref.numel()) ** 0.5, float(ref.abs().max())
    return (rms / largest if largest else 1.0) * math.sqrt(2 * math.log(ref.numel()))
