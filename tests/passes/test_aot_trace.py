"""`_torch.aot_trace`: what mutates nothing is traced once, and is the graph that AOTAutograd makes."""

from __future__ import annotations

import pytest
import torch
from graphs import attend, dynamo_graph, metadata
from torch import fx

from vitcg_backend import _torch
from vitcg_backend.passes.bind_tokens import bind_tokens
from vitcg_backend.passes.hoist_metadata import hoist_metadata
from vitcg_backend.passes.split_at_attention import split_at_attention
from vitcg_backend.passes.write_out_of_place import write_out_of_place


def structure(gm):
    """The graph without names and without the place of a size that is asked for: what is computed from what."""
    keys = {}
    for number, node in enumerate(gm.graph.nodes):
        name = number if node.op == "placeholder" else str(node.target)
        value = node.meta.get("val")
        shape = tuple(map(str, (*value.shape, *value.stride()))) if isinstance(value, torch.Tensor) else str(value)
        if node.target is torch.ops.aten.sym_size.int:
            keys[node] = shape
        else:
            keys[node] = str((node.op, name, shape, fx.map_arg((node.args, node.kwargs), lambda n: keys[n])))
    return sorted(keys[n] for n in gm.graph.nodes if n.target is not torch.ops.aten.sym_size.int)


def block(m, x, g):
    """Norm, product, attention, a product and a gate, with a position and views."""
    y = torch.nn.functional.layer_norm(x, (8,)) @ m.weight + metadata("positions", g)[:, None]
    y = attend(y, metadata("boundaries", g))
    a, b = (y @ m.second).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8).chunk(2, 1)
    return torch.cat([torch.nn.functional.gelu(a) * b, b], -1) + x


def writes(m, x, g):
    """Writes into what it has made: `write_out_of_place` puts each write into a function that still makes it."""
    return (x - m.frequencies).abs_().div_(m.frequencies) + 1


@pytest.mark.towers
@pytest.mark.parametrize(("function", "pure"), [(block, True), (writes, False)])
def test_the_graph_is_that_of_aotautograd(function, pure, monkeypatch) -> None:
    """Operations, sizes and what they assume about n, whichever way the graph was traced; nothing in it mutates."""
    taken = []
    functional = _torch._trace_functional
    monkeypatch.setattr(_torch, "_trace_functional", lambda *args: (taken.append(1), functional(*args))[1])
    program = split_at_attention(hoist_metadata(bind_tokens(write_out_of_place(dynamo_graph(function)))))
    for piece in program.pieces:
        fakes = [node.meta["val"] for node in piece.gm.graph.nodes if node.op == "placeholder"]
        gm, guards = _torch.aot_trace(piece.gm, fakes, program.symbols.mode), program.symbols.guards()
        assert bool(taken) is not pure
        assert not any(n.target._schema.is_mutable for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_torch, "_trace_pure", lambda *args: None)
            expected = _torch.aot_trace(piece.gm, fakes, program.symbols.mode)
        assert structure(gm) == structure(expected)
        assert program.symbols.guards() == guards
        taken.clear()
