"""Pass 3: cut the body at its attention calls, so that equal layers share one piece.

Why: a tower of 27 equal layers has 28 stretches between attention calls and only 4 different ones. Compiling each once turns
a compile of a minute into seconds, keeps the fusions across the block's end (out-projection … next QKV), and lets attention
be called with static bounds instead of through an opaque operator.

Preconditions: `hoist_metadata`; attention appears as `vitcg.varlen_attention`.

Cases: 1. the level of a node is the number of attention calls on its longest path from the inputs; a piece is all body nodes of
one level. Dense attention (image by image, in a tower without segments) is the first operation of its piece. 2. A size is
re-emitted as ``c * n``, so that the only size a piece takes is `n`, its first input. 3. Free nodes are sunk into each piece
that uses them. 4. What of a level has matrix products, and leads to results of the call alone, is a piece of its own, as the
mergers of deepstack features are: a capture of few rows runs it beside the layers that follow. 5. Two pieces with equal
operations, constants and input shapes are one (`pieces`), called with different tensors.

Before::

    %a = linear(%pixels, %w0); %o1 = vitcg.varlen_attention(%a, %a, %a, %cu, 0.25); %b = relu(%o1)
    %o2 = vitcg.varlen_attention(%b, %b, %b, %cu, 0.25);       %c = relu(%o2)

After::

    piece0(n, pixels, w0) -> a; attention(a, a, a, cu) -> o1; piece1(n, o1) -> b; attention(b, b, b, cu) -> o2
    piece1(n, o2) -> c                                   # piece1 again
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch
from ..attention import AttentionShape
from ..attention import op as _op  # noqa: F401  registers the operator
from .graph import Ineligible, Role, Symbols, is_size, rows_of, source_line, token_axes
from .hoist_metadata import BODY, FREE, PROLOGUE, Hoisted
from .program import AttentionStep, PieceStep, Program, UniquePiece
from .repeats import apart

__all__ = ["piece_key", "split_at_attention"]

_ATTENTION = (torch.ops.vitcg.varlen_attention, torch.ops.vitcg.varlen_attention.default)
_DENSE = (torch.nn.functional.scaled_dot_product_attention,)
_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)


def split_at_attention(hoisted: Hoisted) -> Program:
    """Cut the body (see the module's text).

    Raises:
        Ineligible: a size in the body is not ``c * n + d``, or the segments of an attention call are not metadata.
    """
    return _Splitter(hoisted).run()


class _Splitter:
    def __init__(self, hoisted: Hoisted) -> None:
        self.kind = hoisted.kind
        self.hoisted = hoisted
        self.symbols = hoisted.bound.symbols
        self.program = Program(self.symbols)
        self.slots: dict[fx.Node, int] = {}
        self.placeholders = {node: i for i, node in enumerate(hoisted.bound.placeholders)}
        self.metadata = {node: i for i, node in enumerate(hoisted.metadata)}
        self.unique: dict[Any, int] = {}

    def run(self) -> Program:
        graph = self.hoisted.bound.gm.graph
        output = next(n for n in graph.nodes if n.op == "output")
        body = [n for n in graph.nodes if self.kind.get(n) == BODY and n.op != "placeholder"]
        level = self._levels(body)
        self.program.metadata = [self._slot(node) for node in self.hoisted.metadata]
        finals = set(output.all_input_nodes)
        calls: list[tuple[Any, list[fx.Node], list[fx.Node]]] = []
        for number in range(max(level.values()) + 1):
            nodes = [n for n in body if level[n] == number and n.target not in _ATTENTION]
            calls += self._piece_calls(nodes, level, number, finals)
            for node in (n for n in body if level[n] == number + 1 and n.target in _ATTENTION):
                calls.append(("attention", [node], [node]))
        self._emit(calls, finals)
        self._outputs(output)
        self.program.arguments = [(s, self.placeholders[n]) for n, s in self.slots.items() if n.op == "placeholder"]
        self.program.num_slots = len(self.slots)
        return self.program

    def _slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _levels(self, body: list[fx.Node]) -> dict[fx.Node, int]:
        level: dict[fx.Node, int] = {}
        for node in body:
            before = [level[i] for i in node.all_input_nodes if i in level]
            level[node] = max(before, default=0) + (node.target in _ATTENTION or node.target in _DENSE)
        return level

    def _piece_calls(
        self, nodes: list[fx.Node], level: dict[fx.Node, int], number: int, finals: set[fx.Node]
    ) -> list[tuple[Any, list[fx.Node], list[fx.Node]]]:
        tensors = [n for n in nodes if not is_size(n.meta["val"])]
        calls = []
        for kind, own in zip(("piece", "aside"), self._apart(tensors), strict=True):
            inside = set(own)
            results = [
                n
                for n in own
                if isinstance(n.meta["val"], Tensor) and (n in finals or any(self._outside(u, inside) for u in n.users))
            ]
            calls += [(kind, own, results)] if results else []
        return calls

    def _apart(self, tensors: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes of a level that later ones depend on, and those that only results of the call do (case 4)."""
        inside, onward = set(tensors), set[fx.Node]()
        for node in reversed(tensors):
            if any(self._outside(user, inside) or user in onward for user in node.users):
                onward.add(node)
        for node in tensors:  # no tuple is the input of a piece: what takes a tensor out of one stays with it
            if any(source in onward and not isinstance(source.meta["val"], Tensor) for source in node.all_input_nodes):
                onward.add(node)
        aside = [node for node in tensors if node not in onward]
        if not onward or not any(node.target in _LINEAR for node in aside):
            return tensors, []
        return [node for node in tensors if node in onward], aside

    def _outside(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        return user.op != "output" and user not in inside and not is_size(user.meta["val"])

    def _emit(self, calls: list[tuple[Any, list[fx.Node], list[fx.Node]]], finals: set[fx.Node]) -> None:
        drafts: list[tuple[Any, list[fx.Node], list[fx.Node], bool]] = []
        for kind, nodes, results in calls:
            if kind == "attention":
                drafts.append((nodes[0], list(nodes[0].args[:3]), results, False))
                continue
            gm, inputs = self._piece(nodes, results)
            index = self._deduplicate(gm)
            roles = {i + 1: self.metadata[node] for i, node in enumerate(inputs) if node in self.metadata}
            self.program.pieces[index].metadata_inputs.append(roles)
            batch = {i + 1 for i, node in enumerate(inputs) if node.meta.get("role") == Role.BATCH}
            self.program.pieces[index].batch_inputs.append(batch)
            drafts.append((index, inputs, results, kind == "aside"))
        last: dict[fx.Node, int] = {}
        for position, (_, inputs, results, _) in enumerate(drafts):
            for node in (*inputs, *results):
                last[node] = position
        for position, (what, inputs, results, aside) in enumerate(drafts):
            dead = [n for n in dict.fromkeys((*inputs, *results)) if last[n] == position and self._is_temporary(n, finals)]
            free = tuple(self._slot(n) for n in dead)
            if isinstance(what, fx.Node):
                self.program.steps.append(self._attention(what, free))
            else:
                slots = tuple(self._slot(n) for n in inputs)
                self.program.steps.append(PieceStep(what, slots, tuple(self._slot(n) for n in results), free, aside))

    def _is_temporary(self, node: fx.Node, finals: set[fx.Node]) -> bool:
        return self.kind[node] == BODY and node.op != "placeholder" and node not in finals

    def _attention(self, node: fx.Node, free: tuple[int, ...]) -> AttentionStep:
        query, key, value, segments, scale = node.args[:5]
        if segments not in self.metadata:
            raise Ineligible("segments", f"{node.format_node()}: its cu_seqlens is not computed from the grid")
        if any(token_axes(factor.meta["val"], self.symbols) != [0] for factor in (query, key, value)):
            raise Ineligible("unproved", f"{node.format_node()} attends over something else than tokens ({source_line(node)})")
        fake, keys, values = (factor.meta["val"] for factor in (query, key, value))
        scale = float(scale) if scale is not None else float(fake.shape[-1]) ** -0.5
        slots = (self._slot(query), self._slot(key), self._slot(value))
        rows = rows_of(fake, 0, self.symbols)
        index = self._segments(segments, rows)
        sizes = (fake.shape[1], keys.shape[1], fake.shape[2], values.shape[2])
        shape = AttentionShape(fake.device, fake.dtype, *map(int, sizes))
        calls = self.program.attention.setdefault(index, [])
        if shape not in calls:
            calls.append(shape)
        return AttentionStep(*slots, index, rows, scale, self._slot(node), free)

    def _segments(self, node: fx.Node, rows: int) -> int:
        """Index of a cu_seqlens, which belongs to one number of rows: a tower may merge rows half way."""
        index = self.metadata[node]
        for step in self.program.steps:
            if isinstance(step, AttentionStep) and step.segments == index and step.rows != rows:
                raise Ineligible("segments", f"{node.format_node()}: its segments are used for {rows} and {step.rows} rows")
        return index

    def _piece(self, nodes: list[fx.Node], results: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        graph = fx.Graph()
        n = graph.placeholder("n")
        n.meta["val"] = self.symbols.n
        inside = set(nodes)
        inputs: list[fx.Node] = []
        self._collect(nodes, inside, inputs)
        copies: dict[fx.Node, fx.Node] = {}
        with self.symbols.mode, _torch.enable_python_dispatcher():
            values = apart([node.meta["val"] for node in inputs], [node.meta["memory"] for node in inputs])
        for number, (node, value) in enumerate(zip(inputs, values, strict=True)):
            copies[node] = graph.placeholder(f"x{number}")
            copies[node].meta["val"] = value
        sizes: dict[Any, Any] = {}

        def use(node: fx.Node) -> Any:
            if is_size(node.meta["val"]):
                return self._emit_size(node, node.meta["val"], graph, n, sizes)
            if node not in copies:  # a free node, sunk here
                copies[node] = copy(node)
            return copies[node]

        def copy(node: fx.Node) -> fx.Node:
            args, kwargs = fx.map_arg((node.args, node.kwargs), use)
            new = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
            return new

        for node in nodes:
            copies[node] = copy(node)
        graph.output(tuple(copies[node] for node in results))
        return fx.GraphModule(self.hoisted.bound.gm, graph, class_name="Piece"), inputs

    def _collect(self, nodes: list[fx.Node], inside: set[fx.Node], inputs: list[fx.Node]) -> None:
        """Inputs of a piece in the order of their first use; free nodes are looked through."""
        for node in nodes:
            for source in node.all_input_nodes:
                if source in inside or source in inputs or is_size(source.meta["val"]):
                    continue
                if self.kind[source] == FREE and source.op != "placeholder":
                    self._collect([source], inside, inputs)
                elif self.kind[source] == PROLOGUE and source.op != "placeholder" and source not in self.metadata:
                    raise Ineligible("metadata", f"{source.format_node()} is metadata but not a tensor")
                else:
                    inputs.append(source)

    def _emit_size(self, node: fx.Node, value: Any, graph: fx.Graph, n: fx.Node, sizes: dict[Any, Any]) -> Any:
        if isinstance(value, torch.Size):
            return tuple(self._emit_size(node, size, graph, n, sizes) for size in value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):  # what padding changes cannot be a number in a piece
            raise Ineligible("unproved", f"{node.format_node()} uses a symbolic size as a value ({source_line(node)})")
        if not isinstance(value, torch.SymInt):
            return value
        form = self.symbols.linear(value)
        if form is None:
            raise Ineligible("size", f"the size {value} is not a multiple of the token count")
        if form[0] == 0:
            return form[1]
        if form not in sizes:
            size = n
            if form[0] != 1:
                size = graph.call_function(operator.mul, (n, form[0]))
                size.meta["val"] = self.symbols.n * form[0]
            if form[1]:
                size = graph.call_function(operator.add, (size, form[1]))
                size.meta["val"] = self.symbols.n * form[0] + form[1]
            sizes[form] = size
        return sizes[form]

    def _deduplicate(self, gm: fx.GraphModule) -> int:
        key = piece_key(gm, self.symbols)
        if key not in self.unique:
            self.unique[key] = len(self.program.pieces)
            self.program.pieces.append(UniquePiece(key, gm))
        return self.unique[key]

    def _outputs(self, output: fx.Node) -> None:
        results = output.args[0]
        entry: tuple[str, Any]
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if not isinstance(result, fx.Node):
                entry, value = ("constant", result), None
            elif result.op == "placeholder":
                entry, value = ("argument", self.placeholders[result]), result.meta["val"]
            elif result in self.metadata:
                entry, value = ("metadata", self.metadata[result]), result.meta["val"]
            elif result in self.slots:
                entry, value = ("slot", self.slots[result]), result.meta["val"]
            else:
                raise Ineligible("output", f"{result.format_node()} is a result but neither a tensor of the body nor metadata")
            self.program.outputs.append(entry)
            self.program.output_values.append(value)
            self.program.output_memory.append(result.meta["memory"] if isinstance(result, fx.Node) else None)


def piece_key(gm: fx.GraphModule, symbols: Symbols) -> tuple[Any, ...]:
    """Equal for two graphs with the same operations, constants and input shapes, whatever their names."""
    number: dict[fx.Node, int] = {}

    def size_key(size: Any) -> Any:  # in terms of n, so that two symbol environments agree
        return (symbols.linear(size) or str(size)) if isinstance(size, (int, torch.SymInt)) else str(size)

    def value_key(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (
                str(value.dtype),
                str(value.device),
                *(tuple(map(size_key, s)) for s in (value.shape, value.stride())),
            )
        return size_key(value)

    def argument_key(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return ("node", number[argument])
        if isinstance(argument, (list, tuple)):
            return tuple(argument_key(a) for a in argument)
        if isinstance(argument, dict):
            return tuple((k, argument_key(v)) for k, v in sorted(argument.items()))
        if isinstance(argument, slice):
            return ("slice", argument_key(argument.start), argument_key(argument.stop), argument_key(argument.step))
        return (type(argument).__name__, repr(argument))

    rows: list[tuple[Any, ...]] = []
    for node in gm.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            rows.append(("placeholder", value_key(node.meta["val"])))
            continue
        target = node.target  # the object itself: two closures of one factory have one name
        if node.op == "get_attr":  # a constant of the graph: equal only to itself
            target = f"{node.target}@{id(getattr(gm, node.target))}"
        rows.append((node.op, target, argument_key(node.args), argument_key(node.kwargs)))
    return tuple(rows)
