"""prove_padding against an oracle: random bodies of known and poisonous operations; what is accepted must keep its rows."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from vitcg_backend import _torch
from vitcg_backend.passes.graph import Ineligible, Symbols
from vitcg_backend.passes.prove_padding import prove_padding

# More in a night than in a run of all tests: VITCG_FUZZ=5000.
EXAMPLES = int(os.environ.get("VITCG_FUZZ", "60"))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

Operation = Callable[[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]], Tensor]
"""Takes rows, a weight, and metadata: a permutation that keeps to real rows, one that does not, and places in a table."""

SAFE: dict[str, Operation] = {
    "linear": lambda x, w, m: F.linear(x, w, w[0]),
    "matmul": lambda x, w, m: x @ w,
    "gelu": lambda x, w, m: F.gelu(x, approximate="tanh"),
    "silu": lambda x, w, m: F.silu(x) * x,
    "layer norm": lambda x, w, m: F.layer_norm(x, (8,), w[0], w[1]),
    "softmax of channels": lambda x, w, m: x.softmax(-1),
    "mean of channels": lambda x, w, m: x - x.mean(-1, keepdim=True),
    "heads": lambda x, w, m: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "halves": lambda x, w, m: torch.cat([-x[:, 4:], x[:, :4]], -1),
    "blocks": lambda x, w, m: x.reshape(-1, 32).tanh().reshape(-1, 8),
    "outer": lambda x, w, m: torch.bmm(x.view(-1, 2, 4), x.view(-1, 4, 2)).flatten(1).repeat(1, 2),
    "clamp": lambda x, w, m: x.clamp(-1, 1),
    "where": lambda x, w, m: torch.where(x > 0, x, x * 0.1),
    "flip of channels": lambda x, w, m: x.flip(-1),
    "gather": lambda x, w, m: x[m[0]],
    "index_select": lambda x, w, m: x.index_select(0, m[0]),
    "embedding": lambda x, w, m: F.embedding(m[2], w),
    "rows of a table": lambda x, w, m: w[m[2]] * x,
    "rotary": lambda x, w, m: x * m[2][:, None].cos(),
}
POISON: dict[str, Operation] = {
    "mean of tokens": lambda x, w, m: x - x.mean(0),
    "max of tokens": lambda x, w, m: x - x.amax(0, keepdim=True),
    "softmax of tokens": lambda x, w, m: x.softmax(0),
    "batch norm": lambda x, w, m: F.batch_norm(x, None, None, training=True),
    "roll": lambda x, w, m: x.roll(1, 0),
    "flip": lambda x, w, m: x.flip(0),
    "sort": lambda x, w, m: x.sort(0)[0],
    "cumsum": lambda x, w, m: x.cumsum(0),
    "reversed cumsum": lambda x, w, m: x.flip(0).cumsum(0).flip(0),
    "gram": lambda x, w, m: (x @ x.t()) @ x,
    "covariance": lambda x, w, m: x @ (x.t() @ x),
    "norm of all": lambda x, w, m: x / x.norm(),
    "count": lambda x, w, m: x / x.shape[0],
    "transposed": lambda x, w, m: x.t().reshape(-1, 8),
    "last row": lambda x, w, m: x + x[-1:],
    "open gather": lambda x, w, m: x[m[1]],
    "open index_select": lambda x, w, m: x.index_select(0, m[1]),
    "embedding of rows": lambda x, w, m: F.embedding(m[1], x),
    "gather by rows": lambda x, w, m: x[x[:, 0].argsort()],
    "sum of metadata": lambda x, w, m: x + m[2].sum(),
    "cumsum of metadata": lambda x, w, m: x + m[2].flip(0).cumsum(0).flip(0)[:, None],
    "norm of tokens": lambda x, w, m: x / x.norm(dim=0),
    "written last row": lambda x, w, m: x.index_fill(0, torch.tensor([x.shape[0] - 1]), 0.0),
    "largest": lambda x, w, m: x - x.max(),
    "halves of rows": lambda x, w, m: x.view(2, -1, 8).transpose(0, 1).reshape(-1, 8),
}
OPERATIONS = {**SAFE, **POISON}


def body(names: list[str]) -> Operation:
    """The operations one after another, each also added to its input."""

    def run(x: Tensor, w: Tensor, m: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        for name in names:
            x = x + OPERATIONS[name](x, w, m)
        return x

    return run


def metadata(real: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a prologue makes for `rows` rows of which `real` are real."""
    closed = torch.cat([torch.arange(real).flip(0), torch.arange(real, rows).flip(0)])
    return closed, torch.arange(rows).flip(0), torch.arange(rows) % 8


def is_proved(names: list[str]) -> bool:
    """The verdict on a body, traced with rows = 4 * n: the proof's, and that of the check which it leaves to the runtime."""
    symbols = Symbols.create(4)
    gm = fx.GraphModule({}, fx.Graph())
    n, x, w, *m = (gm.graph.placeholder(name) for name in ("n", "x", "w", "closed", "open", "places"))
    gm.graph.output((gm.graph.call_function(body(names), (x, w, tuple(m))),))
    gm.recompile()
    del n
    with symbols.mode:
        rows = symbols.n * 4
        fakes = [symbols.n, torch.empty(rows, 8), torch.empty(8, 8), *(torch.empty(rows, dtype=torch.int64) for _ in m)]
    try:
        proof = prove_padding(_torch.aot_trace(gm, fakes, symbols.mode), symbols)
    except Ineligible:
        return False
    given = dict(zip((3, 4, 5), metadata(12, 32), strict=True))
    if not proof.lookups <= set(given):
        return False
    for gather in proof.gathers:
        index, real = given[gather.index], 12 // 4 * gather.index_rows
        limit = 12 // 4 * gather.source_rows
        if not bool((index[:real] < limit).all() & (index[real:] >= limit).all()):
            return False
    return not symbols.guards()


def keeps_rows(names: list[str]) -> bool:
    """The oracle: real rows are the same alone, beside a tail, and beside another tail of another length."""
    run = body(names)
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(12, 8, generator=generator)
    alone = run(real, WEIGHT, metadata(12, 12))
    for rows in (4, 20):
        tail = 3 * torch.randn(rows, 8, generator=generator)
        beside = run(torch.cat([real, tail]), WEIGHT, metadata(12, 12 + rows))[:12]
        if not torch.allclose(beside, alone, rtol=1e-3, atol=1e-3):
            return False
    return True


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.lists(st.sampled_from(sorted(SAFE)), min_size=1, max_size=5),
        st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    )
)
def test_no_false_accept(names: list[str]) -> None:
    """A body that the proof accepts keeps its rows; bodies of safe operations alone are accepted."""
    proved = is_proved(names)
    event("accepted" if proved else "refused")
    if proved:
        assert keeps_rows(names), names
    elif all(name in SAFE for name in names):
        raise AssertionError(f"refused although it keeps its rows: {names}")


def test_the_oracle_sees_every_poison() -> None:
    """Each poison changes real rows by itself, except sums that run forward, which the proof refuses all the same."""
    unseen = {name for name in POISON if keeps_rows([name])}
    assert unseen <= {"cumsum", "roll"}
    assert not any(is_proved([name]) for name in POISON)
