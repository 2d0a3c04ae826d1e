"""Pass 1: the number of tokens becomes one private symbol, and every node gets its value in terms of it.

Why: Dynamo's own symbols come with guards, nested divisions and unknown sizes of the metadata operators (``u0``, equal to
the pixel rows by a deferred assert). With rows = unit * n in a private symbol environment every shape is ``c * n``.

Preconditions: exactly one pixel input with one symbolic axis; a grid that feeds the metadata operators; no operation with a
side effect.

Cases: 1. metadata operators get the rows as their ``tokens`` argument. 2. Deferred asserts and the arithmetic that only they
use are erased (the operators that follow raise eager's own error on a mismatch). 3. Each remaining node gets ``meta["val"]``,
a fake tensor or size in the private environment.

Before::

    %l_pixels : [s77, 96]   %l_grid : [u3, 3]
    %meta = vitcg.metadata(key, %l_grid, [], '{"spatial_merge_size": 2}')      # i64[u0, 2]
    %eq = operator.eq(s77, u0);  aten._assert_scalar(%eq, "...")

After::

    %l_pixels : [4*n, 96]   %l_grid : [items, 3]
    %meta = vitcg.metadata(key, %l_grid, [], '{"spatial_merge_size": 2}', %s77)   # i64[4*n, 2]
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch
from ..ops import METADATA
from .graph import Ineligible, Role, Symbols, source_line, where
from .repeats import Repeats

__all__ = ["METADATA_TARGETS", "Bound", "bind_tokens", "erase_asserts", "give_tokens", "role_of"]

METADATA_TARGETS = (METADATA, torch.ops.vitcg.metadata)
_ASSERTS = {torch.ops.aten._assert_scalar.default, torch._check, torch.sym_constrain_range_for_size}
if hasattr(torch.ops.aten, "sym_constrain_range_for_size"):
    _ASSERTS |= {torch.ops.aten.sym_constrain_range_for_size.default, torch.ops.aten.sym_constrain_range.default}
_IN_PLACE = {getattr(operator, n) for n in dir(operator) if n.startswith("i") and n[1:] in dir(operator)}
_IN_PLACE |= {operator.iand, operator.ior, operator.setitem, operator.delitem}
_MODES = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"}
_MAX_UNIT, _MAX_UNIT_STEPS = 1024, 4
_PURE_BUILTINS = {getattr(operator, n) for n in dir(operator) if callable(getattr(operator, n))} - _IN_PLACE | {torch.sym_int}


@dataclass
class Bound:
    """A Dynamo graph with private sizes.

    Attributes:
        gm: the graph; every node but the output has ``meta["val"]``, every placeholder ``meta["role"]``.
        symbols: its symbol environment.
        pixels: position of the pixel input.
        pixel_axis: its token axis.
        pixels_per_row: length of one row on that axis: 1, or the width of a patch where patches lie side by side.
        grid: position of the grid input, or None.
        batch: positions of other inputs that have a row for each row of the pixels.
        numbers: (position, value) of inputs that hold one number and were made constants: under ``dynamic=True`` Dynamo passes
            the numbers of a module so. A call with another number is served by the operators.
    """

    gm: fx.GraphModule
    symbols: Symbols
    pixels: int
    pixel_axis: int
    pixels_per_row: int
    grid: int | None
    batch: list[int]
    numbers: list[tuple[int, float]]

    @property
    def placeholders(self) -> list[fx.Node]:
        """Input nodes in the order of the call's arguments."""
        return where(self.gm.graph.nodes, "placeholder")


