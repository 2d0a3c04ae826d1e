"""take_out_crops: images are cropped in front of the graph, which begins at their patches; others stay as they are."""

from __future__ import annotations

import pytest
import torch
from graphs import Module, targets

from vitcg_backend import _torch
from vitcg_backend.crops import crops
from vitcg_backend.passes.bind_tokens import bind_tokens
from vitcg_backend.passes.graph import Ineligible, where
from vitcg_backend.passes.take_out_crops import take_out_crops

CALL = torch.arange(2 * 2 * 6 * 4.0).view(2, 2, 6, 4), torch.tensor([[4, 4], [6, 2]])


def cropped(m, x, g):
    patches, grid = crops(x, g, 2)
    return patches.flatten(1) @ m.weight, grid.sum(1)


def twice(m, x, g):
    return crops(x, g, 2)[0].flatten(1) @ m.weight + crops(x, g, 2)[0].flatten(1)


def graph_of(function):
    """The graph that Dynamo hands over, with sizes of images that nobody knows."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    pixels, sizes = (t.clone() for t in CALL)
    _torch.mark_padded_images(pixels)
    _torch.mark_rows(sizes, 0, unbacked=True)
    with torch.no_grad():
        torch.compile(Module(function), backend=backend, fullgraph=True)(pixels, sizes)
    torch._dynamo.reset()
    return graphs[0]


def given(gm, module):
    """Arguments of the graph before the pass."""
    known = {"pixels": CALL[0], "grid": CALL[1], "weight": module.weight}
    nodes = where(gm.graph.nodes, "placeholder")
    return [next((v for name, v in known.items() if name in n.name), 0) for n in nodes]


def test_begins_at_the_patches() -> None:
    """The crops are gone from the graph, what it returns is what the function does, and its rows are one private symbol."""
    gm, module = graph_of(cropped), Module(cropped)
    arguments = given(gm, module)
    taken = take_out_crops(gm)
    assert not [t for t in targets(gm) if "crops" in t]
    assert [n.name.partition("_")[0] for n in where(gm.graph.nodes, "placeholder")][-3:] == ["patches", "grid", "rows"]
    filled = taken(arguments)
    assert filled[-1] == 4 + 3
    assert filled[-2].tolist() == [[1, 2, 2], [1, 3, 1]]
    # Image by image, row by row, the channels of a patch first.
    first = CALL[0][0, :, :2, 2:4]
    assert torch.equal(filled[-3][1], first)
    assert torch.equal(filled[-3][4], CALL[0][1, :, :2, :2])
    with torch.no_grad():
        rows, sums = gm(*filled)
        expected = module(*CALL)[0]
    assert torch.equal(rows, expected)
    assert sums.tolist() == [5, 5]


def test_what_the_graph_does_not_read_is_no_number_of_it() -> None:
    """Images and sizes stay in their places as 0, and no later call is turned away for another number there."""
    gm, module = graph_of(lambda m, x, g: crops(x, g, 2)[0].flatten(1) @ m.weight), Module(cropped)
    arguments = given(gm, module)
    taken = take_out_crops(gm)
    filled = taken(arguments)
    unread = [filled[i] for i in taken.unread]
    assert unread == [0] * len(unread)
    assert len(unread) >= 2
    bound = bind_tokens(gm, filled)
    assert bound.numbers == []
    assert bound.placeholders[bound.pixels].name.startswith("patches")
    assert bound.symbols.unit == 1


def test_graph_without_crops_is_untouched() -> None:
    """It has nothing in front of it."""
    gm = graph_of(lambda m, x, g: x.flatten(1).sum() * m.weight)
    before = str(gm.graph)
    assert take_out_crops(gm) is None
    assert str(gm.graph) == before


def test_several_crops_refuse() -> None:
    """Rows are those of one batch of images."""
    with pytest.raises(Ineligible, match="crops 2 batches of images") as refusal:
        take_out_crops(graph_of(twice))
    assert refusal.value.reason == "crops"


def test_weights_in_front_refuse() -> None:
    """What a tower owns may be left out of a call's arguments, so nothing in front may need it."""
    with pytest.raises(Ineligible, match="which the tower owns, reaches its images"):
        take_out_crops(graph_of(lambda m, x, g: crops(x * m.frequencies[:4], g, 2)[0].flatten(1) @ m.weight))
