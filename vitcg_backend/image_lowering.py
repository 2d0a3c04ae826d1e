"""While Dynamo traces a tower of images: where its batch is marked, and what becomes of checks of values.

Such a tower calls no metadata function, so marking waits for what comes first, a check or an attention; what calls neither is
marked by the backend, at the cost of one more trace. All of this is inlined by Dynamo, or a constant for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .batching import is_batched, mark_batch
from .metadata_lowering import untouched
from .passes import take_out_checks as _take_out_checks  # noqa: F401  registers vitcg::check

__all__ = ["has_batch", "make_check"]


@torch._dynamo.assume_constant_result
def has_batch() -> bool:
    """Mark the batch of the running trace, and say whether it has one.

    With gradients on only the backend can tell whether they are wanted, and marks or does not.
    """
    if not torch.is_grad_enabled():
        mark_batch(traced=False)
    return is_batched()


def make_check(original: types.FunctionType, *, active: Callable[[], bool]) -> Callable[..., Any]:
    """The substitute of `torch_compilable_check` (transformers.utils.import_utils, 5.17 to 5.24).

    Args:
        original: the function; where it is traced it reads the condition from the device, which breaks the graph.
        active: whether the running trace is one of ours.
    """
    copy = untouched(original)

    def lowered(cond: Any, msg: Any, error_type: Any = ValueError) -> None:
        # The text comes last: one that is made of values cannot be traced, and elsewhere nobody looks at it.
        if active() and isinstance(cond, Tensor) and has_batch() and error_type is ValueError and isinstance(msg, str):
            torch.ops.vitcg.check(cond, msg)
        else:
            copy(cond, msg, error_type)

    return lowered
