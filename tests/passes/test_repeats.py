"""repeats: an operation that has run on equal inputs is taken over, and everything is as if it had run again."""

from __future__ import annotations

import importlib

import pytest
import torch
from common import IMAGE, compile_tower, run, tiny_tower
from graphs import bound, program
from torch import fx

from vitcg_backend.passes import repeats
from vitcg_backend.passes.graph import Symbols
from vitcg_backend.passes.repeats import Repeats

module = importlib.import_module("vitcg_backend.passes.bind_tokens")  # the package has the function under this name


class Everything(Repeats):
    """Runs every operation: what nodes hold without any of this."""

    def run(self, node, args, kwargs, compute):
        """The value of a node, worked out whatever has run before."""
        inputs = []
        self._key((args, kwargs), inputs)
        value = compute(args, kwargs, inputs)
        self._note_outputs(repeats._tensors(value), inputs, inputs)
        return value


def seen(value):
    """All that a pass can see of what a node holds, but for its memory."""
    if isinstance(value, torch.Tensor):
        sizes = [str(s) for s in (*value.shape, *value.stride(), value.storage_offset())]
        return type(value), value.dtype, value.device, value.layout, value.requires_grad, sizes
    if isinstance(value, (tuple, list)):
        return type(value), [seen(part) for part in value]
    return type(value), str(value)


def groups(memory):
    """Memories by their first node: equal for two ways of numbering them."""
    first = {}
    return [None if m is None else first.setdefault(m, place) for place, m in enumerate(memory)]


@pytest.mark.towers
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_nodes_hold_what_they_would_if_everything_had_run(name: str, monkeypatch) -> None:
    """Values, memories, and what was assumed about n, node by node over a tower whose layers repeat."""
    propagate, counted = module._propagate, []

    def both(gm, symbols, size, width):
        everything = Symbols.create(symbols.unit)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Repeats", Everything)
            propagate(gm, everything, size, width)
        nodes = [n for n in gm.graph.nodes if n.op != "output"]
        values, memory = [n.meta["val"] for n in nodes], [n.meta["memory"] for n in nodes]
        propagate(gm, symbols, size, width)
        assert [seen(n.meta["val"]) for n in nodes] == [seen(v) for v in values]
        assert groups(n.meta["memory"] for n in nodes) == groups(memory)
        storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
        assert groups(memory) == groups(storages)  # where everything has run, storages tell
        assert list(map(str, symbols.guards())) == list(map(str, everything.guards()))
        storages = {v.untyped_storage()._cdata for n in nodes if isinstance(v := n.meta["val"], torch.Tensor)}
        counted.append((len(storages), len({m for m in memory if m is not None})))

    monkeypatch.setattr(module, "_propagate", both)
    run(compile_tower(tiny_tower(name, depth=3)), IMAGE)
    assert counted
    assert all(storages < memories for storages, memories in counted)  # something was taken over


def test_results_of_equal_layers_share_no_memory() -> None:
    """A result is a view of another only where it is in eager, and of an argument likewise."""

    def function(m, x, g):
        a = torch.relu(x @ m.weight)
        b = torch.relu(a @ m.weight)
        return a, b, b.view(-1, 4)

    result = program(function)
    assert result.views == {2: 1}
    assert result.output_values[0].untyped_storage()._cdata == result.output_values[1].untyped_storage()._cdata


def test_a_view_of_one_of_two_equal_tensors_is_a_view_of_that_one() -> None:
    """An operation that hands on one of two tensors, the second of which was taken over, is shown two storages."""

    def function(m, x, g):
        a = torch.relu(x @ m.weight)
        b = torch.relu(a @ m.weight)
        c, d, _ = torch.broadcast_tensors(a, b, torch.zeros(2, 1, 1))
        return a, b, d[0], c[0]

    assert program(function).views == {2: 1, 3: 0}


def test_what_differs_is_run() -> None:
    """Another option, another number, another tensor in the second place: none of them is a repetition."""

    def function(m, x, g):
        y = x @ m.weight
        return y.sum(1), y.sum(0), y[:, :4], y[:, :5], y + y, y + m.frequencies, (y * 2).view(-1, 4), (y * 2).view(-1, 2)

    output = next(n for n in bound(function).gm.graph.nodes if n.op == "output")
    assert [tuple(map(str, n.meta["val"].shape)) for n in output.args[0]] == [
        *((rows,) for rows in ("s60", "8")),
        *(("s60", columns) for columns in ("4", "5", "8", "8")),
        *((rows, columns) for rows, columns in (("2*s60", "4"), ("4*s60", "2"))),
    ]


def test_an_unknown_size_and_a_known_value_are_never_taken_over() -> None:
    """Each run of an operation whose size nobody knows has a size of its own; a fake that knows its value is like no other."""
    symbols, graph, found = Symbols.create(1), fx.Graph(), Repeats()

    def call(target, *args):
        return found.run(graph.call_function(target), args, {}, lambda args, kwargs, tensors: target(*args, **kwargs))

    with symbols.mode, symbols.shape_env.ignore_fresh_unbacked_symbols():
        x, y = found.add(torch.empty(4)), found.add(torch.empty(4))
        assert call(torch.sin, x).untyped_storage()._cdata == call(torch.sin, y).untyped_storage()._cdata
        assert call(torch.nonzero, x).shape[0].node.expr != call(torch.nonzero, y).shape[0].node.expr
        two, three = call(torch.tensor, 2), call(torch.tensor, 3)
        assert (call(torch.neg, two).item(), call(torch.neg, three).item()) == (-2, -3)