def bind_tokens(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Bound:
    """Bind the token count of a Dynamo graph (see the module's text). The input graph is changed.

    Args:
        gm: the graph.
        example_inputs: the real inputs of the first call, for the values of numbers.

    Raises:
        Ineligible: no pixel input, several, static rows, or a node that cannot be traced with private sizes.
    """
    _require_pure(gm)
    placeholders = where(gm.graph.nodes, "placeholder")
    metadata = _metadata_nodes(gm)
    grid = _grid_input(placeholders, metadata)
    for node in placeholders:
        node.meta["role"] = Role.GRID if node is grid else role_of(node)
        if grid is not None and node.meta["role"] == Role.EXTRA and _belongs_to_items(node, grid):
            node.meta["role"] = Role.ITEMS
    pixels, axis, size = _pixel_input(placeholders)
    pixels.meta["role"] = Role.PIXELS
    for node in placeholders if grid is None and axis == 0 else ():
        if node.meta["role"] == Role.EXTRA and _has_rows(node.meta["example_value"], size):
            node.meta["role"] = Role.BATCH
    index = {node: i for i, node in enumerate(placeholders)}
    width = _pixels_per_row(example_inputs, index[pixels], axis, None if grid is None else index[grid])
    give_tokens(gm, next((n for n in placeholders if _same_size(n.meta.get("example_value"), size)), None), width)
    numbers = _specialise_numbers(gm, placeholders, example_inputs)
    unit = _unit(gm, metadata, size)
    for _ in range(_MAX_UNIT_STEPS):
        symbols = Symbols.create(unit)
        _propagate(gm, symbols, size, width)
        factor = _hidden_unit(gm, symbols)
        if factor == 1:
            break
        unit *= factor
    gm.graph.lint()
    gm.recompile()
    batch = [i for i, node in enumerate(placeholders) if node.meta["role"] == Role.BATCH]
    return Bound(gm, symbols, index[pixels], axis, width, None if grid is None else index[grid], batch, numbers)


def _pixels_per_row(example_inputs: Sequence[Any], pixels: int, axis: int, grid: int | None) -> int:
    """How long the token axis of a batch of one is for each patch of the grid, as the first call shows it."""
    if grid is None or not example_inputs or axis == 0:
        return 1
    patches = sum(math.prod(row) for row in example_inputs[grid].tolist())
    length = example_inputs[pixels].shape[axis]
    return length // patches if patches and length % patches == 0 else 1


def _hidden_unit(gm: fx.GraphModule, symbols: Symbols) -> int:
    """What rows must be a multiple of besides: a whole division of them that the trace met, in a size or in a guard."""
    sizes = [s for n in gm.graph.nodes for s in _sizes(n.meta.get("val")) if symbols.depends(s)]
    expressions = [symbols.shape_env.simplify(s.node.expr) for s in sizes] + symbols.guards()
    factor = 1
    for divided, divisor in (pair for e in expressions for pair in _torch.divisions(e)):
        rows = divided.coeff(symbols.symbol, 1)
        if divisor.is_Integer and rows.is_Integer and rows != 0:
            factor = math.lcm(factor, int(divisor) // math.gcd(int(divisor), int(rows)))
    return factor if factor * symbols.unit <= _MAX_UNIT else 1


def _sizes(value: Any) -> list[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        return [value]
    if isinstance(value, (tuple, list)):
        return [size for part in value for size in _sizes(part)]
    sizes: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def give_tokens(gm: fx.GraphModule, default: fx.Node | None = None, width: int = 1) -> None:
    """Give the metadata operators of a Dynamo graph their token count and erase what asserts it, in place.

    Also for a graph that Inductor compiles as a whole: it then has no unknown size that stands for a known one.

    Args:
        gm: the graph.
        default: the size input to use where Dynamo found none equal to an operator's unknown size.
        width: how many of it make one row.
    """
    if default is not None and width > 1:
        rows = default
        with gm.graph.inserting_after(where(gm.graph.nodes, "placeholder")[-1]):
            default = gm.graph.call_function(operator.floordiv, (rows, width))
        default.meta["example_value"] = rows.meta["example_value"] // width
    for node in _metadata_nodes(gm):
        tokens = _token_input(gm, node) or default
        if tokens is None or len(node.args) != 4:
            continue
        node.args = (*node.args, tokens)
        bindings = node.meta.get("unbacked_bindings") or {}
        node.meta["unbacked_bindings"] = {s: path for s, path in bindings.items() if _is_unknown(node, s)}
    erase_asserts(gm)
    gm.recompile()


def _metadata_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target in METADATA_TARGETS]


def _token_input(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The size input that the rows of a metadata operator's results are equal to."""
    sizes = {}
    for placeholder in where(gm.graph.nodes, "placeholder"):
        value = placeholder.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            sizes[_expression(value)] = placeholder
    for result in node.meta.get("example_value") or ():
        for size in result.shape:
            if isinstance(size, torch.SymInt) and _expression(size) in sizes:
                return sizes[_expression(size)]
    return None


def _expression(size: torch.SymInt) -> Any:
    return size.node.shape_env.replace(size.node.expr)


def _is_unknown(node: fx.Node, symbol: Any) -> bool:
    sizes = [s for r in node.meta.get("example_value") or () for s in r.shape if isinstance(s, torch.SymInt)]
    return not sizes or sizes[0].node.shape_env.replace(symbol) == symbol


def _require_pure(gm: fx.GraphModule) -> None:
    """Pieces are compiled apart, so nothing may change a tensor or a mode that another piece sees."""
    for node in gm.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        in_place |= node.op == "call_function" and node.target in _IN_PLACE
        in_place |= bool(node.kwargs.get("inplace")) or "out" in node.kwargs
        if in_place or name in _MODES:
            raise Ineligible("side_effect", f"{node.format_node()} changes a tensor or a mode; {source_line(node)}")


def _specialise_numbers(
    gm: fx.GraphModule, placeholders: list[fx.Node], example_inputs: Sequence[Any]
) -> list[tuple[int, float]]:
    """Make inputs that hold one number constants: a scale or an epsilon belongs into a kernel."""
    shown: set[str] = set()
    for node in placeholders:
        if isinstance(node.meta["example_value"], Tensor):
            shown |= {str(s) for s in node.meta["example_value"].shape}
    numbers = []
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=False)):
        fake = node.meta["example_value"]
        if isinstance(fake, Tensor):
            items = [u for u in node.users if u.op == "call_method" and u.target == "item"]
            if fake.dim() or fake.device.type != "cpu" or not items or len(items) != len(node.users):
                continue
            constant = value.item()
            for item in items:
                item.replace_all_uses_with(constant)  # type: ignore[arg-type]  # a number in place of a node
                gm.graph.erase_node(item)
            numbers.append((position, constant))
        elif node.users and str(fake) not in shown and _hint(fake) is not None:
            node.replace_all_uses_with(_hint(fake))  # type: ignore[arg-type]
            numbers.append((position, _hint(fake)))
    return numbers


def _hint(size: Any) -> Any:
    """The value of a size in the first call, None for one that nobody knows."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _source_name(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", node.name)
    return name() if callable(name) else str(name)  # a method until torch 2.11, an attribute since


def role_of(node: fx.Node) -> str:
    """What an input holds, as far as it tells by itself."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return Role.SIZE
    if isinstance(value, torch.nn.Parameter):
        return Role.STATE
    name = _source_name(node)
    owned = any(part in name for part in ("._parameters[", "._buffers[", "._modules[")) or name.startswith("l_self_")
    return Role.STATE if owned else Role.EXTRA


def _grid_input(placeholders: list[fx.Node], metadata: list[fx.Node]) -> fx.Node | None:
    found: set[fx.Node] = set()
    stack = [node.args[1] for node in metadata]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and isinstance(node.meta.get("example_value"), Tensor):
            found.add(node)
        stack += node.all_input_nodes
    grids = [n for n in placeholders if n in found and n.meta["example_value"].dim() == 2]
    if metadata and len(grids) != 1:
        raise Ineligible("grid", f"the metadata comes from {len(grids)} grid inputs, expected one")
    return grids[0] if grids else None


def _belongs_to_items(node: fx.Node, grid: fx.Node) -> bool:
    """Whether an input holds one whole number for each row of the grid (`marking.py` marks both alike)."""
    value, rows = node.meta["example_value"], grid.meta["example_value"].shape[0]
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        return False
    if any(user.target not in METADATA_TARGETS for user in node.users):
        return False  # a piece would read the caller's tensor, which no bucket pads
    return bool(_hint(value.shape[0]) == _hint(rows))


def _pixel_input(placeholders: list[fx.Node]) -> tuple[fx.Node, int, torch.SymInt]:
    candidates = []
    for node in placeholders:
        value = node.meta.get("example_value")
        if node.meta["role"] == Role.EXTRA and value.dim() > 1:
            axes = [a for a, s in enumerate(value.shape) if isinstance(s, torch.SymInt)]
            candidates += [(node, axes)] if axes else []
    floats = [c for c in candidates if c[0].meta["example_value"].dtype.is_floating_point]
    candidates = floats or candidates
    images = [c for c in candidates if c[0].meta["example_value"].dim() > 3 and c[1] == [0]]
    candidates = images[:1] or candidates  # what else has their rows is `Role.BATCH`
    if len(candidates) != 1:
        raise Ineligible("pixels", f"found {len(candidates)} inputs with a symbolic number of rows, expected one")
    node, axes = candidates[0]
    size = node.meta["example_value"].shape[axes[0]]
    if len(axes) != 1 or not size.node.expr.is_Symbol:
        raise Ineligible("pixels", f"the pixel input {tuple(node.meta['example_value'].shape)} has no single token axis")
    return node, axes[0], size


def _same_size(value: Any, size: torch.SymInt) -> bool:
    return isinstance(value, torch.SymInt) and value.node.expr == size.node.expr


def _has_rows(value: Tensor, size: torch.SymInt) -> bool:
    """Whether the first axis of an input, and no other, is as long as the batch."""
    symbolic: dict[int, Any] = {axis: length for axis, length in enumerate(value.shape) if isinstance(length, torch.SymInt)}
    return list(symbolic) == [0] and bool(_expression(symbolic[0]) == _expression(size))


def _unit(gm: fx.GraphModule, metadata: list[fx.Node], size: torch.SymInt) -> int:
    """Rows per token: the square of the merge size, and whatever else the graph divides the rows by."""
    unit = 1
    for node in metadata:
        constants = json.loads(node.args[3])
        merge = constants.get("spatial_merge_size", 1)
        if isinstance(merge, int):
            unit = math.lcm(unit, merge * merge)
    for node in gm.graph.nodes:
        if node.target is operator.floordiv and isinstance(node.args[1], int):
            value = node.args[0].meta.get("example_value") if isinstance(node.args[0], fx.Node) else None
            if _same_size(value, size):
                unit = math.lcm(unit, node.args[1])
    return unit


def erase_asserts(gm: fx.GraphModule) -> None:
    """Erase what a trace asserts of sizes, and the arithmetic that only this uses, in place."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function":
            continue
        number = not isinstance(node.meta.get("example_value"), Tensor)
        dead_number = not node.users and number and (node.target in _PURE_BUILTINS or node.target is METADATA)
        if node.target in _ASSERTS or dead_number:
            gm.graph.erase_node(node)


def _propagate(gm: fx.GraphModule, symbols: Symbols, size: torch.SymInt, width: int) -> None:
    """Run every node on fakes of the private environment, equal ones once (`repeats.py`)."""
    length = symbols.unit * width
    sizes: dict[Any, Any] = {_expression(size): symbols.n * length if length > 1 else symbols.n}

    def convert(dim: Any) -> Any:
        if not isinstance(dim, torch.SymInt):
            return dim
        expression = _expression(dim)
        if expression.is_number:
            return int(expression)
        if expression.is_Symbol and expression not in sizes:
            sizes[expression] = _torch.new_size(symbols.shape_env, f"__{expression}", 2)[1]
        if expression in sizes:
            return sizes[expression]
        known = {old: new.node.expr for old, new in sizes.items()}
        return symbols.shape_env.create_symintnode(expression.xreplace(known), hint=None)

    repeats = Repeats()
    # The dispatcher is the one that Dynamo traces with: kernels in C++ that read a size as an integer would fix it.
    ignoring = symbols.shape_env.ignore_fresh_unbacked_symbols()
    with symbols.mode, _torch.uncached_fakes(symbols.mode), torch.no_grad(), ignoring, _torch.enable_python_dispatcher():
        for node in gm.graph.nodes:
            node.meta.pop("unbacked_bindings", None)  # they name symbols of Dynamo's environment
            if node.op == "output":
                continue
            try:
                value = node.meta["val"] = _value(gm, node, convert, repeats)
                node.meta["memory"] = repeats.memory_of(value)
            except Ineligible:
                raise
            except Exception as error:
                detail = f"{node.format_node()}: {type(error).__name__}: {error}"
                raise Ineligible("untraceable", detail) from error


def _value(gm: fx.GraphModule, node: fx.Node, convert: Any, repeats: Repeats) -> Any:
    if node.op == "placeholder":
        value = node.meta["example_value"]
        if not isinstance(value, Tensor):
            return convert(value)
        shape, stride = [convert(s) for s in value.shape], [convert(s) for s in value.stride()]
        if node.meta["role"] in (Role.PIXELS, Role.BATCH):  # what a call gives is copied into dense buffers
            return repeats.add(torch.empty(shape, dtype=value.dtype, device=value.device))
        return repeats.add(torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device))
    if node.op == "get_attr":
        value = getattr(gm, node.target)
        return repeats.add(torch.empty_like(value) if isinstance(value, Tensor) else value)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return repeats.run(node, args, kwargs, functools.partial(_run, node))


def _run(node: fx.Node, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    before = [t._version for t in tensors]
    with _torch.RandomWatch() as watch:
        value = _call(node, args, kwargs)
    if any(t._version != version for t, version in zip(tensors, before, strict=True)):  # leaky_relu(x, slope, True)
        raise Ineligible("side_effect", f"{node.format_node()} changes a tensor; {source_line(node)}")
    if watch.random:
        raise Ineligible("random", f"{node.format_node()} draws random numbers; {source_line(node)}")
    return value


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_function":
        if any(isinstance(node.target, kind) for kind in (torch._ops.HigherOrderOperator,)):
            raise Ineligible("higher_order", f"{node.target} has no rule")
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    raise Ineligible("submodule", f"{node.format_node()}: a call of a module that Dynamo did not inline")
