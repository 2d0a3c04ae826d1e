"""Each rule of the padding proof: a body that it accepts and one that it refuses, as ATen graphs, beside a numeric oracle.

The table of rules is walked: an operation without both of its bodies fails here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from vitcg_backend.passes.graph import Ineligible, Symbols, rows_of, token_axes
from vitcg_backend.passes.prove_padding import Proof, prove_padding
from vitcg_backend.passes.row_rules import RULES

aten, prims = torch.ops.aten, torch.ops.prims
REAL, PADDED = 3, 5  # tokens of the oracle: alone, and with a tail that differs


class Body:
    """A graph under construction; a size such as ``"4n"`` follows the tokens."""

    def __init__(self) -> None:
        self.symbols, self.graph = Symbols.create(4), fx.Graph()
        self.n = self.graph.placeholder("n")
        self.n.meta["val"] = self.symbols.n
        self.makers: list[Callable[[int], Tensor]] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with enable_python_dispatcher(), self.symbols.mode:  # as AOTAutograd does: shapes with symbols
            node.meta["val"] = target(*args, **kwargs)
        return node

    def tokens(self, count: int) -> fx.Node:
        """The size ``count * n``."""
        return self(operator.mul, self.n, count)

    def input(
        self, *shape: int | str, dtype: torch.dtype = torch.float32, values: Callable[[int], Tensor] | None = None
    ) -> Any:
        """An input of random numbers, or of ``values(number of tokens)``."""
        node = self.graph.placeholder(f"x{len(self.makers)}")
        with self.symbols.mode:
            node.meta["val"] = torch.empty([_size(s, self.symbols.n) for s in shape], dtype=dtype)
        self.makers.append(values or _random(shape, dtype, seed=len(self.makers)))
        return node

    def closed(self, rows: int = 4) -> Any:
        """A permutation that keeps real rows and padded ones apart, int64 [rows * n]."""
        return self.input(f"{rows}n", dtype=torch.int64, values=lambda n: _backwards(rows * REAL, rows * n))

    def positions(self, rows: int = 4) -> Any:
        """Places in a table of eight rows, int64 [rows * n]."""
        return self.input(f"{rows}n", dtype=torch.int64, values=lambda n: torch.arange(rows * n) % 8)

    def finish(self, result: Any) -> fx.GraphModule:
        """The module that returns `result`."""
        self.graph.output((result,))
        return fx.GraphModule({}, self.graph)


def _size(size: int | str, n: Any) -> Any:
    return size if isinstance(size, int) else n * int(size[:-1] or 1)


def _backwards(real: int, rows: int) -> Tensor:
    return torch.cat([torch.arange(real).flip(0), torch.arange(real, rows).flip(0)])


def _random(shape: Any, dtype: torch.dtype, seed: int) -> Callable[[int], Tensor]:
    """Random numbers, the same for every real row however many rows there are; the tail is far from them."""

    def values(n: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        result = torch.rand([_size(s, REAL) for s in shape], generator=chance) + 0.1
        for axis, size in enumerate(shape):
            if isinstance(size, str) and n > REAL:
                tail = [*result.shape]
                tail[axis] = _size(size, n - REAL)
                result = torch.cat([result, torch.rand(tail, generator=chance).sub_(0.5).mul_(6)], axis)
        return (result * 3).to(dtype) if not dtype.is_floating_point else result.to(dtype)

    return values


Case = Callable[[Body], Any]
ACCEPTED: dict[Any, Case] = {}
REFUSED: dict[Any, Case] = {}

STRICTER = {"_embedding_bag", "_embedding_bag_forward_only", "index.Tensor", "getitem"}
"""Rules that refuse a body in which no row changes: what they say is true of other bodies of this form."""


# --- pointwise: made from the operations' own signatures --------------------------------------------------------------

_BITS = {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default}
_FIXED: dict[Any, dict[str, Any]] = {
    aten.div.Tensor_mode: {"rounding_mode": "floor"},
    aten.clamp.default: {"min": 0.2},
    prims.convert_element_type.default: {"dtype": torch.float64},
    aten._to_copy.default: {"dtype": torch.float64},
}


def _pointwise(target: Any, tensor: Callable[[int], Any], scalar: Any = 2) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a pointwise operation: ``tensor(0), tensor(1), …`` and numbers, from its signature."""
    args: list[Any] = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            args.append(tensor(len(args)))
        elif not argument.has_default_value() and argument.name not in _FIXED.get(target, {}):
            args.append(scalar)
    return args, _FIXED.get(target, {})


