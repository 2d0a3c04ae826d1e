"""What a product is to those who choose its kernel: its sizes, all of them numbers, as they are in a capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Product"]


@dataclass(frozen=True)
class Product:
    """The sizes of ``[rows, inputs] @ [outputs, inputs].T``, its dtype, and what is done with the sums in the epilogue.

    Attributes:
        biased: one number an output is added.
        gelu: then a tanh-GELU is applied.
        added: then a matrix ``[rows, outputs]`` is added.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    biased: bool
    gelu: bool
    added: bool = False

    def __str__(self) -> str:
        ends = f"{' + bias' if self.biased else ''}{', GELU' if self.gelu else ''}{' + rows' if self.added else ''}"
        return f"{self.rows}x{self.inputs} @ {self.inputs}x{self.outputs}{ends} ({str(self.dtype).removeprefix('torch.')})"
