"""The rules of the padding proof: for each ATen operation, when its rows stay rows.

A rule looks at a `Rows` view of one node and returns a short text that says why it is safe, or raises `Refusal`. To add one,
write a function with ``@rule(aten.op.overload)``, and a body that it accepts and one that it refuses in
`tests/passes/test_row_rules.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .graph import Symbols

__all__ = ["RULES", "Refusal", "Rows", "Rule", "rule"]

aten, prims = torch.ops.aten, torch.ops.prims


class Refusal(Exception):
    """Why an operation may mix rows."""


class Rows:
    """One node, seen as rows.

    Attributes:
        node: the node.
        inputs: tensor inputs with a token axis, as (node, axis, rows per n), in argument order.
        axis, rows: token axis and rows per n of the first of them.
        output: (axis, rows per n) of the result, None when it has no token axis.
    """

    def __init__(
        self,
        node: fx.Node,
        rows_of: Callable[[Any], tuple[int, int] | None],
        symbols: Symbols,
        gather: Callable[[fx.Node, int, int], None],
        lookup: Callable[[fx.Node], None],
    ) -> None:
        self.node, self.symbols, self._rows_of, self.gather, self.lookup = node, symbols, rows_of, gather, lookup
        found = [(source, rows_of(_read_parts(source))) for source in node.all_input_nodes]
        self.inputs = [(source, *place) for source, place in found if place is not None]
        self.output: Any = rows_of(_read_parts(node))

    @property
    def output_carries(self) -> bool:
        """Whether the result has a token axis."""
        return self.output is not None

    @property
    def axis(self) -> int:
        """Token axis of the first token input."""
        return self.inputs[0][1]

    @property
    def rows(self) -> int:
        """Its rows per n."""
        return self.inputs[0][2]

    @property
    def rank(self) -> int:
        """Its number of axes."""
        value = self.inputs[0][0].meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).dim()

    def of(self, argument: Any) -> Any:
        """(axis, rows per n) of an argument, None without a token axis."""
        return self._rows_of(argument.meta.get("val")) if isinstance(argument, fx.Node) else None

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def dims(self, argument: Any) -> set[int]:
        """Axes named by an argument, counted from the left."""
        listed = argument if isinstance(argument, (list, tuple)) else [argument]
        return {d % self.rank for d in listed}

    def keep(self, rows: int | None = None) -> None:
        """The result must carry the tokens, with the same rows per n."""
        if self.output is None:
            raise Refusal("loses the token axis")
        if self.output[1] != (self.rows if rows is None else rows):
            raise Refusal(f"changes the rows per token group from {self.rows} to {self.output[1]}")

    def aligned(self) -> None:
        """All token inputs and the result have it at the same distance from the right: no broadcasting across rows."""
        self.keep()
        rank = self.node.meta["val"].dim()
        for source, axis, rows in self.inputs:
            if source.meta["val"].dim() - axis != rank - self.output[0] or rows != self.rows:
                raise Refusal("combines tensors whose rows are not aligned")

    def only_first(self) -> None:
        """Exactly one input carries tokens."""
        if len(self.inputs) != 1:
            raise Refusal("has several inputs with a token axis")


def _read_parts(node: fx.Node) -> Any:
    """The value of a node; of a tuple the parts that something reads."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return value
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    return tuple(part for i, part in enumerate(value) if i in read)


@dataclass(frozen=True)
class Rule:
    """A check, and what the operation may do with sizes.

    Attributes:
        check: for a node with token inputs.
        creates: for a node whose result has a token axis but no input has (``full``, ``expand``).
        shape_argument: position of the one argument in which a token count may stand: as a shape, never as a value.
    """

    check: Callable[[Rows], str]
    creates: Callable[[Rows], str]
    shape_argument: int | None


RULES: dict[Any, Rule] = {}


def _creates_nothing(rows: Rows) -> str:
    raise Refusal("makes a token axis out of nothing")


def _constant_rows(rows: Rows) -> str:
    return "equal rows"


def rule(
    *targets: Any, shape_argument: int | None = None, creates: Callable[[Rows], str] = _creates_nothing
) -> Callable[[Any], Any]:
    """Register a check for some operations."""

    def register(check: Callable[[Rows], str]) -> Callable[[Rows], str]:
        for target in targets:
            RULES[target] = Rule(check, creates, shape_argument)
        return check

    return register


