"""split_at_attention: cuts at attention, shares equal pieces, computes the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from graphs import Module, attend, hoisted, metadata, program, targets

from vitcg_backend import _torch, passes
from vitcg_backend.debug import Dump
from vitcg_backend.options import Options
from vitcg_backend.passes import PieceCache, _compile_piece
from vitcg_backend.passes.graph import Ineligible
from vitcg_backend.passes.program import AttentionStep, PieceStep
from vitcg_backend.passes.prove_padding import Proof
from vitcg_backend.passes.split_at_attention import split_at_attention


def layers(m, x, g):
    cu = metadata("boundaries", g)
    for _ in range(4):
        x = x + attend(x @ m.weight, cu).relu() @ m.second
    return x


def test_cuts_at_attention_and_shares_equal_pieces() -> None:
    """Four equal layers are five calls of three pieces: first, middle, last."""
    result = program(layers)
    kinds = ["A" if isinstance(s, AttentionStep) else s.piece for s in result.steps]
    assert kinds == [0, "A", 1, "A", 1, "A", 1, "A", 2]
    assert [p.uses for p in result.pieces] == [1, 3, 1]
    assert all("varlen" not in name for p in result.pieces for name in targets(p.gm))


def deepstack(m, x, g):
    """Layers whose values between are results, too, some by way of a layer of their own, one without."""
    cu = metadata("boundaries", g)
    results = [x @ m.second]
    for number in range(3):
        x = x + attend(x @ m.weight, cu).relu() @ m.second
        if number != 1:
            results.append(F.linear(F.linear(x.sin(), m.weight), m.second))
        else:
            results.append(x.sin())
    return x @ m.weight, *results


def test_what_no_later_piece_reads_is_a_piece_of_its_own() -> None:
    """If it multiplies matrices, and the level has anything else; it is shared and computes the same as everything."""
    result = program(deepstack)
    kinds = ["A" if isinstance(s, AttentionStep) else (s.piece, s.aside) for s in result.steps]
    assert kinds == [(0, False), "A", (1, False), (2, True), "A", (3, False), "A", (4, False)]
    read = [slot for step in result.steps if isinstance(step, PieceStep) and not step.aside for slot in step.inputs]
    (aside,) = (step for step in result.steps if isinstance(step, PieceStep) and step.aside)
    assert set(aside.outputs).isdisjoint(read)
    assert {("slot", slot) for slot in aside.outputs} <= set(result.outputs)
    assert not set(aside.outputs) & {slot for step in result.steps for slot in step.free}
    computed(deepstack)


def chunked(m, x, g):
    """Of one tuple, a tensor goes on and the other leads to a result alone."""
    cu = metadata("boundaries", g)
    x = x + attend(x @ m.weight, cu).relu() @ m.second
    one, other = x.chunk(2, -1)
    result = F.linear(F.linear(torch.cat([other, other], -1).sin(), m.weight), m.second)
    x = torch.cat([one, one], -1)
    return x + attend(x @ m.weight, cu).relu() @ m.second, result


def test_no_tuple_is_cut() -> None:
    """What takes a tensor out of a tuple stays with it; what reads that tensor is a piece of its own all the same."""
    assert [s.aside for s in program(chunked).steps if isinstance(s, PieceStep)] == [False, False, True, False]
    computed(chunked)


def computed(function) -> None:
    """The program's steps in order give the module's results, bit for bit."""
    module, grid, pixels = Module(function), torch.tensor([[1, 2, 3], [2, 2, 2]]), torch.randn(14, 8)
    cu = torch.tensor([0, 6, 14], dtype=torch.int32)
    graph = hoisted(function)
    result = split_at_attention(graph)
    inputs = {"pixels": pixels, "weight": module.weight, "second": module.second}
    slots: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        expected = module(pixels, grid)
        for slot, position in result.arguments:
            name = graph.bound.placeholders[position].name
            slots[slot] = next(tensor for key, tensor in inputs.items() if key in name)
        for step in result.steps:
            if isinstance(step, PieceStep):
                outputs = result.pieces[step.piece].gm(14, *[slots[i] for i in step.inputs])
                slots.update(zip(step.outputs, outputs, strict=True))
            else:
                q, k, v = slots[step.query], slots[step.key], slots[step.value]
                slots[step.output] = torch.ops.vitcg.varlen_attention(q, k, v, cu, step.scale)
            for slot in step.free:
                del slots[slot]
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(expected) == len(result.outputs)
    for (_, slot), tensor in zip(result.outputs, expected, strict=True):
        assert torch.equal(slots[slot], tensor)


def test_the_program_computes_what_the_graph_computed() -> None:
    """Pieces and attention called in order are bit-equal to the module."""
    computed(layers)


def test_unrelated_graph_is_one_piece() -> None:
    """Without attention the body is one piece with the same operations."""
    result = program(lambda m, x, g: (x @ m.weight).relu())
    assert len(result.steps) == 1
    assert targets(result.pieces[0].gm) == ["matmul", "relu"]


def test_a_value_with_several_users_in_several_pieces() -> None:
    """A tensor that later pieces read stays alive until the last of them."""

    def function(m, x, g):
        cu = metadata("boundaries", g)
        first = x @ m.weight
        y = attend(first, cu)
        z = attend(y.relu(), cu)
        return z + first, first

    result = program(function)
    first = result.outputs[1][1]
    assert not any(first in step.free for step in result.steps)


def test_nested_levels() -> None:
    """An attention whose query is an earlier attention's result comes after it, whatever the order of the code."""

    def function(m, x, g):
        cu = metadata("boundaries", g)
        a = attend(x @ m.weight, cu)
        b = attend(attend(a @ m.weight, cu) @ m.second, cu)
        return a + b

    steps = [type(s).__name__ for s in program(function).steps]
    assert steps.count("AttentionStep") == 3
    assert steps[-1] == "PieceStep"


