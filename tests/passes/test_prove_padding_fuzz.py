"""prove_padding against an oracle: random bodies of known and poisonous operations; what is accepted must keep its rows."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from vitcg_backend import _torch
from vitcg_backend.passes.graph import Ineligible, Symbols
from vitcg_backend.passes.prove_padding import prove_padding

# More in a night than in a run of all tests: VITCG_FUZZ=5000.
EXAMPLES = int(os.environ.get("VITCG_FUZZ", "120"))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

Operation = Callable[[Tensor, Tensor], Tensor]

SAFE: dict[str, Operation] = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "matmul": lambda x, w: x @ w,
    "gelu": lambda x, w: F.gelu(x, approximate="tanh"),
    "silu": lambda x, w: F.silu(x) * x,
    "layer norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "softmax of channels": lambda x, w: x.softmax(-1),
    "mean of channels": lambda x, w: x - x.mean(-1, keepdim=True),
    "heads": lambda x, w: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "halves": lambda x, w: torch.cat([-x[:, 4:], x[:, :4]], -1),
    "blocks": lambda x, w: x.reshape(-1, 32).tanh().reshape(-1, 8),
    "outer": lambda x, w: torch.bmm(x.view(-1, 2, 4), x.view(-1, 4, 2)).flatten(1).repeat(1, 2),
    "clamp": lambda x, w: x.clamp(-1, 1),
    "where": lambda x, w: torch.where(x > 0, x, x * 0.1),
}
POISON: dict[str, Operation] = {
    "mean of tokens": lambda x, w: x - x.mean(0),
    "max of tokens": lambda x, w: x - x.amax(0, keepdim=True),
    "softmax of tokens": lambda x, w: x.softmax(0),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "roll": lambda x, w: x.roll(1, 0),
    "flip": lambda x, w: x.flip(0),
    "sort": lambda x, w: x.sort(0)[0],
    "cumsum": lambda x, w: x.cumsum(0),
    "reversed cumsum": lambda x, w: x.flip(0).cumsum(0).flip(0),
    "gram": lambda x, w: (x @ x.t()) @ x,
    "covariance": lambda x, w: x @ (x.t() @ x),
    "norm of all": lambda x, w: x / x.norm(),
    "count": lambda x, w: x / x.shape[0],
    "transposed": lambda x, w: x.t().reshape(-1, 8),
    "last row": lambda x, w: x + x[-1:],
    "halves of rows": lambda x, w: x.view(2, -1, 8).transpose(0, 1).reshape(-1, 8),
}
OPERATIONS = {**SAFE, **POISON}


def body(names: list[str]) -> Operation:
    """The operations one after another, each also added to its input."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        for name in names:
            x = x + OPERATIONS[name](x, w)
        return x

    return run


def is_proved(names: list[str]) -> bool:
    """The proof's verdict on a body, traced with rows = 4 * n."""
    symbols = Symbols.create(4)
    gm = fx.GraphModule({}, fx.Graph())
    n, x, w = (gm.graph.placeholder(name) for name in ("n", "x", "w"))
    call = gm.graph.call_function(body(names), (x, w))
    gm.graph.output((call,))
    gm.recompile()
    del n
    with symbols.mode:
        fakes = [symbols.n, torch.empty(symbols.n * 4, 8), torch.empty(8, 8)]
    try:
        prove_padding(_torch.aot_trace(gm, fakes, symbols.mode), symbols)
    except Ineligible:
        return False
    return not symbols.guards()


def keeps_rows(names: list[str]) -> bool:
    """The oracle: real rows are the same alone, beside a tail, and beside another tail of another length."""
    run = body(names)
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(12, 8, generator=generator)
    alone = run(real, WEIGHT)
    for rows in (4, 20):
        tail = 3 * torch.randn(rows, 8, generator=generator)
        if not torch.allclose(run(torch.cat([real, tail]), WEIGHT)[:12], alone, rtol=1e-3, atol=1e-3):
            return False
    return True


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4))
def test_no_false_accept(names: list[str]) -> None:
    """A body that the proof accepts keeps its rows; bodies of safe operations alone are accepted."""
    if is_proved(names):
        assert keeps_rows(names), names
    elif all(name in SAFE for name in names):
        raise AssertionError(f"refused although it keeps its rows: {names}")


def test_the_oracle_sees_every_poison() -> None:
    """Each poison changes real rows by itself, except sums that run forward, which the proof refuses all the same."""
    unseen = {name for name in POISON if keeps_rows([name])}
    assert unseen <= {"cumsum", "roll"}
    assert not any(is_proved([name]) for name in POISON)