def _rows(target: Any) -> Case:
    def case(b: Body) -> Any:
        dtypes = [torch.bool] if target is aten.where.self else []
        plain = torch.int64 if target in _BITS else torch.float32
        args, kwargs = _pointwise(target, lambda i: b.input("4n", 8, dtype=dtypes[i] if i < len(dtypes) else plain))
        return b(target, *args, **kwargs)

    return case


def _number_of_tokens(target: Any) -> Case:
    """The number of tokens in place of a number."""

    def case(b: Body) -> Any:
        values = torch.tensor([3.0, 4.0] * 4)  # 3 tokens alone, 5 with a tail: every comparison tells one of these apart
        args, kwargs = _pointwise(target, lambda i: b.input("4n", 8, values=lambda n: values.expand(4 * n, 8)), scalar=b.n)
        return b(target, *args, **({"max": b.n} if target is aten.clamp.default else kwargs))

    return case


def _square(target: Any) -> Case:
    """Every row beside every row: two token axes."""

    def case(b: Body) -> Any:
        plain = torch.int64 if target in _BITS else torch.float32
        args, kwargs = _pointwise(target, lambda i: b.input("4n", "4n", dtype=plain))
        return b(target, *args, **kwargs)

    return case


def _crossed(target: Any) -> Case:
    """Rows of one operand meet all rows of another."""

    def case(b: Body) -> Any:
        first = torch.bool if target is aten.where.self else torch.int64 if target in _BITS else torch.float32
        plain = torch.int64 if target in _BITS else torch.float32
        args, kwargs = _pointwise(target, lambda i: b.input("4n", dtype=plain) if i else b.input("4n", 1, dtype=first))
        return b(target, *args, **kwargs)

    return case


def _add_pointwise() -> None:
    pointwise = RULES[aten.relu.default].check
    for target, rule in RULES.items():
        if rule.check is not pointwise:
            continue
        kinds = [str(a.type) for a in target._schema.arguments]
        free = any(str(a.type) == "number" and not a.has_default_value() for a in target._schema.arguments)
        free |= target is aten.clamp.default
        ACCEPTED[target] = _rows(target)
        REFUSED[target] = (
            _crossed(target) if kinds.count("Tensor") > 1 else _number_of_tokens(target) if free else _square(target)
        )


_add_pointwise()

# --- the others, by hand ----------------------------------------------------------------------------------------------


def _both(targets: Any, accepted: Callable[[Any], Case], refused: Callable[[Any], Case]) -> None:
    for target in targets if isinstance(targets, (list, tuple)) else [targets]:
        ACCEPTED[target], REFUSED[target] = accepted(target), refused(target)


def _second_axis(target: Any, *args: Any, shape: tuple[Any, ...] = ("4n", "4n"), dtype: Any = torch.float32) -> Case:
    return lambda b: b(target, b.input(*shape, dtype=dtype), *args)


