"""The metadata operator: a function of the grid as one opaque node of the graph.

``vitcg::metadata(key, grid, tensors, constants, tokens) -> Tensor[]`` runs the original Python function (`key` names it) on
real tensors. While a graph is traced its output shapes are needed before any value is known: they are learnt once, by
running the function on a few small grids and looking at which sizes are constants, which follow the patches and which the
number of items; any other size is one that nobody knows.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _torch

__all__ = ["METADATA", "PROBES", "ShapeRule", "arity", "encode_constants", "register_function", "run", "shape_rule", "spec_of"]

PROBES = (
    ((1, 8, 8),),
    ((1, 8, 8), (1, 16, 8)),
    ((2, 16, 8),),
    ((1, 8, 16), (3, 8, 8)),
    ((2, 8, 8), (2, 16, 8), (2, 8, 24)),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {}

Spec = tuple[torch.dtype, tuple[int, ...] | None]
"""A tensor argument besides the grid: dtype and shape, the shape None for one entry (or row) an item."""


def spec_of(tensor: Tensor) -> Spec:
    """Weights are of floating point and have fixed shapes; what is integer belongs to items."""
    return tensor.dtype, tuple(int(s) for s in tensor.shape) if tensor.is_floating_point() else None


def register_function(key: str, function: Callable[..., Any]) -> None:
    """Make `function(grid, **constants)` callable by the operator under `key`."""
    _FUNCTIONS[key] = function


def encode_constants(items: Sequence[tuple[str, Any]]) -> str:
    """Keyword arguments as JSON. A tensor is given as ``{"tensor": index}``."""
    return json.dumps(dict(items))


def _call(key: str, grid: Tensor, tensors: Sequence[Tensor], constants: str) -> Any:
    arguments = json.loads(constants)
    for name, value in arguments.items():
        if isinstance(value, dict):
            arguments[name] = tensors[value["tensor"]]
        elif isinstance(value, list):
            arguments[name] = tuple(value)
    return _FUNCTIONS[key](grid, **arguments)


def run(key: str, grid: Tensor, tensors: Sequence[Tensor], constants: str) -> list[Tensor]:
    """What the operator gives, without the operator: its dispatch takes longer than a small function."""
    outputs = _as_tensors(_call(key, grid, tensors, constants))
    # An operator's output may not be its input; a function that makes its tensors on the host leaves them there.
    home, given = _home(grid, tensors), {id(t) for t in (grid, *tensors)}
    return [output.clone() if id(output) in given else output.to(home).contiguous() for output in outputs]


@torch.library.custom_op("vitcg::metadata", mutates_args=())
def _metadata(key: str, grid: Tensor, tensors: Sequence[Tensor], constants: str, tokens: int | None = None) -> list[Tensor]:
    return run(key, grid, tensors, constants)


@_metadata.register_fake
def _(key: str, grid: Tensor, tensors: Sequence[Tensor], constants: str, tokens: int | None = None) -> list[Tensor]:
    rules = shape_rule(key, int(grid.shape[1]), tuple(spec_of(t) for t in tensors), constants)
    follows = [axis[2] for rule in rules.outputs for axis in rule.axes if axis[0] == "patches"]
    patches = tokens if tokens is not None or not follows else _patches_of(grid, min(follows))
    home = _home(grid, tensors)
    return [rule.empty(grid, patches, home) for rule in rules.outputs]


def _home(grid: Tensor, tensors: Sequence[Tensor]) -> torch.device:
    """Where results live: with the weights, or else with the grid."""
    return next((t.device for t in tensors if t.is_floating_point()), grid.device)


def _as_tensors(result: Any) -> tuple[Tensor, ...]:
    """Results of a metadata function; a whole number becomes the length of an empty tensor, where the trace can follow it."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(r if isinstance(r, Tensor) else torch.empty(r, 0, dtype=torch.uint8) for r in results)


METADATA = torch.ops.vitcg.metadata.default


def _patches_of(grid: Tensor, shown: int) -> Any:
    """One unknown size for "patches of this grid", shared by all operators that see the same fake grid.

    Args:
        grid: the fake grid.
        shown: patches per row of the output that will show it: torch rejects a fresh size that no output shows as it is.
    """
    size = getattr(grid, "_vitcg_patches", None)
    if size is None:
        size = _torch.fresh_size() * shown
        grid._vitcg_patches = size  # type: ignore[attr-defined]  # lives and dies with the fake tensor of one trace
    return size


