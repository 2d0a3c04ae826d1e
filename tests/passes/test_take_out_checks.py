"""take_out_checks: checks of whole numbers run in front; what needs pixels refuses the graph; others stay as they are."""

from __future__ import annotations

import pytest
import torch
from graphs import dynamo_graph, targets

from vitcg_backend.passes.graph import Ineligible, where
from vitcg_backend.passes.take_out_checks import take_out_checks


def positive(m, x, g):
    torch.ops.vitcg.check((g > 0).all(), "sizes must be positive")
    return x @ m.weight


def twice(m, x, g):
    sizes = g * 2
    torch.ops.vitcg.check(sizes > 0, "sizes must be positive")
    torch.ops.vitcg.check((sizes < 9).all(-1), "sizes must be small")
    return x * sizes.sum()


def given(gm, grid):
    return [grid if "grid" in node.name else None for node in where(gm.graph.nodes, "placeholder")]


def test_takes_out_and_raises_as_eager() -> None:
    """The graph has no check left, and the checks say what they said."""
    gm, checks = take_out_checks(dynamo_graph(positive))
    assert not [t for t in targets(gm) if "check" in t]
    assert "matmul" in targets(gm)
    assert not {"gt", "all"} & set(targets(gm))
    checks(given(gm, torch.tensor([[1, 2, 2]])))
    with pytest.raises(ValueError, match="sizes must be positive"):
        checks(given(gm, torch.tensor([[1, 0, 2]])))


def test_graph_without_checks_is_untouched() -> None:
    """It comes back as the same object."""
    gm = dynamo_graph(lambda m, x, g: x @ m.weight)
    before = str(gm.graph)
    assert take_out_checks(gm) == (gm, None)
    assert str(gm.graph) == before


def test_several_checks_and_shared_nodes() -> None:
    """Each of several checks is made, in order; what the rest of the graph uses, too, stays there."""
    gm, checks = take_out_checks(dynamo_graph(twice))
    assert {"mul", "sum"} <= set(targets(gm))
    with pytest.raises(ValueError, match="must be small"):
        checks(given(gm, torch.tensor([[1, 5, 2]])))
    with pytest.raises(ValueError, match="must be positive"):
        checks(given(gm, torch.tensor([[-1, 5, 2]])))


def test_checks_of_pixels_refuse() -> None:
    """A check that pixels reach could only be made after the tower has run."""
    with pytest.raises(Ineligible, match="the tower checks values that l_pixels_ reaches"):
        take_out_checks(dynamo_graph(lambda m, x, g: (torch.ops.vitcg.check((x > 0).all(), "dark"), x)[1]))