_both(
    [aten.view.default, aten._unsafe_view.default, aten.reshape.default],
    lambda t: lambda b: b(t, b.input("4n", 8), [b.n, 32]),
    lambda t: lambda b: b(t, b.input(8, "4n"), [b.tokens(4), 8]),
)
_both(aten.permute.default, lambda t: lambda b: b(t, b.input("4n", 8), [1, 0]), lambda t: _second_axis(t, [1, 0]))
_both(aten.transpose.int, lambda t: lambda b: b(t, b.input("4n", 8), 0, 1), lambda t: _second_axis(t, 0, 1))
_both(aten.t.default, lambda t: lambda b: b(t, b.input("4n", 8)), _second_axis)
_both(aten.squeeze.dim, lambda t: lambda b: b(t, b.input("4n", 1), 1), lambda t: _second_axis(t, 2, shape=("4n", "4n", 1)))
_both(aten.squeeze.dims, lambda t: lambda b: b(t, b.input("4n", 1), [1]), lambda t: _second_axis(t, [2], shape=("4n", "4n", 1)))
_both(aten.squeeze.default, lambda t: lambda b: b(t, b.input("4n", 1)), lambda t: _second_axis(t, shape=("4n", "4n", 1)))
_both(aten.unsqueeze.default, lambda t: lambda b: b(t, b.input("4n", 8), 1), lambda t: _second_axis(t, 1))
_both(
    aten.view_as_complex.default,
    lambda t: lambda b: b(t, b.input("4n", 2)),
    lambda t: _second_axis(t, shape=("4n", "4n", 2)),
)
_both(
    aten.view_as_real.default,
    lambda t: lambda b: b(t, b.input("4n", dtype=torch.complex64)),
    lambda t: _second_axis(t, dtype=torch.complex64),
)
_both(
    aten.expand.default,
    lambda t: lambda b: b(aten.add.Tensor, b(t, b.input("4n", 1), [b.tokens(4), 8]), b(t, b.input(8), [b.tokens(4), 8])),
    lambda t: lambda b: b(t, b.input("4n", 1), [b.tokens(4), b.tokens(4)]),
)
_both(aten.full.default, lambda t: lambda b: b(t, [b.tokens(4), 8], 2.0), lambda t: lambda b: b(t, [b.tokens(4), 8], b.n))
_both(
    [aten.zeros.default, aten.ones.default],
    lambda t: lambda b: b(t, [b.tokens(4), 8]),
    lambda t: lambda b: b(t, [b.tokens(4), b.tokens(4)]),
)
_IOTA = {"dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
_both(
    prims.iota.default,
    lambda t: lambda b: b(t, b.tokens(4), start=0, step=1, **_IOTA),
    lambda t: lambda b: b(t, b.tokens(4), start=b.tokens(4), step=-1, **_IOTA),
)
_both(
    aten.full_like.default,
    lambda t: lambda b: b(t, b.input("4n", 8), 2.0),
    lambda t: lambda b: b(t, b.input("4n", 8), b.n),
)
_both([aten.zeros_like.default, aten.ones_like.default], lambda t: lambda b: b(t, b.input("4n", 8)), _second_axis)


def _bags(target: Any, even: bool) -> Case:
    def case(b: Body) -> Any:
        table, indices = b.input(8, 8), b.positions(12)
        offsets = b(prims.iota.default, b.tokens(4), start=0, step=3, **_IOTA)
        if not even:
            offsets = b.input("4n", dtype=torch.int64, values=lambda n: torch.arange(0, 12 * n, 3))
        return b(operator.getitem, b(target, table, indices, offsets), 0)

    return case


_both(
    [aten._embedding_bag.default, aten._embedding_bag_forward_only.default],
    lambda t: _bags(t, even=True),
    lambda t: _bags(t, even=False),
)


def _parts_of_two_sizes(b: Body) -> Any:
    offsets = b(prims.iota.default, b.tokens(4), start=0, step=3, **_IOTA)
    bags = b(aten._embedding_bag.default, b.input(8, 8), b.positions(12), offsets)
    return b(aten.add.Tensor, b(operator.getitem, bags, 0), b(aten.sum.dim_IntList, b(operator.getitem, bags, 3), [0]))


_both(
    operator.getitem,
    lambda t: lambda b: b(t, b(aten.split.Tensor, b.input("4n", 8), 4, 1), 1),
    lambda t: _parts_of_two_sizes,
)
_both(
    aten.select.int,
    lambda t: lambda b: b(t, b.input("4n", 8), 1, 3),
    lambda t: lambda b: b(aten.add.Tensor, b.input("4n", 8), b(t, b.input("4n", 8), 0, -1)),
)
_both(
    aten.unbind.int,
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 2), 1), 1),
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", "4n", 2), 2), 1),
)
_both(
    aten.slice.Tensor,
    lambda t: lambda b: b(t, b.input("4n", 8), 1, 2, 6),
    lambda t: lambda b: b(aten.add.Tensor, b.input("4n", 8), b(t, b.input("4n", 8), 0, -1)),
)
_both(
    [aten.flip.default, prims.rev.default],
    lambda t: lambda b: b(t, b.input("4n", 8), [1]),
    lambda t: lambda b: b(t, b.input("4n", 8), [0]),
)
_both(
    aten.split.Tensor,
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), 4, 1), 1),
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), b.tokens(2), 0), 1),
)
_both(
    aten.split_with_sizes.default,
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), [2, 6], 1), 1),
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), [b.tokens(2), b.tokens(2)], 0), 1),
)
_both(
    aten.chunk.default,
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), 2, 1), 1),
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), 2, 0), 1),
)
_both(
    aten.cat.default,
    lambda t: lambda b: b(t, [b.input("4n", 8), b.input("4n", 4)], 1),
    lambda t: lambda b: b(t, [b.input("4n", 8), b.input("4n", 8)], 0),
)
_both(
    aten.stack.default,
    lambda t: lambda b: b(t, [b.input("4n", 8), b.input("4n", 8)], 1),
    lambda t: lambda b: b(t, [b.input("4n", "4n"), b.input("4n", "4n")], 1),
)
_both(
    aten.constant_pad_nd.default,
    lambda t: lambda b: b(t, b.input("4n", 8), [1, 2], 0.5),
    lambda t: lambda b: b(t, b.input("4n", 8), [0, 0, -4, 4], 0.5),
)
_both(
    aten.repeat.default,
    lambda t: lambda b: b(t, b.input("4n", 8), [1, 2]),
    lambda t: lambda b: b(t, b.input("4n", 8), [2, 1]),
)
_both(
    aten.mm.default,
    lambda t: lambda b: b(t, b.input("4n", 8), b.input(8, 8)),
    lambda t: (
        lambda b: b(aten.mul.Tensor, b.input("4n", 8), b(aten.amax.default, b(t, b.input(8, "4n"), b.input("4n", 8)), [0]))
    ),
)
_both(
    [aten.addmm.default, aten._addmm_activation.default],
    lambda t: lambda b: b(t, b.input(8), b.input("4n", 8), b.input(8, 8)),
    lambda t: lambda b: b(aten.mm.default, b.input("4n", 8), b(t, b.input(8), b.input(8, "4n"), b.input("4n", 8))),
)
_both(
    aten.bmm.default,
    lambda t: lambda b: b(t, b.input("4n", 2, 3), b.input("4n", 3, 2)),
    lambda t: lambda b: b(t, b.input(1, "4n", 8), b(t, b.input(1, 8, "4n"), b.input(1, "4n", 8))),
)
_both(
    aten.baddbmm.default,
    lambda t: lambda b: b(t, b.input("4n", 2, 2), b.input("4n", 2, 3), b.input("4n", 3, 2)),
    lambda t: (
        lambda b: b(aten.bmm.default, b.input(1, "4n", 8), b(t, b.input(1, 8, 8), b.input(1, 8, "4n"), b.input(1, "4n", 8)))
    ),
)
_both(
    aten.bucketize.Tensor,
    lambda t: lambda b: b(t, b.input("4n"), b.input(3, values=lambda n: torch.tensor([0.3, 0.5, 0.9]))),
    lambda t: (
        lambda b: b(
            t,
            b.input("4n", values=lambda n: torch.full((4 * n,), 1e3)),
            b.input("4n", values=lambda n: torch.arange(4.0 * n)),
        )
    ),
)