@dataclass(frozen=True)
class OutputRule:
    """Shape of one output: for each axis ``("constant", c)``, ``("patches", numerator, denominator)``, ``("items", c)`` for
    the number of grid rows plus c, or ``("unknown",)``.
    """

    axes: tuple[tuple[Any, ...], ...]
    dtype: torch.dtype

    def empty(self, grid: Tensor, patches: Any, device: torch.device) -> Tensor:
        """An uninitialised (fake) tensor of this shape."""
        sizes = []
        for kind, *args in self.axes:
            if kind == "constant":
                sizes.append(args[0])
            elif kind == "patches":
                sizes.append(patches * args[0] // args[1] if args[0] != 1 else patches // args[1])
            elif kind == "items":
                sizes.append(grid.shape[0] + args[0])
            else:
                sizes.append(_torch.fresh_size())
        return grid.new_empty(sizes, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ShapeRule:
    """Output shapes of one function with one set of constants; `numbers` are the results that are no tensors."""

    outputs: tuple[OutputRule, ...]
    is_tuple: bool
    numbers: tuple[int, ...]


def shape_rule(key: str, columns: int, specs: tuple[Spec, ...], constants: str) -> ShapeRule:
    """Learn the output shapes of a metadata function from small grids; its dtypes may follow torch's default dtype.

    Raises:
        RuntimeError: the function failed on all but one of the probe grids; the text has its last error.
    """
    return _learn(key, columns, specs, constants, torch.get_default_dtype())


@functools.lru_cache(maxsize=256)
def _learn(key: str, columns: int, specs: tuple[Spec, ...], constants: str, default: torch.dtype) -> ShapeRule:
    seen: list[tuple[int, int, Any]] = []
    errors: list[str] = []

    def probe() -> None:
        for rows in PROBES:
            grid = torch.tensor(rows)[:, 3 - columns :].clone()
            extra = [
                torch.full((len(rows),), 2, dtype=dtype) if shape is None else torch.zeros(shape, dtype=dtype)
                for dtype, shape in specs
            ]
            try:
                seen.append((int(grid.prod(1).sum()), len(rows), _call(key, grid, extra, constants)))
            except Exception as error:  # e.g. a function that takes one frame an item; the other probes decide
                errors.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=probe)  # the tracer's modes belong to its thread; this one has none
    thread.start()
    thread.join()
    if len(seen) < 2:
        raise RuntimeError(f"cannot learn the output shapes of {key}: {'; '.join(errors[-2:])}")
    results = [_as_tensors(r) for _, _, r in seen]
    patches, items = [p for p, _, _ in seen], [n for _, n, _ in seen]
    rules = tuple(
        OutputRule(
            tuple(
                _axis_rule([result[i].shape[axis] for result in results], patches, items) for axis in range(results[0][i].dim())
            ),
            results[0][i].dtype,
        )
        for i in range(len(results[0]))
    )
    first = seen[0][2] if isinstance(seen[0][2], (tuple, list)) else (seen[0][2],)
    numbers = tuple(i for i, r in enumerate(first) if not isinstance(r, Tensor))
    return ShapeRule(rules, isinstance(seen[0][2], (tuple, list)), numbers)


def _axis_rule(sizes: list[int], patches: list[int], items: list[int]) -> tuple[Any, ...]:
    if len(set(sizes)) == 1:
        return ("constant", sizes[0])
    if all(size * patches[0] == sizes[0] * count for size, count in zip(sizes, patches, strict=True)):
        if patches[0] % sizes[0] == 0:
            return ("patches", 1, patches[0] // sizes[0])
        if sizes[0] % patches[0] == 0:
            return ("patches", sizes[0] // patches[0], 1)
    if len({size - count for size, count in zip(sizes, items, strict=True)}) == 1:
        return ("items", sizes[0] - items[0])
    return ("unknown",)


def arity(key: str, columns: int, specs: tuple[Spec, ...], constants: str) -> tuple[int | None, tuple[int, ...]]:
    """How many results the function returns as a tuple (None: one, no tuple), and which of them are numbers."""
    rule = shape_rule(key, columns, specs, constants)
    return len(rule.outputs) if rule.is_tuple else None, rule.numbers
