"""Rewrite: arithmetic on complex numbers is arithmetic on their real and imaginary parts.

Why: Inductor makes no kernels for complex tensors: each operation on them is a call of torch's own, a pass over memory that
nothing is fused with. Llama-4 rotates q and k by a complex product: six kernels a block, four of which only convert and copy;
rewritten it is one, of q and k together. On a CPU torch's own kernels are faster than what Inductor makes of it.

A complex tensor is here a real one with a last axis of two, as it lies in memory: `view_as_complex` and `view_as_real` are
nothing, and a product is one pointwise operation. torch has such a rewrite from 2.13 on (`decompose_complex_in_graph`,
torch/_functorch/_aot_autograd/complex_decomposition.py), off by default: it traces the graph once more, raises at an operation
that it does not know, and holds the parts apart, so that the end of each product is a masked copy.

Numerics: (a + bi)(c + di) = (ac - bd) + (ad + bc)i in the precision of the parts, as torch's kernels compute it: bit-equal but
where a compiler fuses a product with a sum, so within the error budget. With a real factor r it is (ar, br), where torch
multiplies by r + 0i: another result for infinities alone. It changes no piece that runs eagerly.

Preconditions: an ATen graph without mutations.

Cases: complex values that meet in an operation are a region, which is rewritten as a whole or left as it is. 1. Its values are
inputs of the graph, which do not join regions, or made by the operations of `_FORMS`: from real tensors, by products, sums
and conjugation, or by moving numbers. 2. They leave it by `view_as_real`, or as results of the graph (`view_as_complex`), with
the strides that the next piece expects. 3. They are complex64 or complex128, on CUDA. 4. A sum has two complex terms; a factor
is complex, a real number or a real tensor (not one number of higher precision, which torch rounds first). 5. Every region of a
graph that reads memory by strides is left alone.

Before::

    # q: f32[n, 577, 16, 44, 2], freqs: c64[1, 577, 1, 44]
    %z = aten.view_as_complex(%q);  %m = aten.mul(%z, %freqs);  %y = aten.view_as_real(%m)

After::

    %f = aten.view_as_real(%freqs);  %re = aten.unsqueeze(aten.select(%f, -1, 0), -1)       # f32[1, 577, 1, 44, 1], as is %im
    %y = aten.add(aten.mul(%q, %re), aten.mul(prims.rev(%q, [4]), aten.mul(%im, prims.iota(2, start = -1, step = 2))))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .graph import adding_before, erase_unread, reads_by_strides

__all__ = ["complex_to_real"]

aten, prims = torch.ops.aten, torch.ops.prims
_AS_REAL = aten.view_as_real.default
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}

Add = Callable[..., fx.Node]
Real = Callable[[Any], Any]
"""The real form of an argument, None where that is not complex."""


def complex_to_real(gm: fx.GraphModule, *, device_type: str = "cuda") -> fx.GraphModule:
    """Rewrite every such region (see the module's text); a graph without one comes back as the same object.

    Args:
        gm: an ATen piece with ``meta["val"]``. It is changed.
        device_type: where the rewrite holds.
    """
    given = set(gm.graph.nodes)
    values = [node for node in gm.graph.nodes if _is_complex(node) and node.op != "placeholder"]
    if not values or reads_by_strides(gm):
        return gm
    forms: dict[fx.Node, fx.Node | None] = {}
    for node in values:
        with adding_before(node) as add:
            forms[node] = _form(node, forms, add, device_type)
    done = {node for region in _regions(values) if all(_may_be_real(one, forms) for one in region) for node in region}
    unread = {*done, *(user for node in done for user in node.users if user.target is _AS_REAL)}
    for node in (node for node in values if node in done):
        form = forms[node]
        if form in unread:  # a view of another region's value, and that is no longer read
            forms[node] = forms[form.args[0]]  # type: ignore[union-attr,index]
        _give_form(node, forms[node])
    erase_unread(gm, unread | (set(gm.graph.nodes) - given))
    if done:
        gm.graph.lint()
        gm.recompile()
    return gm


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _regions(values: list[fx.Node]) -> list[set[fx.Node]]:
    """The values that meet in an operation, in groups."""
    group: dict[fx.Node, set[fx.Node]] = {}
    for node in values:
        joined = {node}.union(*(group[source] for source in node.all_input_nodes if source in group))
        group |= dict.fromkeys(joined, joined)
    return list({id(region): region for region in group.values()}.values())


def _may_be_real(node: fx.Node, forms: dict[fx.Node, fx.Node | None]) -> bool:
    """Whether a value has a real form with which all that read it can do; those in `forms` are of its region and asked, too."""
    form = forms[node]
    return form is not None and all(user in forms or _reads(user, node, form) for user in node.users)


def _reads(user: fx.Node, node: fx.Node, form: fx.Node) -> bool:
    """Whether what is not complex, or the graph's results, can have the real form; results lie as the next piece expects."""
    if user.op == "output":
        return _strides(node.meta["val"]) == _rows(node.meta["val"])
    is_result = any(reader.op == "output" for reader in user.users)
    return user.target is _AS_REAL and (not is_result or _strides(form.meta["val"]) == _strides(user.meta["val"]))


def _strides(value: Tensor) -> list[Any]:
    """Strides as expressions, which are compared without a guard on a size."""
    return [_expression(stride) for stride in value.stride()]


def _rows(value: Tensor) -> list[Any]:
    """The strides of a tensor that lies in memory row after row."""
    strides: list[Any] = [1]
    for size in reversed(value.shape[1:]):
        strides.insert(0, strides[0] * size)
    return [_expression(stride) for stride in strides[: value.dim()]]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _give_form(node: fx.Node, form: fx.Node | None) -> None:
    """Let what reads a complex value from outside of its region read its real form."""
    for user in list(node.users):
        if user.target is _AS_REAL:
            user.replace_all_uses_with(form)  # type: ignore[arg-type]  # every value of a region that is rewritten has one
        elif user.op == "output":
            with adding_before(node) as add:
                rows = add(aten.clone.default, form, memory_format=torch.contiguous_format)
                user.replace_input_with(node, add(aten.view_as_complex.default, rows))


# --- the real form of each value -----------------------------------------------------------------------------------


def _form(node: fx.Node, forms: dict[fx.Node, fx.Node | None], add: Add, device_type: str) -> fx.Node | None:
    """The real form of a complex value, None where it has none here. An input gets its form where it is first read."""
    make, part = _FORMS.get(node.target), _PARTS.get(node.meta["val"].dtype)
    tensors = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta["val"], Tensor)]
    if make is None or part is None or any(t.device.type != device_type for t in (node.meta["val"], *tensors)):
        return None
    if node.kwargs.keys() - {"alpha", "memory_format"}:
        return None
    for source in (source for source in node.all_input_nodes if _is_complex(source)):
        if source.op == "placeholder" and source not in forms:  # one that is to be conjugated when it is read becomes a copy
            forms[source] = add(_AS_REAL, add(aten.resolve_conj.default, source))
        if forms[source] is None:
            return None
    form = make(add, node, lambda argument: forms.get(argument) if isinstance(argument, fx.Node) else None)
    return form if form is not None and form.meta["val"].dtype == part else None


