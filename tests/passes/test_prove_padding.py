"""prove_padding: what keeps rows apart is proved, what may mix them is refused with the operation's name; none by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Module, aten_pieces, hoisted, metadata

from vitcg_backend import _torch
from vitcg_backend.passes.graph import Ineligible, Symbols
from vitcg_backend.passes.prove_padding import Gather, prove_padding, prove_prologue

Function = Callable[..., Any]


def _indexed(m, x, g):
    return x[metadata("positions", g)] @ m.weight


SAFE: dict[str, Function] = {
    "linear and relu": lambda m, x, g: F.linear(x, m.weight, m.weight[0]).relu(),
    "residual": lambda m, x, g: x + (x @ m.weight) * 2,
    "layer norm": lambda m, x, g: F.layer_norm(x, (8,), m.weight[0], m.weight[1]),
    "rms norm": lambda m, x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax over channels": lambda m, x, g: x.softmax(-1),
    "heads and back": lambda m, x, g: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) @ m.weight,
    "chunk and cat of channels": lambda m, x, g: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
    "unbind of channels": lambda m, x, g: sum((x @ m.weight).reshape(-1, 2, 4).permute(1, 0, 2).unbind(0)),
    "rotary": lambda m, x, g: x * (metadata("positions", g)[:, None] * m.frequencies).cos(),
    "table lookup": lambda m, x, g: x + F.embedding(metadata("positions", g) % 8, m.weight),
    "patch convolution": lambda m, x, g: F.conv2d(x.view(-1, 2, 2, 2), m.weight.view(8, 2, 2, 2)).view(-1, 8),
    "per-row product": lambda m, x, g: torch.bmm(x.view(-1, 2, 4), x.view(-1, 2, 4).transpose(1, 2)).flatten(1),
    "gelu and silu": lambda m, x, g: F.gelu(x, approximate="tanh") * F.silu(x),
    "constants": lambda m, x, g: x + torch.ones(x.shape[0], 8),
    "first row as a result": lambda m, x, g: (x @ m.weight)[0],
    "row numbers": lambda m, x, g: x * torch.arange(x.shape[0])[:, None],
    "flip of channels": lambda m, x, g: x.flip(-1),
    "side by side": lambda m, x, g: (
        F.conv2d(
            x.reshape(1, -1, 8).transpose(1, 2)[..., None].repeat(1, 1, 1, 2).flatten(2)[:, :, None],
            m.weight[:, :, None, None].repeat(1, 1, 1, 2),
            stride=(1, 2),
        )
        .flatten(2)[0]
        .t()
    ),
    "bags": lambda m, x, g: (
        x
        + F.embedding_bag(
            metadata("positions", g)[:, None].repeat(1, 3) % 8,
            m.weight,
            mode="sum",
            per_sample_weights=metadata("positions", g)[:, None].repeat(1, 3).float(),
        )
    ),
    "repeated table": lambda m, x, g: x + m.weight[:1].repeat(x.shape[0], 1),
    "buckets of values": lambda m, x, g: torch.bucketize(x, m.frequencies) + x,
    "any and all channels": lambda m, x, g: x * (x > 0).any(-1, keepdim=True) * (x < 9).all(-1, keepdim=True),
    "largest channel": lambda m, x, g: x + x.argmax(-1, keepdim=True),
    "product with a bias": lambda m, x, g: torch.baddbmm(
        x.view(-1, 2, 4)[:, :, :2], x.view(-1, 2, 4), x.view(-1, 2, 4).transpose(1, 2)
    ).flatten(1),
    "resampled table": lambda m, x, g: x @ F.interpolate(m.weight[None, None], size=(8, 8), mode="bilinear")[0, 0],
}

UNSAFE: dict[str, tuple[Function, str]] = {
    "mean over tokens": (lambda m, x, g: x - x.mean(0), "reduces the token axis"),
    "mean over everything": (lambda m, x, g: x - x.mean(), "aten.mean.default has no rule"),
    "max over tokens": (lambda m, x, g: x - x.amax(0), "reduces the token axis"),
    "softmax over tokens": (lambda m, x, g: x.softmax(0), "softmax over the token axis"),
    "flip": (lambda m, x, g: x.flip(0), "reverses the token axis"),
    "roll": (lambda m, x, g: x.roll(1, 0), "has no rule|token axis"),
    "cumsum": (lambda m, x, g: x.cumsum(0), "cumsum.default has no rule"),
    "sort": (lambda m, x, g: x.sort(0)[0], "sort.+has no rule"),
    "gram matrix": (lambda m, x, g: (x @ x.t()).sum(-1, keepdim=True) * x, "contracts the token axis|token axes"),
    "context": (lambda m, x, g: x @ (x.t() @ x), "contracts the token axis"),
    "shift": (lambda m, x, g: torch.cat([x[1:], x[:1]]), "slices the token axis|is not a multiple of n"),
    "first row": (lambda m, x, g: x + x[0:1], "slices the token axis"),
    "select a row": (lambda m, x, g: x + x[0], "selects along the token axis"),
    "last row as a result": (lambda m, x, g: x[-1], "selects along the token axis"),
    "second row as a result": (lambda m, x, g: x[1], "selects along the token axis"),
    "range from the count": (lambda m, x, g: x * torch.arange(x.shape[0], 0, -1)[:, None], "tokens as a value"),
    "convolution over rows": (
        lambda m, x, g: F.conv1d(x.t()[None], m.weight[:, :, None].repeat(1, 1, 3), padding=1)[0].t(),
        "convolves over the token axis",
    ),
    "uneven bags": (
        lambda m, x, g: x + F.embedding_bag(metadata("positions", g) % 8, m.weight, metadata("positions", g), mode="sum"),
        "bags that are not equally long",
    ),
    "bags of a table of rows": (
        lambda m, x, g: F.embedding_bag(metadata("positions", g)[:, None], x, mode="sum"),
        "carries tokens",
    ),
    "reversed gather": (lambda m, x, g: x[torch.arange(x.shape[0] - 1, -1, -1)], "tokens as a value"),
    "gather by pixels": (lambda m, x, g: x[x[:, 0].long() % 4], "did not make"),
    "batch norm in training": (lambda m, x, g: F.batch_norm(x, None, None, training=True), "reduces|has no rule"),
    "count as a value": (lambda m, x, g: x / x.shape[0], "uses the number of tokens as a value"),
    "count filled in": (
        lambda m, x, g: x + torch.full((), x.shape[0], dtype=torch.float32),
        "tokens as a value|has no rule",
    ),
    "halves swapped": (
        lambda m, x, g: x.reshape(2, -1, 8).transpose(0, 1).reshape(-1, 8),
        "outside of the token axis|regroups|is not a multiple of n",
    ),
    "count in a float": (lambda m, x, g: x * (1.0 / x.numel()), "symbolic size as a value"),
    "count in an argument": (lambda m, x, g: torch.add(x, x, alpha=1.0 / x.shape[0]), "symbolic size as a value"),
    "count in an epsilon": (lambda m, x, g: F.layer_norm(x, (8,), eps=1.0 / x.shape[0]), "as a value"),
    "strided over rows": (lambda m, x, g: x.as_strided((x.shape[0], 8), (8, 1)).sin(), "as_strided.default has no rule"),
    "scattered rows": (lambda m, x, g: torch.zeros_like(x).index_add(0, metadata("positions", g), x), "has no rule"),
    "windows of rows": (lambda m, x, g: x.unfold(0, 4, 4).sum(-1), "has no rule|not a multiple|token axis"),
    "largest rows": (lambda m, x, g: x.topk(4, dim=0)[0] @ m.weight, "topk.default has no rule"),
    "layer norm over tokens": (lambda m, x, g: F.layer_norm(x.t(), (x.shape[0],)).t(), "over the token axis|reduces"),
    "group norm": (lambda m, x, g: F.group_norm(x.t()[None], 2)[0].t(), "outside of the token axis|has no rule|regroups"),
    "masked sum": (lambda m, x, g: x + torch.where(x > 0, x, 0).sum(0), "reduces the token axis"),
    "last row everywhere": (lambda m, x, g: x + x[-1:].expand(x.shape[0], 8), "slices the token axis"),
    "convolution over tokens": (
        lambda m, x, g: F.conv1d(x.t()[None], m.weight[:, :, None].expand(8, 8, 3), padding=1)[0].t(),
        "convolves over the token axis",
    ),
    "any row": (lambda m, x, g: x * (x > 0).any(0), "reduces the token axis"),
    "largest row": (lambda m, x, g: x + x.argmax(0), "reduces the token axis"),
    "buckets of rows": (lambda m, x, g: torch.bucketize(m.weight, x.flatten()) @ x.t(), "boundaries carry tokens|token axes"),
    "row above row": (lambda m, x, g: x.repeat(2, 1)[: x.shape[0]], "repeats the token axis|slices"),
    "product over tokens": (
        lambda m, x, g: x @ torch.baddbmm(m.weight[None], x.t()[None], x[None])[0],
        "contracts|aligned|token axis",
    ),
    "sorted by pixels": (lambda m, x, g: x[x[:, 0].argsort()], "has no rule|did not make"),
    "transposed view": (lambda m, x, g: x.t().reshape(-1, 8), "regroups|outside|token axis"),
}


def prove(function: Function) -> Any:
    refusal = prove_prologue(hoisted(function))
    if refusal is not None:
        raise refusal
    torch._dynamo.reset()
    pieces, symbols = aten_pieces(function)
    return [prove_padding(piece, symbols) for piece in pieces]


@pytest.mark.parametrize("name", SAFE)
def test_accepts(name: str) -> None:
    """Bodies that keep their rows are proved, and a numeric oracle agrees."""
    proofs = prove(SAFE[name])
    assert proofs
    assert proofs[0].gathers == []
    assert not mixes_rows(SAFE[name])


@pytest.mark.parametrize("name", UNSAFE)
def test_refuses(name: str) -> None:
    """Bodies that mix rows are refused, with the operation, the reason and where a rule would go."""
    function, why = UNSAFE[name]
    with pytest.raises(Ineligible, match=why) as refusal:
        prove(function)
    assert refusal.value.reason in ("unproved", "odd_rows")


def test_message_names_operation_line_and_remedy() -> None:
    """The text of a refusal stands alone."""
    with pytest.raises(Ineligible) as refusal:
        prove(lambda m, x, g: x.cumsum(0))
    text = str(refusal.value)
    assert "aten.cumsum.default has no rule" in text
    assert "x.cumsum(0)" in text
    assert "a rule goes to passes/row_rules.py" in text


def test_gather_by_metadata_is_an_obligation() -> None:
    """A gather along the rows by metadata is accepted under a check of each layout."""
    (proof,) = prove(_indexed)
    (gather,) = proof.gathers
    assert isinstance(gather, Gather)
    assert (gather.index_rows, gather.source_rows) == (1, 1)


def test_gather_beside_another_index() -> None:
    """Row by row, from columns that are the same for all rows: the same obligation; one column a row is refused."""
    (proof,) = prove(lambda m, x, g: x[metadata("positions", g)[:, None, None], torch.arange(8)])
    assert [(gather.index_rows, gather.source_rows) for gather in proof.gathers] == [(1, 1)]
    with pytest.raises(Ineligible, match="not one entry a row"):
        prove(lambda m, x, g: x[metadata("positions", g), metadata("positions", g) % 8])


def test_a_table_is_looked_up_by_metadata_alone() -> None:
    """An index that a padded row's own values make could point anywhere: it is named as an input that must be metadata."""
    lookups = {
        "embedding": lambda m, x, g: F.embedding(x[:, 0].long() % 8, m.weight),
        "index": lambda m, x, g: m.weight[(x[:, 0] * 2).long() % 8],
    }
    for function in lookups.values():
        torch._dynamo.reset()
        (proof,) = prove(function)
        assert len(proof.lookups) == 1
    torch._dynamo.reset()
    (proof,) = prove(lambda m, x, g: x @ m.weight)
    assert proof.lookups == set()


