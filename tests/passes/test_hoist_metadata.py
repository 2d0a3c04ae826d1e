"""hoist_metadata: what the pixels and the parameters do not reach goes to the prologue; nothing else does."""

from __future__ import annotations

import pytest
import torch
from graphs import bound, hoisted, metadata, targets

from vitcg_backend.passes.graph import Ineligible
from vitcg_backend.passes.hoist_metadata import hoist_metadata


def rotary(m, x, g):
    angles = metadata("positions", g)[:, None] * 0.5
    return (x @ m.weight) * angles.cos() + x * angles.sin()


def test_moves_metadata() -> None:
    """Positions, angles, cos and sin are the prologue; it returns what the body reads."""
    result = hoisted(rotary)
    assert {"cos", "sin"} <= set(targets(result.prologue))
    assert "matmul" not in targets(result.prologue)
    assert [n.name for n in result.metadata] == ["cos", "sin"]


def test_prologue_computes_the_same_numbers() -> None:
    """Run on real inputs it gives eager's tensors bit for bit."""
    result = hoisted(rotary)
    grid = torch.tensor([[1, 2, 3], [2, 2, 2]])
    values = {"grid": grid}
    placeholders = result.bound.placeholders
    inputs = [
        next((v for k, v in values.items() if k in placeholders[p].name), int(grid.prod(1).sum()))
        for p in result.prologue_inputs
    ]
    cos, sin = result.prologue(*inputs)
    angles = torch.cat([torch.arange(6), torch.arange(8)])[:, None] * 0.5
    assert torch.equal(cos, angles.cos())
    assert torch.equal(sin, angles.sin())


def test_parameters_never_enter_the_prologue() -> None:
    """A table looked up by metadata stays in the body, as does everything a parameter reaches."""
    result = hoisted(lambda m, x, g: x + torch.nn.functional.embedding(metadata("positions", g) % 8, m.weight))
    assert "embedding" not in targets(result.prologue)
    names = [result.bound.placeholders[p].name for p in result.prologue_inputs]
    assert not any("parameters" in name for name in names)


def test_equal_metadata_is_computed_once() -> None:
    """The same operator called in every layer becomes one node, with several users."""

    def function(m, x, g):
        for _ in range(3):
            x = x @ m.weight * metadata("positions", g)[:, None].cos()
        return x

    result = hoisted(function)
    assert targets(result.prologue).count("cos") == 1
    assert len(result.metadata) == 1


def test_unrelated_graph_has_an_empty_prologue() -> None:
    """Without metadata nothing is hoisted and no node is changed."""
    graph = bound(lambda m, x, g: (x @ m.weight).relu())
    before = list(graph.gm.graph.nodes)
    result = hoist_metadata(graph)
    assert list(graph.gm.graph.nodes) == before
    assert result.metadata == []


def test_nested_chain_of_weight_arithmetic_is_free() -> None:
    """A chain on parameters alone is neither prologue nor body: it is sunk into the pieces that use it."""
    result = hoisted(lambda m, x, g: x @ (m.weight.t() + m.second).t().contiguous())
    assert [n.name for n in result.metadata] == []
    assert sum(kind == "free" for kind in result.kind.values()) > 3


def test_refuses_a_graph_without_a_body() -> None:
    """Nothing depends on the pixels: there is nothing to replay."""
    graph = bound(lambda m, x, g: (x @ m.weight, metadata("positions", g)))
    output = next(n for n in graph.gm.graph.nodes if n.op == "output")
    product, positions = output.args[0]
    output.args = ((positions,),)
    graph.gm.graph.erase_node(product)
    with pytest.raises(Ineligible, match=r"\[no_body\]"):
        hoist_metadata(graph)


def test_buffers_never_enter_the_prologue() -> None:
    """What a buffer reaches is computed in the body: an edit through `.data` would leave a kept value stale."""
    result = hoisted(lambda m, x, g: x * (metadata("positions", g)[:, None] * m.frequencies).cos())
    assert "cos" not in targets(result.prologue)
    assert len(result.metadata) == 1