def _signs(add: Add, form: fx.Node, first: int, step: int) -> fx.Node:
    """Two whole numbers for a last axis: those of the real and of the imaginary part. Kernels compute them from an index."""
    device = form.meta["val"].device
    return add(prims.iota.default, 2, start=first, step=step, dtype=torch.int64, device=device, requires_grad=False)


def _part(add: Add, form: fx.Node, index: int) -> fx.Node:
    """The real or the imaginary parts, with a last axis of one."""
    return add(aten.unsqueeze.default, add(aten.select.int, form, -1, index), -1)


def _pair(add: Add, re: fx.Node, im: fx.Node) -> fx.Node:
    re, im = (add(aten.unsqueeze.default, part, -1) for part in (re, im))
    return add(aten.where.self, add(aten.eq.Scalar, _signs(add, re, 0, 1), 0), re, im)


def _complex(add: Add, node: fx.Node, real: Real) -> fx.Node:
    return _pair(add, *node.args)


def _polar(add: Add, node: fx.Node, real: Real) -> fx.Node:
    length, angle = node.args
    return _pair(add, *(add(aten.mul.Tensor, length, add(turn, angle)) for turn in (aten.cos.default, aten.sin.default)))


def _product(add: Add, node: fx.Node, real: Real) -> fx.Node | None:
    one, other = map(real, node.args)
    if one is None or other is None:
        return _scaled(add, one or other, node.args[1] if other is None else node.args[0])
    mixed = add(aten.mul.Tensor, _part(add, other, 1), _signs(add, other, -1, 2))
    turned = add(prims.rev.default, one, [one.meta["val"].dim() - 1])
    return add(aten.add.Tensor, add(aten.mul.Tensor, one, _part(add, other, 0)), add(aten.mul.Tensor, turned, mixed))