def test_what_a_trace_decided_by_the_number_of_tokens_is_kept() -> None:
    """A branch on the size inside of a piece is a decision that a bucket and its call must share; a pinned size is refused."""
    symbols = Symbols.create(4)
    for size in (lambda n: 1.0 if n > 40 else 2.0, lambda n: float(n)):
        gm = torch.fx.GraphModule({}, torch.fx.Graph())
        n, x = gm.graph.placeholder("n"), gm.graph.placeholder("x")
        gm.graph.output((gm.graph.call_function(lambda x, size=size: x * size(x.shape[0]), (x,)),))
        gm.recompile()
        del n
        with symbols.mode:
            fakes = [symbols.n, torch.empty(symbols.n * 4, 8)]
        aten = _torch.aot_trace(gm, fakes, symbols.mode)
        if size(50) == 1.0:
            (decision,) = prove_padding(aten, symbols).decisions
            assert [decision.subs(symbols.symbol, count) == True for count in (10, 11)] == [False, True]  # noqa: E712
        else:
            with pytest.raises(Ineligible, match="made the number of tokens a constant"):
                prove_padding(aten, symbols)


def test_several_users_and_nested_chain() -> None:
    """One refused operation is found among many users and behind a chain of safe ones."""

    def function(m, x, g):
        y = x @ m.weight
        a, b = y.relu(), y.view(-1, 2, 4).sum(1)
        return a, b, (a * 2).view(-1, 8).cumsum(0)

    with pytest.raises(Ineligible, match="cumsum"):
        prove(function)


def mixes_rows(function: Function) -> bool:
    """Oracle: perturb the last item's rows and see whether a row of the first changes."""
    module = Module(function)
    grid = torch.tensor([[1, 2, 4], [1, 2, 4]])
    pixels = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    other = pixels.clone()
    other[8:] += 3
    with torch.no_grad():
        a, b = module(pixels, grid), module(other, grid)
    return not torch.equal(a[:8], b[:8])


def test_the_oracle_sees_mixing() -> None:
    """The oracle that the accepted bodies pass is one that mixing bodies fail."""
    assert mixes_rows(UNSAFE["mean over tokens"][0])
    assert mixes_rows(UNSAFE["cumsum"][0]) is False  # an earlier row does not see a later one: the proof is stricter
    assert mixes_rows(UNSAFE["flip"][0])
