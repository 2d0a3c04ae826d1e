"""A tower's outputs as tensors, their float64 reference, and equality bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["assert_bitwise", "describe", "flatten", "named_leaves", "reference_float64"]


def flatten(output: Any) -> list[Tensor]:
    """All tensors of an output in order: ModelOutput, mapping, tuple, list, tensor, nested in any way.

    None, and what else is not a tensor, is left out.
    """
    return [leaf for _, leaf in named_leaves(output) if isinstance(leaf, Tensor)]


def named_leaves(output: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name, such as ``deepstack_features[1]``."""
    if isinstance(output, Mapping):  # a ModelOutput is one, without its None entries
        for key, value in output.items():
            yield from named_leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from named_leaves(value, f"{name}[{index}]")
    elif output is not None:
        yield name or "output", output


class _KeepFloat64(TorchDispatchMode):
    """Turns casts to float32 into casts to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def reference_float64(tower: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Eager's output in float64: a float64 copy of `tower` on float64 inputs, on their device, without gradients.

    Towers cast to float32 inside (rotary embedding, norms); here these casts keep float64, so that the reference has no
    rounding in common with what is measured against it.

    Args:
        tower: the tower, compiled or not; it is not changed.
        *args: its arguments; floating-point tensors, also in nested containers, are converted.
        **kwargs: the same.
    """
    exact = copy.deepcopy(getattr(tower, "_orig_mod", tower)).double()  # _orig_mod: what torch.compile wraps
    for module in exact.modules():  # a plain tensor is no parameter and no buffer: `double` leaves it alone
        plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor) and v.is_floating_point()}
        vars(module).update({k: v.double() for k, v in plain.items()})
    args, kwargs = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    with torch.no_grad(), _KeepFloat64():
        return exact(*args, **kwargs)


def assert_bitwise(outputs: Any, eager: Any, name: str = "output") -> None:
    """Raise AssertionError unless both outputs have the same types, shapes, dtypes, devices, strides and bits.

    Bits: -0.0 differs from 0.0, and a NaN equals only a NaN of the same payload. Strides of axes of length 1 say
    nothing and are not compared.

    Args:
        outputs: what is tested: any nesting of tensors.
        eager: what it has to equal.
        name: what messages call it.
    """
    if type(outputs) is not type(eager):
        raise AssertionError(f"{name} is a {type(outputs).__name__} instead of a {type(eager).__name__}")
    if isinstance(eager, Mapping):
        _assert_equal(list(outputs), list(eager), f"{name}: keys")
        for key in eager:
            assert_bitwise(outputs[key], eager[key], f"{name}.{key}")
    elif isinstance(eager, (tuple, list)):
        _assert_equal(len(outputs), len(eager), f"{name}: length")
        for index, (out, want) in enumerate(zip(outputs, eager, strict=True)):
            assert_bitwise(out, want, f"{name}[{index}]")
    elif isinstance(eager, Tensor):
        _assert_equal(describe(outputs, strides=True), describe(eager, strides=True), name)
        differ = (_bits(outputs) != _bits(eager)).nonzero()
        if len(differ):
            at = tuple(differ[0].tolist())
            first = f"first at {list(at)}: {outputs[at].item()!r} instead of {eager[at].item()!r}"
            raise AssertionError(f"{name}: {len(differ)} of {eager.numel()} values differ, {first}")
    else:
        _assert_equal(outputs, eager, name)


def _assert_equal(seen: Any, want: Any, name: str) -> None:
    if seen != want:
        raise AssertionError(f"{name}: {seen} instead of {want}")


def describe(tensor: Tensor, *, strides: bool = False) -> str:
    """``float32[4, 64] on cpu``, and the strides of the axes longer than 1."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
    if strides and tensor.numel():
        text += f" with strides {[step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]}"
    return text


def _bits(tensor: Tensor) -> Tensor:
    """The values as integers of the same width, in the same shape (complex numbers get one more axis)."""
    tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
