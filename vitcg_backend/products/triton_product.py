"""Launches the Triton kernel of `triton_kernel`: which tiles it may use, where it can run, what it can read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TILES", "Tile", "launch", "promising", "unusable"]

_GROUP = 8  # tiles of rows between two turns to the next columns


@dataclass(frozen=True)
class Tile:
    """How the kernel is compiled: rows and columns of a tile, inputs of a step, warps, stages of the loads' pipeline.

    `pace` is how fast one multiprocessor gets through its part of a product, beside the largest tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    pace: float

    def __str__(self) -> str:
        return f"triton {self.block_m}x{self.block_n}x{self.block_k}"


TILES = (
    Tile(128, 256, 64, 8, 3, 1.0),
    Tile(128, 128, 64, 4, 4, 0.9),
    Tile(64, 128, 64, 4, 4, 0.7),
    Tile(64, 64, 128, 4, 4, 0.5),
)
"""All that is ever compiled, about half a second each: for large products, and for ever fewer rows."""


@functools.cache
def _import_triton() -> tuple[Any, Any, str | None]:
    """The kernel, the class of host tensor descriptors, and None; or two Nones and why triton cannot be imported."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from .triton_kernel import product_kernel
    except Exception as error:  # a broken triton raises more than ImportError
        return None, None, f"triton cannot be imported ({type(error).__name__}: {error})"
    return product_kernel, TensorDescriptor, None


def unusable(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device, in words, or None when it can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the Triton product needs an NVIDIA GPU, not {device.type}"
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return f"the Triton product needs TMA and the shared memory of Hopper, not {torch.cuda.get_device_name(device)}"
    return _import_triton()[2]


def promising(rows: int, outputs: int, processors: int) -> list[Tile]:
    """The two of `TILES` that should take least, by how many turns the multiprocessors take and how long one lasts."""

    def cost(tile: Tile) -> float:
        tiles = math.ceil(rows / tile.block_m) * math.ceil(outputs / tile.block_n)
        return math.ceil(tiles / processors) * tile.block_m * tile.block_n / tile.pace

    return sorted(TILES, key=cost)[:2]


def launch(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> None:
    """``x @ weight.T + bias``, with a tanh-GELU on the float32 sums where `gelu` is set, into `out`.

    Args:
        tile: how it is compiled.
        x: float16 or bfloat16 ``[rows, inputs]``; the others likewise. See `cublaslt.reads`.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``, or None.
        gelu: apply the activation.
        out: contiguous ``[rows, outputs]``.

    Raises:
        RuntimeError: triton cannot be imported.
    """
    kernel, descriptor, reason = _import_triton()
    if reason is not None:
        raise RuntimeError(reason)
    from .triton_kernel import UNIT

    (rows, inputs), outputs = x.shape, weight.shape[0]
    grid = (math.ceil(rows / tile.block_m) * math.ceil(outputs / tile.block_n),)
    kernel[grid](
        descriptor.from_tensor(x, [tile.block_m, tile.block_k]), descriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        out if bias is None else bias, out, rows, outputs // UNIT, inputs, 0 if bias is None else outputs, int(gelu),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=_GROUP, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
