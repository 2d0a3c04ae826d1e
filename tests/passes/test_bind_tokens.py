"""bind_tokens: rows become ``unit * n`` in a private environment; what cannot be bound is refused with a reason."""

from __future__ import annotations

import pytest
import torch
from graphs import bound, dynamo_graph, metadata, targets

from vitcg_backend.passes.bind_tokens import bind_tokens
from vitcg_backend.passes.graph import Ineligible, Role


def test_rewrites_sizes_and_metadata() -> None:
    """Pixels, metadata and results get ``c * n`` rows, and the operator its token count."""
    result = bound(lambda m, x, g: x @ m.weight + metadata("positions", g)[:, None])
    nodes = {n.name: n for n in result.gm.graph.nodes}
    operator = next(n for n in nodes.values() if "metadata" in str(n.target))
    assert len(operator.args) == 5
    assert result.placeholders[result.pixels].meta["role"] == Role.PIXELS
    assert result.placeholders[result.grid].meta["role"] == Role.GRID
    output = next(n for n in nodes.values() if n.op == "output").all_input_nodes[0]
    assert result.symbols.linear(output.meta["val"].shape[0]) == (1, 0)
    assert not any("assert" in name for name in targets(result.gm))


def test_unit_is_the_square_of_the_merge_size() -> None:
    """A metadata operator with a merge size of 2 makes rows = 4 * n."""
    result = bound(lambda m, x, g: x + metadata("positions", g, '{"spatial_merge_size": 2}')[:, None])
    assert result.symbols.unit == 4
    assert result.symbols.linear(result.placeholders[result.pixels].meta["val"].shape[0]) == (4, 0)


def test_unit_from_a_division_of_the_rows() -> None:
    """A tower that divides its rows by 4 itself has rows = 4 * n without any merge size."""
    result = bound(lambda m, x, g: (x.view(x.shape[0] // 4, 32), metadata("positions", g)))
    assert result.symbols.unit == 4


def test_graph_without_metadata_is_bound_by_its_pixels() -> None:
    """No grid, no metadata: the rows are still found."""
    result = bound(lambda m, x, g: x @ m.weight)
    assert result.grid is None
    assert result.symbols.unit == 1


def test_several_users_and_chains() -> None:
    """A node with several users, and a chain of views, all carry private values."""

    def function(m, x, g):
        y = x @ m.weight
        z = y.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return y + z, y * 2, z.sum(1)

    result = bound(function)
    for node in result.gm.graph.nodes:
        if node.op != "output":
            assert "val" in node.meta


def test_refuses_an_in_place_operation() -> None:
    """In-place operations could reach across pieces."""

    def function(m, x, g):
        y = x @ m.weight
        y[:, 0] = 1
        return y

    with pytest.raises(Ineligible, match=r"\[side_effect\]"):
        bound(function)


def test_refuses_two_pixel_inputs() -> None:
    """Two float inputs with symbolic rows: nobody knows which one is padded."""
    gm = dynamo_graph(lambda m, x, g: x @ m.weight)
    pixels = next(n for n in gm.graph.nodes if n.op == "placeholder" and "pixels" in n.name)
    with gm.graph.inserting_after(pixels):
        other = gm.graph.placeholder("l_other_")
    other.meta = dict(pixels.meta)
    other.meta.pop("grapharg", None)
    with pytest.raises(Ineligible, match=r"\[pixels\] found 2 inputs with a symbolic number of rows"):
        bind_tokens(gm)


def test_refuses_static_rows() -> None:
    """A graph whose rows are constants has nothing to pad."""
    gm = dynamo_graph(lambda m, x, g: x @ m.weight)
    pixels = next(n for n in gm.graph.nodes if n.op == "placeholder" and "pixels" in n.name)
    pixels.meta["example_value"] = torch.empty(24, 8, device="meta")
    with pytest.raises(Ineligible, match=r"\[pixels\] found 0 inputs"):
        bind_tokens(gm)
