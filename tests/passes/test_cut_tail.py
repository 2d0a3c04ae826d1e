"""cut_tail: what no bucket fixes the size of runs after the body on the exact rows, bit for bit."""

from __future__ import annotations

import pytest
import torch
from graphs import Module, attend, bound, hoisted, metadata

from vitcg_backend import ops
from vitcg_backend.passes.cut_tail import cut_tail
from vitcg_backend.passes.graph import Ineligible
from vitcg_backend.passes.hoist_metadata import hoist_metadata


def item_of(grid):
    """Item of each patch, int64 [patches], and a number that nobody knows."""
    counts = grid.prod(1).tolist()
    return torch.cat([torch.full((c,), i) for i, c in enumerate(counts)]), 1 + int(grid[:, 0].max())


ops.register_function("tests.item_of", item_of)


def item_sums(m, x, g):
    """Sum of each item's rows: its number of rows is not a multiple of n."""
    h = x @ m.weight
    index, count = torch.ops.vitcg.metadata("tests.item_of", g, [], "{}")
    sums = h.new_zeros(count.shape[0], 8).index_add(0, index, h)
    return h, sums * 2, h + 1


def test_cuts_what_no_bucket_fixes() -> None:
    """The tail takes the body's rows, metadata and n; its results and the body's are put together in order."""
    taken = hoisted(item_sums)
    tail = cut_tail(taken)
    assert tail is not None
    assert [kind for kind, _ in tail.results] == ["body", "tail", "body"]
    module = Module(item_sums)
    pixels, grid = torch.randn(24, 8), torch.tensor([[1, 2, 6], [1, 2, 6]])
    with torch.no_grad():
        index, count = item_of(grid)
        assert count == 2
        numbers = torch.empty(count, 0, dtype=torch.uint8)
        values = {"index": index, "count": numbers}
        exact = [values["index"] if len(node.meta["val"].shape) == 1 else values["count"] for node in taken.metadata]
        h = pixels @ module.weight
        body = [h, h + 1, *[h] * len(tail.body)]
        args = [None] * len(taken.bound.placeholders)
        results = tail(24, args, body, exact)
        expected = torch.zeros(count, 8).index_add(0, index, h) * 2
    assert torch.equal(results[1], expected)
    assert results[0] is h


def test_unrelated_graph_has_no_tail() -> None:
    """A graph whose sizes all follow n is left as it is."""
    taken = hoisted(lambda m, x, g: x @ m.weight + metadata("positions", g)[:, None])
    before = str(taken.bound.gm.graph)
    assert cut_tail(taken) is None
    assert str(taken.bound.gm.graph) == before


def test_attention_after_it_refuses() -> None:
    """Attention over rows that no bucket fixes cannot be captured."""

    def function(m, x, g):
        index, count = torch.ops.vitcg.metadata("tests.item_of", g, [], "{}")
        sums = x.new_zeros(count.shape[0], 8).index_add(0, index, x)
        return attend(sums, metadata("boundaries", g))

    with pytest.raises(Ineligible, match="attention over rows that no bucket fixes") as refusal:
        hoist_metadata(bound(function))
    assert refusal.value.reason == "unknown_size"