def _truth(target: Any, dims: Any) -> Case:
    """Over rows of which the padded ones alone are true (any) or false (all)."""

    def values(n: int) -> Tensor:
        padded = torch.arange(4 * n)[:, None].expand(-1, 8) >= 4 * REAL
        return padded if "any" in str(target) else ~padded

    def case(b: Body) -> Any:
        reduced = b(target, b.input("4n", 8, dtype=torch.bool, values=values), dims)
        return reduced if dims in (1, [1]) else b(aten.mul.Tensor, b.input("4n", 8), reduced)

    return case


_both([aten.any.dim, aten.all.dim], lambda t: _truth(t, 1), lambda t: _truth(t, 0))
_both([aten.any.dims, aten.all.dims], lambda t: _truth(t, [1]), lambda t: _truth(t, [0]))


def _reduced(target: Any, dims: Any) -> Case:
    def case(b: Body) -> Any:
        x = b.input("4n", 8)
        reduced = b(target, x, dims, **({"correction": 0} if "correction" in str(target) else {}))
        if target is aten.var_mean.correction:
            reduced = b(operator.getitem, reduced, 1)
        return reduced if dims in (1, [1]) else b(aten.sub.Tensor, x, reduced)

    return case


_both(
    [aten.var_mean.correction, aten.var.correction, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default],
    lambda t: _reduced(t, [1]),
    lambda t: _reduced(t, [0]),
)
_both([aten.prod.dim_int, aten.argmax.default, aten.argmin.default], lambda t: _reduced(t, 1), lambda t: _reduced(t, 0))
_both(
    [aten._softmax.default, aten._log_softmax.default],
    lambda t: lambda b: b(t, b.input("4n", 8), -1, False),
    lambda t: lambda b: b(t, b.input("4n", 8), -2, False),
)
_both(
    aten.native_layer_norm.default,
    lambda t: lambda b: b(operator.getitem, b(t, b.input("4n", 8), [8], b.input(8), b.input(8), 1e-6), 0),
    lambda t: lambda b: b(operator.getitem, b(t, b.input(8, "4n"), [b.tokens(4)], None, None, 1e-6), 0),
)
_both(
    aten.convolution.default,
    lambda t: lambda b: b(t, b.input(1, 3, "8n"), b.input(8, 3, 2), None, [2], [0], [1], False, [0], 1),
    lambda t: lambda b: b(t, b.input(1, 3, "8n"), b.input(8, 3, 3), None, [1], [1], [1], False, [0], 1),
)
_both(
    aten.embedding.default,
    lambda t: lambda b: b(t, b.input(8, 8), b.positions()),
    lambda t: lambda b: b(t, b.input("4n", 8), b.input("4n", dtype=torch.int64, values=lambda n: torch.arange(4 * n).flip(0))),
)
_both(
    aten.index.Tensor,
    lambda t: lambda b: b(aten.add.Tensor, b(t, b.input("4n", 8), [b.closed()]), b(t, b.input(8, 8), [b.positions()])),
    lambda t: lambda b: b(t, b.input("4n", 8), [b(aten.add.Tensor, b.closed(), 0)]),
)