def _scaled(add: Add, form: fx.Node, factor: Any) -> fx.Node:
    if isinstance(factor, fx.Node) and isinstance(factor.meta["val"], Tensor):
        factor = add(aten.unsqueeze.default, factor, -1)
    return add(aten.mul.Tensor, form, factor)


def _sum(add: Add, node: fx.Node, real: Real) -> fx.Node | None:
    one, other = map(real, node.args)
    if one is None or other is None or isinstance(node.kwargs.get("alpha"), complex):
        return None
    return add(node.target, one, other, **node.kwargs)


def _conjugate(add: Add, node: fx.Node, real: Real) -> fx.Node:
    form = real(node.args[0])
    return add(aten.mul.Tensor, form, _signs(add, form, 1, -2))


def _same(add: Add, node: fx.Node, real: Real) -> fx.Node:
    """What acts on each number alike, or on rows of them."""
    return add(node.target, real(node.args[0]), *node.args[1:])


def _reshaped(add: Add, node: fx.Node, real: Real) -> fx.Node:
    return add(aten.reshape.default, real(node.args[0]), [*node.args[1], 2])


def _expanded(add: Add, node: fx.Node, real: Real) -> fx.Node:
    return add(node.target, real(node.args[0]), [*node.args[1], 2])


def _permuted(add: Add, node: fx.Node, real: Real) -> fx.Node:
    rank = node.meta["val"].dim()
    return add(node.target, real(node.args[0]), [*(axis % rank for axis in node.args[1]), rank])


def _along(add: Add, node: fx.Node, real: Real) -> fx.Node:
    """What acts along an axis, the second argument, counted from behind in the tensor before or, `unsqueeze`, after it."""
    source, axis, *rest = (*node.args, 0)[: max(2, len(node.args))]
    counted = node if node.target is aten.unsqueeze.default else source
    return add(node.target, real(source), axis % max(counted.meta["val"].dim(), 1), *rest)


def _joined(add: Add, node: fx.Node, real: Real) -> fx.Node | None:
    sources, axis = (*node.args, 0)[:2]
    forms = [real(source) for source in sources]
    return None if None in forms else add(node.target, forms, axis % node.meta["val"].dim())


def _converted(add: Add, node: fx.Node, real: Real) -> fx.Node | None:
    form = real(node.args[0])
    return form and add(node.target, form, _PARTS[node.meta["val"].dtype])


_FORMS: dict[Any, Callable[[Add, fx.Node, Real], fx.Node | None]] = {
    aten.view_as_complex.default: lambda add, node, real: node.args[0],
    aten.complex.default: _complex,
    aten.polar.default: _polar,
    aten.mul.Tensor: _product,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten._conj.default: _conjugate,
    aten.conj_physical.default: _conjugate,
    aten.neg.default: _same,
    aten.clone.default: lambda add, node, real: add(aten.clone.default, real(node.args[0])),
    aten.index.Tensor: _same,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.unsqueeze.default: _along,
    aten.squeeze.dim: _along,
    aten.select.int: _along,
    aten.slice.Tensor: _along,
    aten.cat.default: _joined,
    prims.convert_element_type.default: _converted,
}
