"""Pass 2: split a bound graph into a prologue, which the pixels do not reach, and a body.

Why: the prologue (segments, positions, interpolation tables, window order) depends on the grid alone. It runs once per layout,
outside the captured body, and its results become static-shaped inputs of it.

Preconditions: `bind_tokens`.

Cases: a node is 1. *free* when it depends on a module's state and on sizes only (a transposed weight): it is sunk into
every piece that uses it; 2. *metadata* when it depends on the grid or on nothing, and on no state; equal metadata nodes
are merged; 3. *tail* when it depends on the pixels and has a size that is not ``c * n + d``, or comes after one that has;
4. *body* otherwise. Parameters and buffers enter the prologue only where a metadata operator reads them (it works on the
host and cannot be captured), and then the prologue runs in each call (`reads_state`): nothing made from them can go stale.
An edit through ``.data`` leaves no trace that a cache could see.

Before::

    %meta = vitcg.metadata(..., %l_grid, ..., %s77)           # i64[4*n, 2]
    %cos = cos(%meta * %l_buffers_inv_freq)                   # f32[4*n, 8]
    %h = linear(%l_pixels, %l_weight)                         # f32[4*n, 64]
    %out = %h * %cos

After::

    prologue(l_grid, s77):                                 %meta = vitcg.metadata(...); return (%meta,)
    body(l_pixels, l_weight, l_buffers_inv_freq, meta):    %cos = ...; %h = linear(...); %out = %h * %cos
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .bind_tokens import METADATA_TARGETS, Bound
from .graph import Ineligible, Role, is_size, made_from

__all__ = ["BODY", "FREE", "PROLOGUE", "TAIL", "Hoisted", "hoist_metadata"]

FREE, PROLOGUE, BODY, TAIL = "free", "prologue", "body", "tail"


@dataclass
class Hoisted:
    """A bound graph taken apart.

    Attributes:
        bound: the graph it came from.
        prologue: module of its inputs (see `prologue_inputs`) that returns the metadata tensors.
        prologue_inputs: positions of the call's arguments that the prologue takes.
        reads_state: whether the prologue reads weights, so that it must run in each call.
        metadata: the nodes of the bound graph that the prologue returns, in order.
        kind: node -> free, prologue, body or tail.
    """

    bound: Bound
    prologue: fx.GraphModule
    prologue_inputs: tuple[int, ...]
    reads_state: bool
    metadata: list[fx.Node]
    kind: dict[fx.Node, str]


def hoist_metadata(bound: Bound) -> Hoisted:
    """Take the metadata out of the graph (see the module's text).

    Raises:
        Ineligible: nothing in the graph depends on the pixels, attention comes after a size that nobody knows, or an input of
            the prologue cannot be followed.
    """
    kind = _classify(bound)
    _mark_tail(bound, kind)
    _merge_equal(bound, kind)
    nodes = [n for n in bound.gm.graph.nodes if n.op not in ("placeholder", "output")]
    used = [n for n in nodes if kind[n] == PROLOGUE and not is_size(n.meta["val"]) and _leaves(n, kind)]
    if not any(kind[n] == BODY for n in nodes):
        raise Ineligible("no_body", "nothing in this graph depends on the pixels")
    used = [n for n in used if isinstance(n.meta["val"], torch.Tensor)]
    used += [n for n in bound.placeholders if n.meta["role"] == Role.EXTRA and _gives_segments(n)]
    prologue, inputs = _extract(bound, [n for n in nodes if kind[n] in (PROLOGUE, FREE)], used)
    reads_state = any(bound.placeholders[i].meta["role"] == Role.STATE for i in inputs)
    return Hoisted(bound, prologue, inputs, reads_state, used, kind)


def _classify(bound: Bound) -> dict[fx.Node, str]:
    kind: dict[fx.Node, str] = {}
    weight: dict[fx.Node, bool] = {}  # reached by a parameter
    for node in bound.gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            role = node.meta["role"]
            weight[node] = role == Role.STATE
            kind[node] = BODY if role in (Role.PIXELS, Role.BATCH) else FREE if role in (Role.STATE, Role.SIZE) else PROLOGUE
            continue
        inputs = node.all_input_nodes
        kinds = {kind[i] for i in inputs}
        weight[node] = any(weight[i] for i in inputs)
        if BODY in kinds:
            kind[node] = BODY
        elif node.target in METADATA_TARGETS or (
            node.target is operator.getitem and node.args[0].target in METADATA_TARGETS  # type: ignore[union-attr]
        ):
            kind[node] = PROLOGUE  # also with weights among its inputs: it works on the host and cannot be captured
        elif PROLOGUE in kinds or not weight[node]:
            kind[node] = BODY if weight[node] else PROLOGUE
        else:
            kind[node] = FREE
    return kind


def _mark_tail(bound: Bound, kind: dict[fx.Node, str]) -> None:
    for node in bound.gm.graph.nodes:
        if kind.get(node) != BODY or node.op == "placeholder":
            continue
        if any(kind.get(i) == TAIL for i in node.all_input_nodes) or _has_unknown_size(node.meta["val"], bound):
            kind[node] = TAIL
            if "varlen_attention" in str(node.target):
                raise Ineligible("unknown_size", f"{node.format_node()}: attention over rows that no bucket fixes")


def _has_unknown_size(value: Any, bound: Bound) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_unknown_size(part, bound) for part in value)
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,) if isinstance(value, torch.SymInt) else ()
    return any(isinstance(s, torch.SymInt) and bound.symbols.linear(s) is None for s in sizes)


def _merge_equal(bound: Bound, kind: dict[fx.Node, str]) -> None:
    """Merge equal prologue nodes; they are pure, metadata operators included."""
    first: dict[Any, fx.Node] = {}
    for node in list(bound.gm.graph.nodes):
        if kind.get(node) != PROLOGUE or node.op in ("placeholder", "get_attr"):
            continue
        key = (node.op, node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            bound.gm.graph.erase_node(node)
        else:
            first[key] = node


def _leaves(node: fx.Node, kind: dict[fx.Node, str]) -> bool:
    """Whether anything outside the prologue reads a node, its sizes included."""
    for user in node.users:
        if user.op == "output" or kind[user] in (BODY, TAIL):
            return True
        if is_size(user.meta["val"]) and _leaves(user, kind):
            return True
    return False


def _gives_segments(node: fx.Node) -> bool:
    """Whether an input is the cu_seqlens of an attention call: the prologue hands it on as it is."""
    return any("varlen_attention" in str(user.target) and user.args[3] is node for user in node.users)


def _extract(bound: Bound, nodes: list[fx.Node], used: list[fx.Node]) -> tuple[fx.GraphModule, tuple[int, ...]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    positions = []
    inside = set(nodes)
    needed = made_from(used, inside)
    for position, placeholder in enumerate(bound.placeholders):
        if placeholder in used or any(user in needed for user in placeholder.users):
            copies[placeholder] = graph.placeholder(placeholder.name)
            copies[placeholder].meta = dict(placeholder.meta)
            positions.append(position)
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(graph.call_method("contiguous", (copies[n],)) for n in used))  # static inputs are dense
    with bound.symbols.mode:
        for node in used:
            node.meta["val"] = node.meta["val"].contiguous()
    return fx.GraphModule(bound.gm, graph, class_name="Prologue"), tuple(positions)
