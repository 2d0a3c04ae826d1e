"""Pass 3: what no bucket fixes the size of is cut off the end of the body and runs on the exact rows.

Why: some towers end in something that depends on the layout in more than its number of rows (a mean over the frames of each
video, a resize of each image). Padding cannot hold that, but all layers before it can be captured. Moves work only: bit-equal.

Preconditions: `hoist_metadata`, which says what belongs to the tail (a size that is not ``c * n + d``, a host loop, and all
that follows from them); no attention in it.

Before::

    %h = linear(%x, %w)                          # f32[4*n, 64]
    %p = index_add(new_zeros(%h, u1 * 4, 64), 0, %metadata, %h)     # f32[4*u1, 64]
    return (%h, %p)

After::

    body:  %h = linear(%x, %w); return (%h, %h)
    tail(l_args..., n, h, metadata):  %p = index_add(...); return (%p,)        # after the replay, on the real rows
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .graph import Ineligible, is_size
from .hoist_metadata import BODY, FREE, PROLOGUE, TAIL, Hoisted

__all__ = ["Tail", "cut_tail"]


@dataclass
class Tail:
    """The end of a graph.

    Attributes:
        gm: module of ``n``, arguments of the call, body results and metadata, in this order.
        arguments: positions of the call's arguments that it takes.
        body: indices of the body's results that it takes.
        metadata: indices of the metadata that it takes.
        results: for each result of the call, ("body", index of a body result) or ("tail", index of a result of `gm`).
    """

    gm: fx.GraphModule
    arguments: list[int]
    body: list[int]
    metadata: list[int]
    results: list[tuple[str, int]]

    def __call__(self, n: int, args: Sequence[Any], results: Sequence[Any], metadata: Sequence[Tensor]) -> list[Any]:
        """The results of the call.

        Args:
            n: its output tokens.
            args: its arguments.
            results: what the body returned for its real rows.
            metadata: that of its exact layout.
        """
        inputs = [args[i] for i in self.arguments] + [results[i] for i in self.body] + [metadata[i] for i in self.metadata]
        with torch.no_grad():
            own = self.gm(n, *inputs)
        return [own[i] if kind == "tail" else results[i] for kind, i in self.results]


def cut_tail(hoisted: Hoisted) -> Tail | None:
    """Take the tail off the bound graph, in place (see the module's text). None when there is none.

    Raises:
        Ineligible: the tail needs something that is neither an argument, a tensor of the body nor metadata.
    """
    bound = hoisted.bound
    nodes = [n for n in bound.gm.graph.nodes if hoisted.kind.get(n) == TAIL]
    if not nodes:
        return None
    builder = _Builder(hoisted, set(nodes))
    for node in nodes:
        if not is_size(node.meta["val"]):
            builder.use(node)
    output = next(n for n in bound.gm.graph.nodes if n.op == "output")
    wanted = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    kept = [r for r in wanted if not (isinstance(r, fx.Node) and hoisted.kind.get(r) == TAIL)]
    own = [r for r in wanted if isinstance(r, fx.Node) and hoisted.kind.get(r) == TAIL]
    places = iter(range(len(kept)))
    numbers = iter(range(len(own)))
    results = [
        ("tail", next(numbers)) if isinstance(r, fx.Node) and hoisted.kind.get(r) == TAIL else ("body", next(places))
        for r in wanted
    ]
    gm = builder.finish(own)
    output.args = ((*kept, *builder.body),)
    for node in reversed(nodes):
        bound.gm.graph.erase_node(node)
    bound.gm.recompile()
    positions = {node: i for i, node in enumerate(bound.placeholders)}
    return Tail(
        gm,
        [positions[n] for n in builder.arguments],
        [len(kept) + i for i in range(len(builder.body))],
        [hoisted.metadata.index(n) for n in builder.metadata],
        results,
    )


class _Builder:
    def __init__(self, hoisted: Hoisted, tail: set[fx.Node]) -> None:
        self.hoisted, self.tail = hoisted, tail
        self.symbols = hoisted.bound.symbols
        self.graph = fx.Graph()
        self.n = self.graph.placeholder("n")
        self.copies: dict[fx.Node, fx.Node] = {}
        self.arguments: list[fx.Node] = []
        self.body: list[fx.Node] = []
        self.metadata: list[fx.Node] = []

    def use(self, node: fx.Node) -> Any:
        """The value of a node in the tail's graph."""
        value = node.meta["val"]
        if isinstance(value, torch.Size) and all(self.symbols.linear(size) for size in value):
            return tuple(self._size(*self.symbols.linear(size)) for size in value)  # type: ignore[misc]
        if node not in self.copies:
            form = self.symbols.linear(value) if isinstance(value, (int, torch.SymInt)) else None
            if form is not None:
                return self._size(*form)
            self.copies[node] = self._copy(node)
        return self.copies[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        kind = self.hoisted.kind[node]
        if node.op == "placeholder":
            return self._input(node, self.arguments)
        if node in self.tail or kind == FREE or is_size(node.meta["val"]):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.use)
            return self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        if kind == BODY:
            return self._input(node, self.body)
        if kind == PROLOGUE and node in self.hoisted.metadata:
            return self._input(node, self.metadata)
        raise Ineligible("tail", f"{node.format_node()} is needed after the body and is no tensor of it")

    def _input(self, node: fx.Node, inputs: list[fx.Node]) -> fx.Node:
        inputs.append(node)
        return self.graph.placeholder(node.name)

    def _size(self, factor: int, rest: int) -> Any:
        if factor == 0:
            return rest
        return self.graph.call_function(operator.add, (self.graph.call_function(operator.mul, (self.n, factor)), rest))

    def finish(self, results: list[fx.Node]) -> fx.GraphModule:
        """The module, its inputs in the order that `Tail` gives them."""
        self.graph.output(tuple(self.copies[r] for r in results))
        at = self.n
        for node in (*self.arguments, *self.body, *self.metadata):
            at.append(self.copies[node])
            at = self.copies[node]
        self.graph.lint()
        return fx.GraphModule(self.hoisted.bound.gm, self.graph, class_name="Tail")
