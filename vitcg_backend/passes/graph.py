"""What the passes share: the private symbols, what each placeholder is, and small helpers on FX nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .. import _torch

__all__ = [
    "Ineligible",
    "Role",
    "Symbols",
    "adding_before",
    "erase_unread",
    "fake_of",
    "is_size",
    "made_from",
    "reads_by_strides",
    "rows_of",
    "source_line",
    "token_axes",
    "where",
]

_BY_STRIDES = {getattr(torch.ops.aten, name) for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")}
HINT = 256
"""Size hint of the private token symbol: the same for every graph, so that the first image seen decides nothing."""


class Ineligible(Exception):
    """A graph that cannot be bucketed. `reason` is counted and shown; the graph still runs, on a slower path."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"[{reason}] {detail}")


class Role:
    """What a placeholder of the Dynamo graph holds."""

    SIZE = "size"
    STATE = "state"  # parameter, buffer or another tensor that a module owns
    PIXELS = "pixels"
    GRID = "grid"
    ITEMS = "items"  # one whole number for each row of the grid, e.g. merge sizes
    BATCH = "batch"  # a row for each row of the pixels, in a tower without a grid, e.g. a mask
    EXTRA = "extra"  # any other tensor of the call, e.g. cu_seqlens given by the caller


@dataclass
class Symbols:
    """The private symbol environment of one graph: its rows are ``unit * n``.

    Attributes:
        mode: fake mode that all values of the graph belong to.
        shape_env: its shape environment, with the guards on `n`.
        symbol: the sympy symbol of `n`.
        n: `n` as a SymInt.
        unit: rows that the tower merges into one output token (the square of the spatial merge size), 1 if it merges none.
    """

    mode: Any
    shape_env: Any
    symbol: sympy.Symbol
    n: Any
    unit: int

    @classmethod
    def create(cls, unit: int) -> Symbols:
        """Fresh symbols for rows = unit * n."""
        shape_env = _torch.ShapeEnv()
        mode = _torch.FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        symbol, n = _torch.new_size(shape_env, "__n", HINT)
        return cls(mode, shape_env, symbol, n, unit)

    def linear(self, size: Any) -> tuple[int, int] | None:
        """(c, d) when `size` is ``c * n + d``, else None."""
        if isinstance(size, int):
            return 0, size
        expression = self.shape_env.simplify(size.node.expr)
        factor = expression.coeff(self.symbol, 1)
        rest = sympy.expand(expression - factor * self.symbol)
        if factor.is_Integer and rest.is_Integer:
            return int(factor), int(rest)
        return None

    def depends(self, size: Any) -> bool:
        """Whether `size`, a number of any kind such as ``1 / n``, changes with n; of a shape, whether any size in it does."""
        if isinstance(size, torch.Size):
            return any(self.depends(s) for s in size)
        symbolic = isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
        return symbolic and self.symbol in self.shape_env.simplify(size.node.expr).free_symbols

    def guards(self) -> list[sympy.Basic]:
        """Assumptions about n that tracing or compiling has made so far: the result is right where they all hold."""
        return [g.expr for g in self.shape_env.guards if self.symbol in g.expr.free_symbols]


def is_size(value: Any) -> bool:
    """Whether a node's value is a number, or a shape, and not a tensor."""
    return isinstance(value, (torch.Size, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def fake_of(node: fx.Node) -> Any:
    """The node's value in the private fake mode."""
    return node.meta.get("val")


@contextlib.contextmanager
def adding_before(node: fx.Node) -> Iterator[Callable[..., fx.Node]]:
    """A function of an operator and its arguments that puts the call before a node of an ATen graph, with ``meta["val"]``.

    Without Python's own decompositions a fake pad would settle for the number of rows in the example.
    """
    graph = node.graph

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)}
        return new

    with graph.inserting_before(node), node.meta["val"].fake_mode, _torch.enable_python_dispatcher():
        yield add


def rewrite_each(
    gm: fx.GraphModule, matches: Sequence[fx.Node], rewrite: Callable[[fx.Graph, fx.Node], None]
) -> fx.GraphModule:
    """The graph with each match rewritten and what that leaves unused taken out; without a match as it is."""
    for node in matches:
        rewrite(gm.graph, node)
    if matches:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


def reads_by_strides(gm: fx.GraphModule) -> bool:
    """Whether an operation of an ATen graph was traced for the way its argument lies in memory."""
    return any(getattr(node.target, "overloadpacket", None) in _BY_STRIDES for node in gm.graph.nodes)


def token_axes(value: Any, symbols: Symbols) -> list[int]:
    """Axes of a fake tensor whose size changes with n."""
    return [axis for axis, size in enumerate(value.shape) if symbols.depends(size)] if isinstance(value, Tensor) else []


def rows_of(value: Tensor, axis: int, symbols: Symbols) -> int:
    """Rows per n on a token axis.

    Raises:
        Ineligible: the size is not a whole multiple of n.
    """
    form = symbols.linear(value.shape[axis])
    if form is None or form[1] != 0 or form[0] < 1:
        raise Ineligible("odd_rows", f"axis {axis} of a tensor of shape {tuple(value.shape)} is not a multiple of n")
    return form[0]


def source_line(node: fx.Node) -> str:
    """The innermost line of user code that made the node, or an empty text."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    return " ".join(lines[-2:]) if len(lines) >= 2 else ""


def made_from(nodes: Iterable[fx.Node], inside: set[fx.Node] | None = None) -> set[fx.Node]:
    """These nodes, and all that they are made from; of either what is `inside`, None = the whole graph."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and (inside is None or node in inside):
            found.add(node)
            stack += node.all_input_nodes
    return found


def erase_unread(gm: fx.GraphModule, nodes: set[fx.Node]) -> None:
    """Erase those of `nodes` that nothing reads any more, inputs of the graph left out."""
    for node in reversed(list(gm.graph.nodes)):
        if node in nodes and not node.users and node.op != "placeholder":
            gm.graph.erase_node(node)


def where(nodes: Iterable[fx.Node], op: str) -> list[fx.Node]:
    """The nodes of one kind."""
    return [node for node in nodes if node.op == op]
