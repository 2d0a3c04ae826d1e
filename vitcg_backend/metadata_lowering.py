"""Metadata functions: how they are found, and the substitute that turns a call of one into an operator.

A metadata function computes tensors from the grid alone (and perhaps from weights) in ways that cannot be traced. Found by
convention, in `transformers.vision_utils` and in modelling files:

* named ``get_vision_*``, with ``grid_thw`` or ``target_sizes`` first and ``kwargs`` last;
* a function or static method with a parameter of one of `GRID_NAMES` whose values it reads on the host: ``.tolist()`` or a
  loop over it, seen in its source.

Everything here but `grid_parameter`, `is_metadata` and `make_metadata` is inlined by Dynamo, or a constant for it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _torch, ops
from .marking import mark_inputs, refuse

__all__ = ["GRID_NAMES", "grid_parameter", "is_metadata", "make_metadata", "untouched"]

log = _torch.log
GRID_NAMES = ("grid_thw", "image_grid_thw", "patch_grid_thw", "target_sizes", "spatial_shapes")


def grid_parameter(function: types.FunctionType) -> str | None:
    """The parameter of a function that holds the grid."""
    return next((name for name in inspect.signature(function).parameters if name in GRID_NAMES), None)


def is_metadata(function: types.FunctionType) -> bool:
    """Whether a function is a metadata function, see the module's text."""
    parameters = list(inspect.signature(function).parameters)
    if function.__name__.startswith("get_vision_"):
        return parameters[0] in ("grid_thw", "target_sizes") and parameters[-1] == "kwargs" and not _delegates(function)
    grid = grid_parameter(function)
    return grid is not None and parameters[0] != "self" and _reads_on_host(function, grid)


def _tree(function: types.FunctionType) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _delegates(function: types.FunctionType) -> bool:
    """Whether `function` hands its kwargs to another metadata function: then it is inlined, and that one is lowered."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("get_vision_")
        and any(keyword.arg == "kwargs" for keyword in node.keywords)
        for node in ast.walk(_tree(function))
    )


def _reads_on_host(function: types.FunctionType, grid: str) -> bool:
    """Whether `function` reads the values of its parameter `grid`: ``.tolist()``, ``.item()`` or a loop over it."""
    for node in ast.walk(_tree(function)):
        read: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("tolist", "item"):
            read = node.func.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            read = node.iter
        if read is not None and any(isinstance(name, ast.Name) and name.id == grid for name in ast.walk(read)):
            return True
    return False


def _popped_keys(function: types.FunctionType) -> tuple[str, ...]:
    """Keys that `function` pops from ``kwargs``, read from its source."""
    return tuple(
        str(node.args[0].value)
        for node in ast.walk(_tree(function))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pop"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "kwargs"
        and isinstance(node.args[0], ast.Constant)
    )


def untouched(function: types.FunctionType) -> Callable[..., Any]:
    """A copy that Dynamo inlines as it is: the substitution goes by the identity of the original."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@torch._dynamo.assume_constant_result
def _mark_inputs() -> None:
    mark_inputs()


@torch._dynamo.assume_constant_result
def _constants(key: str, *items: tuple[str, Any]) -> str | None:
    try:
        return ops.encode_constants(items)
    except TypeError as error:
        log.info("vitcg leaves a call of %s as it is: %s", key, error)
        return None


@torch._dynamo.assume_constant_result
def _arity(key: str, columns: int, specs: tuple[ops.Spec, ...], constants: str) -> Any:
    try:
        return ops.arity(key, columns, specs, constants)
    except RuntimeError as error:
        refuse(str(error))
        raise


def make_metadata(original: types.FunctionType, *, active: Callable[[], bool], grid_name: str) -> Callable[..., Any]:
    """The substitute of a metadata function.

    Args:
        original: the function.
        active: whether the running trace is one of ours.
        grid_name: its parameter that holds the grid.
    """
    parameters = list(inspect.signature(original).parameters.values())
    names = tuple(p.name for p in parameters)
    defaults = tuple((p.name, p.default) for p in parameters if p.default is not p.empty)
    popped = _popped_keys(original) if "kwargs" in names else ()
    key = f"{original.__module__}.{original.__qualname__}"
    ops.register_function(key, functools.partial(_by_name, original, grid_name))
    copy = untouched(original)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        if not active():
            return copy(*args, **kwargs)
        bound = dict(defaults)
        for name, value in zip(names, args):  # noqa: B905  fewer arguments than names is the rule
            bound[name] = value
        bound.update(kwargs)
        caller = bound.pop("kwargs", None)
        grid = bound.pop(grid_name)
        if not isinstance(grid, Tensor) or grid.dim() != 2:
            return copy(*args, **kwargs)
        _mark_inputs()
        if caller is not None and popped and all(caller.get(k) is not None for k in popped):
            return copy(grid, kwargs=caller, **bound)
        tensors: list[Tensor] = []
        items: list[tuple[str, Any]] = []
        for name, value in bound.items():
            if isinstance(value, Tensor):
                items.append((name, {"tensor": len(tensors)}))
                tensors.append(value)
            else:
                items.append((name, value))
        constants = _constants(key, *items)
        if constants is None or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return copy(*args, **kwargs)  # an operator has no gradient for the weights that it reads
        if caller is not None:
            for k in popped:
                caller.pop(k, None)
        specs = tuple((t.dtype, tuple(t.shape) if t.is_floating_point() else None) for t in tensors)
        count, numbers = _arity(key, grid.shape[1], specs, constants)
        results = torch.ops.vitcg.metadata(key, grid, tensors, constants)
        outputs = tuple(t.shape[0] if i in numbers else t for i, t in enumerate(results))
        return outputs[0] if count is None else outputs

    return lowered


def _by_name(function: Callable[..., Any], grid_name: str, grid: Tensor, **arguments: Any) -> Any:
    return function(**{grid_name: grid, **arguments})
