"""SizeGuards: what a trace has decided by sizes, asked of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from vitcg_backend.size_guards import SizeGuards


def guards_of(function: Any, *args: Tensor, other: bool = False) -> SizeGuards:
    """The guards of a function's graph on all its inputs, or with `other` on the first alone."""
    made: list[SizeGuards] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        tensors = [i for i, node in enumerate(placeholders) if isinstance(node.meta["example_value"], Tensor)]
        made.append(SizeGuards(placeholders, tensors[:1] if other else tensors))
        positions.extend(tensors)
        return gm.forward

    positions: list[int] = []
    torch.compile(function, backend=backend, dynamic=True)(*args)
    return made[0]


def test_a_question_about_a_size() -> None:
    """The branch that was taken, a quotient of it, a number of axes and a constant size."""

    def function(x: Tensor) -> Tensor:
        y = x.view(len(x) // 4, 4, 3)
        return y * 2 if len(x) > 40 else y

    few = guards_of(function, torch.ones(16, 3))
    assert few.hold([0, torch.ones(16, 3)]) == few.hold([0, torch.ones(40, 3)]) is True
    for wrong in (torch.ones(44, 3), torch.ones(18, 3), torch.ones(1, 3), torch.ones(16, 4), torch.ones(16, 3, 1)):
        assert not few.hold([0, wrong])


def test_sizes_that_were_one_stay_one() -> None:
    """Two inputs of as many rows."""
    pair = guards_of(lambda x, y: x + y, torch.ones(6, 3), torch.ones(6, 3))
    positions = [position for position, _ in pair._sizes]

    def args(x: int, y: int) -> list[Any]:
        given: list[Any] = [0] * (max(positions) + 1)
        given[positions[0]], given[positions[1]] = torch.ones(x, 3), torch.ones(y, 3)
        return given

    assert pair.hold(args(9, 9))
    assert not pair.hold(args(9, 8))


def test_a_decision_about_another_input_is_refused() -> None:
    """A guard on a size that is not among those looked at."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if len(y) > 4 else x

    with pytest.raises(Exception, match="the trace has decided by"):
        guards_of(function, torch.ones(6, 3), torch.ones(7, 2), other=True)