def _attends(target: Any, shape: tuple[Any, ...]) -> Case:
    def case(b: Body) -> Any:
        q, k, v = (b.input(*shape) for _ in range(3))
        efficient, cudnn = "efficient" in str(target), "cudnn" in str(target)
        more = (None, False) if efficient else (None, True) if cudnn else ()
        return b(operator.getitem, b(target, q, k, v, *more), 0)

    return case


_both(
    [t for t, rule in RULES.items() if "scaled_dot_product" in str(t)],
    lambda t: _attends(t, ("n", 2, 4, 8)),
    lambda t: _attends(t, (1, 2, "4n", 8)),
)
_NOT_ON_CPU = re.compile(r"scaled_dot_product_(flash_attention.default|efficient|cudnn)|_addmm_activation")


# --- the tests --------------------------------------------------------------------------------------------------------


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target)).removesuffix(".default") if target is not operator.getitem else "getitem"


def build(case: Case) -> tuple[fx.GraphModule, Body, Any]:
    """The graph of a case, what it was built with, and its result."""
    body = Body()
    result = case(body)
    return body.finish(result), body, result


def prove(case: Case) -> Proof:
    gm, body, _ = build(case)
    return prove_padding(gm, body.symbols)


def mixes(case: Case) -> bool | None:
    """The oracle: whether a real row changes when a tail appears; None where the result has no single token axis."""
    gm, body, result = build(case)
    axes = token_axes(result.meta["val"], body.symbols)
    if len(axes) != 1:
        return None
    with torch.no_grad():
        alone, padded = (gm(n, *[make(n) for make in body.makers])[0] for n in (REAL, PADDED))
    real = padded.narrow(axes[0], 0, REAL * rows_of(result.meta["val"], axes[0], body.symbols))
    same = real.shape == alone.shape and torch.allclose(real, alone, rtol=1e-4, atol=1e-5, equal_nan=True)
    return not same


def test_every_rule_has_both_bodies() -> None:
    """An operation with a rule and without a body that it accepts, or one that it refuses, is a gap in these tests."""
    assert sorted(map(_name, RULES)) == sorted(map(_name, ACCEPTED)) == sorted(map(_name, REFUSED))


@pytest.mark.parametrize("target", RULES, ids=_name)
def test_accepts(target: Any) -> None:
    """The operation is in the proof, and a tail changes no real row."""
    proof = prove(ACCEPTED[target])
    assert [text for op, text in proof.rules if op == str(target) and text != "no token axis"], proof.rules
    if not _NOT_ON_CPU.search(str(target)):
        assert mixes(ACCEPTED[target]) is False


@pytest.mark.parametrize("target", RULES, ids=_name)
def test_refuses(target: Any) -> None:
    """The refusal names the operation; the oracle sees a real row change, or the rule is known to be stricter."""
    with pytest.raises(Ineligible) as refusal:
        prove(REFUSED[target])
    assert refusal.value.reason in ("unproved", "odd_rows")
    assert str(target) in str(refusal.value) or target is operator.getitem, refusal.value
    if not _NOT_ON_CPU.search(str(target)):
        assert (mixes(REFUSED[target]) is False) is (_name(target) in STRICTER)


def test_an_unknown_operation_is_refused() -> None:
    """Whatever touches a token axis and is not in the table."""
    for case in (lambda b: b(aten.cumsum.default, b.input("4n", 8), 0), lambda b: b(aten.empty.memory_format, [b.tokens(4)])):
        with pytest.raises(Ineligible, match="has no rule"):
            prove(case)
