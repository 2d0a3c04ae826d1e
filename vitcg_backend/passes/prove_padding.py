"""Pass 4: prove that padded rows cannot reach real rows.

Why: a bucket computes rows that belong to nobody. That is safe only if every operation keeps the token axis as rows: row i of
its result depends on row i of its inputs and on tensors without a token axis. The proof walks the ATen graph of a piece with a
table of rules (`RULES`). **An operation without a rule, or used in a way its rule does not know, refuses the bucket** and names
the operation and its source line; nothing is assumed safe.

Preconditions: `aot_trace` (functional ATen with ``meta["val"]`` in the private symbols, rows = unit * n).

What a rule may rely on: each tensor has at most one axis whose size depends on n (its token axis) with ``rows = c * n``.
``c`` rows make one block: a view may regroup rows inside a block (4 patches -> 1 token) and never across.

A table may be looked up by metadata alone: an index made from a padded row's own values could point outside of the table.

The one way to move rows is a gather along the token axis by an index that the prologue made: the proof accepts it under an
*obligation* that the runtime checks for every layout (real entries point at real rows, padded ones at padded rows).

Before and after: the graph is unchanged; the result is a `Proof`::

    %addmm = aten.addmm(%bias, %x, %w)        # x: [4*n, 64]         ok: tokens only in the rows of the left factor
    %mean = aten.mean.dim(%x, [0])            #                      refused: reduces the token axis
    %index = aten.index.Tensor(%x, [%window]) # window: prologue     ok, obligation: window stays inside real | padded
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .graph import HINT, Ineligible, Symbols, is_size, rows_of, source_line, token_axes, where
from .hoist_metadata import PROLOGUE, Hoisted
from .row_rules import RULES, Refusal, Rows

__all__ = ["Gather", "Proof", "prove_padding", "prove_prologue"]


@dataclass(frozen=True)
class Gather:
    """An obligation: placeholder `index` gathers rows of a tensor with `source_rows` rows per n.

    Attributes:
        index: position of the index among the piece's inputs (0 is n).
        index_rows: rows of the index per n.
        source_rows: rows of the gathered tensor per n.
    """

    index: int
    index_rows: int
    source_rows: int


@dataclass
class Proof:
    """What was proved.

    Attributes:
        rules: which rule accepted each operation, as (operation, text).
        gathers: what the runtime has to check for each layout.
        decisions: what the trace assumed about n on its way: a bucket and the call in it must agree on each.
        lookups: positions of inputs from which indices into tables are made: they must be metadata, because a padded row's
            own values may point anywhere, which ends the process on a GPU.
    """

    rules: list[tuple[str, str]] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    lookups: set[int] = field(default_factory=set)
    decisions: list[sympy.Basic] = field(default_factory=list)


def prove_padding(gm: fx.GraphModule, symbols: Symbols) -> Proof:
    """Prove that real rows depend on real rows only (see the module's text).

    Raises:
        Ineligible: with reason ``unproved``, the operation and its source line.
    """
    proof = Proof(decisions=symbols.guards())
    for decision in proof.decisions:
        if isinstance(decision, sympy.Eq) and not any(decision.subs(symbols.symbol, HINT * k) == sympy.true for k in (2, 3, 5)):
            raise Ineligible("unproved", f"a trace made the number of tokens a constant ({decision}): it is used as a value")
    walker = _Walker(gm, symbols, proof)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_size(node.meta.get("val")):
            walker.visit(node)
    walker.check_results()
    return proof


def prove_prologue(hoisted: Hoisted) -> Ineligible | None:
    """Why the prologue may differ on a padded grid: a token count used as a value, which padding changes.

    That rows of metadata belong to their item is the contract of metadata functions; the runtime compares padded with
    unpadded metadata besides (`layouts.py`).
    """
    symbols = hoisted.bound.symbols
    for node in hoisted.bound.gm.graph.nodes:
        if hoisted.kind.get(node) != PROLOGUE or is_size(node.meta["val"]) or node.op == "placeholder":
            continue
        arguments = [*node.args, *node.kwargs.values()]
        if any(_holds_size(a, symbols) for a in arguments) and not _takes_shape(node, symbols):
            line = source_line(node)
            return Ineligible("unproved", f"{node.format_node()} uses the number of tokens as a value ({line})")
    return None


def _takes_shape(node: fx.Node, symbols: Symbols) -> bool:
    """Whether a torch-level node uses token counts as a shape, as the end of a range from a constant, or as metadata does."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if "metadata" in name or name in ("view", "reshape", "expand", "zeros", "ones", "empty"):
        return True
    if name == "full":
        return not _holds_size(node.args[1:], symbols)
    return name == "arange" and len(node.args) == 1  # row i is i, however many rows there are


def _holds_size(argument: Any, symbols: Symbols) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(argument, lambda node: found.append(node))
    return any(symbols.depends(node.meta.get("val")) for node in found)


class _Walker:
    def __init__(self, gm: fx.GraphModule, symbols: Symbols, proof: Proof) -> None:
        self.gm, self.symbols, self.proof = gm, symbols, proof
        self.inputs = {node: i for i, node in enumerate(where(gm.graph.nodes, "placeholder"))}
        for node in self.inputs:
            self._require_known_shape(node)

    def visit(self, node: fx.Node) -> None:
        rule = RULES.get(node.target)
        arguments = [*node.args, *node.kwargs.values()]
        if rule is None and (self._carries(node) or _holds_size(arguments, self.symbols)):
            raise self._refusal(node, "has no rule")
        for position, argument in enumerate(arguments):
            if rule is not None and position != rule.shape_argument and _holds_size(argument, self.symbols):
                raise self._refusal(node, "uses the number of tokens as a value")
        try:
            rows = Rows(node, self._rows, self.symbols, self._gather, self._lookup)
            if rule is None or (not rows.inputs and not rows.output_carries):
                text = "no token axis"  # whatever it computes, the number of rows has no part in it
            elif not rows.inputs:
                text = rule.creates(rows)
            else:
                text = rule.check(rows)
        except Refusal as refusal:
            raise self._refusal(node, str(refusal)) from refusal
        except Ineligible as error:
            raise self._refusal(node, error.detail) from error
        self.proof.rules.append((str(node.target), text))

    def check_results(self) -> None:
        """Results must have known shapes too: a size that nobody knows cannot be cut to the real rows."""
        output = next(n for n in self.gm.graph.nodes if n.op == "output")
        for node in output.all_input_nodes:
            self._require_known_shape(node)

    def _carries(self, node: fx.Node) -> bool:
        """Whether a token axis goes into a node or comes out of it."""
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        tensors = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,))]
        return any(token_axes(tensor, self.symbols) for tensor in tensors)

    def _rows(self, value: Any) -> tuple[int, int] | None:
        """(axis, rows per n) of a fake value, None without a token axis."""
        if isinstance(value, (tuple, list)):
            found = {self._rows(v) for v in value}
            if len(found) > 1:
                raise Refusal("results with different token axes")
            return found.pop() if found else None
        axes = token_axes(value, self.symbols)
        if not axes:
            return None
        if len(axes) > 1:
            raise Refusal(f"a tensor of shape {tuple(value.shape)} has {len(axes)} token axes")
        return axes[0], rows_of(value, axes[0], self.symbols)

    def _gather(self, index: fx.Node, index_rows: int, source_rows: int) -> None:
        if index not in self.inputs:
            raise Refusal(f"gathers rows by {index.name}, which the prologue did not make")
        self.proof.gathers.append(Gather(self.inputs[index], index_rows, source_rows))

    def _lookup(self, index: fx.Node) -> None:
        seen, stack = {index}, [index]
        while stack:
            node = stack.pop()
            if node in self.inputs and token_axes(node.meta["val"], self.symbols):
                self.proof.lookups.add(self.inputs[node])
            stack += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)

    def _require_known_shape(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt) and self.symbols.linear(size) is None:
                    raise Ineligible("unknown_size", f"{node.name} has shape {tuple(value.shape)}, which no bucket fixes")

    def _refusal(self, node: fx.Node, why: str) -> Ineligible:
        line = source_line(node)
        return Ineligible(
            "unproved",
            f"{node.target} {why}{f' ({line})' if line else ''}. "
            "Padded rows could reach real rows, so this graph is not bucketed; a rule goes to passes/row_rules.py.",
        )