def test_sizes_are_emitted_from_n_alone() -> None:
    """A piece takes one size, its first input, and every other is a multiple of it."""

    def function(m, x, g):
        y = x * metadata("positions", g, '{"spatial_merge_size": 2}')[:, None]
        return (y.reshape(x.shape[0] // 4, 4, 8).sum(1), y.reshape(x.shape[0], 2, 4))

    piece = program(function).pieces[0].gm
    placeholders = [n for n in piece.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders if not isinstance(n.meta["val"], torch.Tensor)] == ["n"]


def test_refuses_segments_that_pixels_decide() -> None:
    """cu_seqlens that depend on pixel values cannot be laid out before the body runs."""

    def function(m, x, g):
        return attend(x, x.sum(0).int())

    with pytest.raises(Ineligible, match=r"\[segments\]"):
        split_at_attention(hoisted(function))


def test_the_constants_of_a_known_piece_stay() -> None:
    """A key knows a constant by its address: while the key is kept, no other constant may come to lie there."""
    cache, number = PieceCache(), 0
    result = program(lambda m, x, g: x @ m.weight)
    piece = result.pieces[0]
    first = next(n for n in piece.gm.graph.nodes if n.op != "placeholder")
    piece.gm.register_buffer("constant", torch.ones(8))
    with piece.gm.graph.inserting_before(first):
        constant = piece.gm.graph.get_attr("constant")
        constant.meta["val"] = result.symbols.mode.from_tensor(piece.gm.constant)
    first.append(piece.gm.graph.call_function(torch.sin, (constant,)))
    kept = weakref.ref(piece.gm.constant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "aot_trace", lambda gm, *rest: gm)
        patch.setattr(_torch, "compile_piece", lambda *rest: print)
        patch.setattr(passes, "prove_padding", lambda *rest: Proof())
        _compile_piece(piece, result, number, options=Options(), cache=cache, dump=Dump(None))
    del piece, result, constant, first
    gc.collect()
    assert kept() is not None
    cache.pieces.clear()
    gc.collect()
    assert kept() is None