def _overloads(*names: str) -> list[Any]:
    """ATen overloads that exist in this torch."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet, None), overload or "default", None)
        if operation is not None:
            found.append(operation)
    return found


_POINTWISE = _overloads(
    *[
        "add.Tensor",
        "add.Scalar",
        "sub.Tensor",
        "sub.Scalar",
        "rsub.Scalar",
        "rsub.Tensor",
        "mul.Tensor",
        "mul.Scalar",
        "div.Tensor",
        "div.Scalar",
    ],
    *[
        "neg",
        "abs",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "erf",
        "relu",
        "gelu",
        "silu",
    ],
    *[
        "pow.Tensor_Scalar",
        "pow.Tensor_Tensor",
        "maximum",
        "minimum",
        "clamp",
        "clamp_min",
        "clamp_max",
        "where.self",
        "alias",
        "clone",
    ],
    *[
        "_to_copy",
        "eq.Scalar",
        "eq.Tensor",
        "ne.Scalar",
        "ne.Tensor",
        "lt.Scalar",
        "lt.Tensor",
        "le.Scalar",
        "le.Tensor",
        "gt.Scalar",
        "gt.Tensor",
    ],
    *[
        "ge.Scalar",
        "ge.Tensor",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and.Tensor",
        "bitwise_or.Tensor",
        "bitwise_not",
    ],
    *[
        "isnan",
        "isinf",
        "floor",
        "ceil",
        "round",
        "trunc",
        "sign",
        "softplus",
        "leaky_relu",
        "hardtanh",
        "elu",
        "hardswish",
        "hardsigmoid",
        "mish",
    ],
    *[
        "div.Tensor_mode",
        "remainder.Scalar",
        "remainder.Tensor",
        "fmod.Tensor",
        "addcmul",
        "addcdiv",
        "lerp.Scalar",
        "lerp.Tensor",
    ],
)


@rule(*_POINTWISE, prims.convert_element_type.default)
def _pointwise(rows: Rows) -> str:
    rows.aligned()
    return "pointwise: rows aligned"


@rule(operator.getitem)
def _getitem(rows: Rows) -> str:
    return "part of a tuple"


@rule(*_overloads("view", "_unsafe_view", "reshape"), shape_argument=1)
def _view(rows: Rows) -> str:
    rows.only_first()
    if rows.output is None:
        raise Refusal("merges the token axis away")
    before, after = rows.inputs[0][0].meta["val"], rows.node.meta["val"]
    axis, count = rows.output
    outer = math.prod(before.shape[: rows.axis]), math.prod(after.shape[:axis])
    inner = math.prod(before.shape[rows.axis + 1 :]) * rows.rows, math.prod(after.shape[axis + 1 :]) * count
    if outer[0] != outer[1]:
        raise Refusal("merges another axis with the outside of the token axis")
    if inner[0] != inner[1]:
        raise Refusal("regroups rows across blocks")
    return "view: whole blocks of rows"


@rule(*_overloads("permute"))
def _permute(rows: Rows) -> str:
    rows.keep()
    return "layout: the token axis is followed"


@rule(
    *_overloads("transpose.int", "t", "squeeze.dim", "squeeze.dims", "squeeze", "unsqueeze", "view_as_complex", "view_as_real")
)
def _layout(rows: Rows) -> str:
    rows.keep()
    return "layout: the token axis is followed"


@rule(*_overloads("expand"), shape_argument=1, creates=_constant_rows)
def _expand(rows: Rows) -> str:
    rows.aligned()
    return "layout: the token axis is followed"


@rule(*_overloads("full", "zeros", "ones"), shape_argument=0, creates=_constant_rows)
def _full(rows: Rows) -> str:
    raise Refusal("is given a tensor")


@rule(prims.iota.default, shape_argument=0, creates=lambda rows: "row i is i, however many rows there are")
def _iota(rows: Rows) -> str:
    raise Refusal("is given a tensor")


@rule(*_overloads("_embedding_bag", "_embedding_bag_forward_only"))
def _embedding_bag(rows: Rows) -> str:
    table, indices, offsets = rows.node.args[:3]
    weights = rows.argument(6, "per_sample_weights")
    if rows.of(table) is not None or rows.of(indices) is None or rows.of(offsets) is None or rows.argument(7, "include_last"):
        raise Refusal("looks bags up in a table that carries tokens, or in unknown bags")
    taken, bags = rows.of(indices)[1], rows.of(offsets)[1]
    start, step = offsets.kwargs.get("start"), offsets.kwargs.get("step")
    if offsets.target is not prims.iota.default or start != 0 or step * bags != taken:
        raise Refusal("looks up bags that are not equally long")
    if weights is not None and rows.of(weights) != (0, taken):
        raise Refusal("weighs bags by something whose rows are not aligned")
    if {user.args[1] for user in rows.node.users} != {0}:
        raise Refusal("reads the bookkeeping of bags")
    rows.keep(bags)
    return "equally long bags of a table without tokens"


@rule(*_overloads("full_like", "zeros_like", "ones_like"))
def _full_like(rows: Rows) -> str:
    rows.keep()
    return "equal rows"


@rule(*_overloads("select.int", "unbind.int"))
def _select(rows: Rows) -> str:
    if rows.axis in rows.dims(rows.argument(1, "dim", 0)):
        index = rows.argument(2, "index")
        result_alone = all(user.op == "output" for user in rows.node.users)
        if rows.output is not None or not isinstance(index, int) or not 0 <= index < rows.rows or not result_alone:
            raise Refusal("selects along the token axis")
        return "a result: a row of the first block, which is real"
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("slice.Tensor"))
def _slice(rows: Rows) -> str:
    if rows.axis in rows.dims(rows.argument(1, "dim", 0)):
        start, end = rows.argument(2, "start"), rows.argument(3, "end")
        whole = start in (0, None) and (end is None or (isinstance(end, int) and end >= 2**62))
        if not whole or rows.argument(4, "step", 1) != 1:
            raise Refusal("slices the token axis")
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("flip"), prims.rev.default)
def _flip(rows: Rows) -> str:
    if rows.axis in rows.dims(rows.argument(1, "dims")):
        raise Refusal("reverses the token axis")
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("split.Tensor", "split_with_sizes", "chunk"))
def _split(rows: Rows) -> str:
    if rows.axis in rows.dims(rows.argument(2, "dim", 0)):
        raise Refusal("splits the token axis")
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("cat", "stack"))
def _cat(rows: Rows) -> str:
    dim = rows.argument(1, "dim", 0)
    rank = rows.node.meta["val"].dim()
    if rows.output is None or dim % rank == rows.output[0]:
        raise Refusal("joins along the token axis")
    if len(rows.inputs) != len(set(rows.node.args[0])):
        raise Refusal("joins tensors with and without a token axis")
    rows.keep()
    if any(place[1:] != rows.inputs[0][1:] for place in rows.inputs):
        raise Refusal("joins tensors whose rows are not aligned")
    return "not along the token axis"


@rule(*_overloads("constant_pad_nd"))
def _pad(rows: Rows) -> str:
    if len(rows.argument(1, "pad")) // 2 >= rows.rank - rows.axis:
        raise Refusal("pads the token axis")
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("repeat"), shape_argument=1, creates=_constant_rows)
def _repeat(rows: Rows) -> str:
    repeats = list(rows.argument(1, "repeats"))
    if repeats[len(repeats) - (rows.rank - rows.axis)] != 1:
        raise Refusal("repeats the token axis")
    rows.keep()
    return "not along the token axis"


@rule(*_overloads("mm"))
def _mm(rows: Rows) -> str:
    return _matmul(rows, rows.node.args[0], rows.node.args[1])


@rule(*_overloads("addmm", "_addmm_activation"))
def _addmm(rows: Rows) -> str:
    bias, left, right = rows.node.args[:3]
    if rows.of(bias) is not None and rows.of(bias) != (0, rows.rows):
        raise Refusal("adds a bias whose rows are not aligned")
    return _matmul(rows, left, right)


def _matmul(rows: Rows, left: Any, right: Any) -> str:
    if rows.of(right) is not None or rows.of(left) is None or rows.of(left)[0] != 0:
        raise Refusal("contracts the token axis")
    rows.keep()
    return "tokens only in the rows of the left factor"


@rule(*_overloads("bmm"))
def _bmm(rows: Rows) -> str:
    return _batched_matmul(rows, *rows.node.args[:2])


@rule(*_overloads("baddbmm"))
def _baddbmm(rows: Rows) -> str:
    bias, left, right = rows.node.args[:3]
    if rows.of(bias) is not None and (rows.of(bias) != rows.output or bias.meta["val"].dim() != 3):
        raise Refusal("adds a bias whose rows are not aligned")
    return _batched_matmul(rows, left, right)


def _batched_matmul(rows: Rows, first: Any, second: Any) -> str:
    left, right = rows.of(first), rows.of(second)
    rows.keep((left or rows.inputs[0][1:])[1])
    if left is not None and left[0] == 0 and right in (None, left):
        if right is None and second.meta["val"].shape[0] != 1:
            raise Refusal("pairs a batch of tokens with a batch of something else")
        return "tokens in the batch"
    if left is not None and left[0] == 1 and right is None:
        return "tokens in the rows of the left factor"
    raise Refusal("contracts or mixes the token axis")


_REDUCE = ("var_mean.correction", "var.correction", "mean.dim", "sum.dim_IntList", "amax", "amin", "prod.dim_int")


@rule(*_overloads(*_REDUCE, "any.dim", "any.dims", "all.dim", "all.dims", "argmax", "argmin"))
def _reduce(rows: Rows) -> str:
    dims = rows.argument(1, "dim")
    if dims is None or dims == [] or rows.axis in rows.dims(dims):
        raise Refusal("reduces the token axis")
    rows.keep()
    return "reduces other axes"


@rule(*_overloads("_softmax", "_log_softmax"))
def _softmax(rows: Rows) -> str:
    if rows.axis in rows.dims(rows.argument(1, "dim")):
        raise Refusal("takes a softmax over the token axis")
    rows.keep()
    return "softmax over another axis"


@rule(*_overloads("native_layer_norm"))
def _layer_norm(rows: Rows) -> str:
    rows.only_first()
    if rows.axis >= rows.rank - len(rows.argument(1, "normalized_shape")):
        raise Refusal("normalises over the token axis")
    return "normalises other axes"


@rule(*_overloads("convolution"))
def _convolution(rows: Rows) -> str:
    rows.only_first()
    if rows.inputs[0][0] is not rows.node.args[0] or rows.axis == 1:
        raise Refusal("convolves over the token axis")
    if rows.axis == 0:
        rows.keep()
        return "tokens in the batch"
    weight, stride, padding, dilation, transposed = (rows.node.args[i] for i in (1, 3, 4, 5, 6))
    length = weight.meta["val"].shape[rows.axis]
    step, pad, spread = (_per_axis(v, rows.axis - 2) for v in (stride, padding, dilation))
    if transposed or not isinstance(length, int) or (step, pad, spread) != (length, 0, 1) or rows.rows % length:
        raise Refusal("convolves over the token axis")
    rows.keep(rows.rows // length)
    return "whole patches, side by side"


def _per_axis(value: Any, axis: int) -> Any:
    return value[axis] if len(value) > 1 else value[0]


@rule(*_overloads("embedding"))
def _embedding(rows: Rows) -> str:
    if rows.of(rows.node.args[0]) is not None:
        raise Refusal("looks rows up in a table that carries tokens")
    rows.lookup(rows.node.args[1])
    rows.keep()
    return "a table without tokens, looked up by metadata"


@rule(*_overloads("bucketize.Tensor"))
def _bucketize(rows: Rows) -> str:
    if rows.of(rows.node.args[1]) is not None:
        raise Refusal("sorts values into buckets whose boundaries carry tokens")
    rows.aligned()
    return "pointwise: rows aligned"


@rule(*_overloads("index.Tensor"))
def _index(rows: Rows) -> str:
    source, indices = rows.node.args[:2]
    place = rows.of(source)
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    carrying = [(axis, index) for axis, index in given if rows.of(index) is not None]
    if place is None:
        if rows.output is None or any(rows.of(i) != rows.of(carrying[0][1]) for _, i in carrying):
            raise Refusal("indexes with indices whose rows are not aligned")
        for _, index in carrying:
            rows.lookup(index)
        rows.keep(rows.of(carrying[0][1])[1])
        return "a table without tokens, looked up by metadata"
    if place[0] not in [axis for axis, _ in given]:
        if carrying:
            raise Refusal("indexes another axis by something that carries tokens")
        rows.keep(place[1])
        return "not along the token axis"
    index = dict(given)[place[0]]
    shape = index.meta["val"].shape
    one_each = rows.of(index) is not None and math.prod(shape[: rows.of(index)[0]] + shape[rows.of(index)[0] + 1 :]) == 1
    if not one_each or len(carrying) != 1 or index.meta["val"].dtype == torch.bool:
        raise Refusal("gathers along the token axis by an index that is not one entry a row")
    rows.gather(index, rows.of(index)[1], place[1])
    rows.keep(rows.of(index)[1])
    return "gather by metadata that is checked for each layout"


@rule(
    *_overloads(
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    )
)
def _sdpa(rows: Rows) -> str:
    factors = [rows.of(factor) for factor in rows.node.args[:3]]  # of a layer that attends to itself all three may be one
    ranks = {source.meta["val"].dim() for source, _, _ in rows.inputs}  # a mask of fewer axes has its first one elsewhere
    if any(axis != 0 or count != rows.rows for _, axis, count in rows.inputs) or None in factors or len(ranks) != 1:
        raise Refusal("attends over the token axis outside of segments")
    return "tokens in the batch"
