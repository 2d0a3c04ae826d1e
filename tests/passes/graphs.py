"""Small graphs for the tests of passes: traced by Dynamo with symbolic rows, nothing compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from vitcg_backend import _torch, ops
from vitcg_backend.passes.bind_tokens import Bound, bind_tokens
from vitcg_backend.passes.graph import Symbols
from vitcg_backend.passes.hoist_metadata import Hoisted, hoist_metadata
from vitcg_backend.passes.program import Program
from vitcg_backend.passes.split_at_attention import split_at_attention


def positions(grid: Tensor, scale: int = 1, spatial_merge_size: int = 1) -> Tensor:
    """Row number inside its item: a metadata function for tests, int64 [patches]."""
    counts = grid.prod(1).tolist()
    return torch.cat([torch.arange(c) for c in counts]) * scale


def boundaries(grid: Tensor) -> Tensor:
    """cu_seqlens with one segment an item, int32 [items + 1]."""
    return torch.nn.functional.pad(grid.prod(1).cumsum(0), (1, 0)).int()


ops.register_function("tests.positions", positions)
ops.register_function("tests.boundaries", boundaries)


def metadata(name: str, grid: Tensor, constants: str = "{}") -> Tensor:
    """A metadata operator call, as the lowering emits it."""
    return torch.ops.vitcg.metadata(f"tests.{name}", grid, [], constants)[0]


def attend(x: Tensor, cu: Tensor) -> Tensor:
    """Packed self-attention of [T, C] with one head."""
    y = x.unsqueeze(1)
    return torch.ops.vitcg.varlen_attention(y, y, y, cu, 0.5).squeeze(1)


class Module(nn.Module):
    """A function of (self, pixels, grid) with a weight and buffers, one of them complex, width 8."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.second = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.frequencies = nn.Buffer(torch.randn(8, generator=generator))
        self.turns = nn.Buffer(torch.randn(4, generator=generator, dtype=torch.complex64))
        self.function = function

    def forward(self, pixels: Tensor, grid: Tensor) -> Any:
        """The function on this module."""
        return self.function(self, pixels, grid)


def dynamo_graph(function: Callable[..., Any], rows: int = 24) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend for ``function(module, pixels, grid)``, rows dynamic."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        raise StopHere

    pixels, grid = torch.randn(rows, 8), torch.tensor([[1, 2, rows // 4], [1, 2, rows // 4]])
    _torch.mark_rows(pixels, 0, unbacked=False)
    _torch.mark_rows(grid, 0, unbacked=True)
    try:
        with torch.no_grad():
            torch.compile(Module(function), backend=backend, fullgraph=True)(pixels, grid)
    except Exception as error:
        if not graphs:
            raise
        del error
    return graphs[0]


class StopHere(Exception):
    """The graph is all that a test wants."""


def bound(function: Callable[..., Any]) -> Bound:
    """Graph after `bind_tokens`."""
    return bind_tokens(dynamo_graph(function))


def hoisted(function: Callable[..., Any]) -> Hoisted:
    """Graph after `hoist_metadata`."""
    return hoist_metadata(bound(function))


def program(function: Callable[..., Any]) -> Program:
    """Body after `split_at_attention`."""
    return split_at_attention(hoisted(function))


def aten_pieces(function: Callable[..., Any]) -> tuple[list[fx.GraphModule], Symbols]:
    """ATen graphs of the unique pieces, and their symbols."""
    result = program(function)
    pieces = []
    for piece in result.pieces:
        fakes = [node.meta["val"] for node in piece.gm.graph.nodes if node.op == "placeholder"]
        pieces.append(_torch.aot_trace(piece.gm, fakes, result.symbols.mode))
    return pieces, result.symbols


def targets(gm: fx.GraphModule) -> list[str]:
    """Names of what a graph calls."""
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op.startswith("call")]
