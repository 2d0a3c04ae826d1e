"""write_out_of_place: writes into fresh tensors become operations, bit for bit; what may be seen elsewhere is left alone."""

from __future__ import annotations

import pytest
import torch
from graphs import Module, dynamo_graph, targets

from vitcg_backend.passes.graph import Ineligible
from vitcg_backend.passes.write_out_of_place import write_out_of_place


def scatter(m, x, g):
    sums = x.new_zeros(x.shape[0], 8)
    sums.index_add_(0, torch.arange(x.shape[0]), x @ m.weight)
    return sums * 2


def assign(m, x, g):
    rows = m.weight[0].repeat(x.shape[0], 1)
    rows[torch.arange(x.shape[0])] = x
    rows[:, 0] = 1.0
    return rows + x


def run(gm, function):
    inputs = []
    module = Module(function)
    given = {"pixels": torch.randn(24, 8, generator=torch.Generator().manual_seed(0)), "grid": torch.tensor([[1, 2, 6]] * 2)}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            name = next((n for n in ("weight", "second", "frequencies", "pixels", "grid") if n in node.name), None)
            inputs.append(24 if not isinstance(value, torch.Tensor) else given.get(name, getattr(module, name, None)))
    with torch.no_grad():
        return gm(*inputs), module(given["pixels"], given["grid"])


@pytest.mark.parametrize("function", [scatter, assign])
def test_rewrites_bit_for_bit(function) -> None:
    """A scatter into zeros, and several assignments one after the other, give eager's bits; no write is left."""
    gm = write_out_of_place(dynamo_graph(function))
    assert "written" in targets(gm)
    assert not {"setitem", "index_add_"} & set(targets(gm))
    ours, eager = run(gm, function)
    assert torch.equal(ours[0], eager)


def test_unrelated_graph_is_untouched() -> None:
    """A graph without a write comes back as the same object."""
    gm = dynamo_graph(lambda m, x, g: x @ m.weight)
    before = str(gm.graph)
    assert write_out_of_place(gm) is gm
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, g: (x.mul_(2), x + 1)[1],  # the caller's tensor
        lambda m, x, g: (y := x * 2, v := y[0], y.add_(1), v + y)[3],  # somebody holds a view
        lambda m, x, g: (y := x.new_zeros(x.shape[0], 8), v := y[:2], y.add_(1), y + v.sum())[3],
    ],
    ids=["an argument", "no fresh memory", "a view before"],
)
def test_writes_that_may_be_seen_are_left(function) -> None:
    """A write that a view, or the caller, can see is not moved, and refuses the graph."""
    from vitcg_backend.passes.bind_tokens import bind_tokens

    gm = write_out_of_place(dynamo_graph(function))
    assert "written" not in targets(gm)
    with pytest.raises(Ineligible, match="changes a tensor"):
        bind_tokens(gm)
