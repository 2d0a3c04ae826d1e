"""What a product is to those who choose its kernel: its sizes, all of them numbers, as they are in a capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Product"]


@dataclass(frozen=True)
class Product:
    """The sizes of ``[rows, inputs] @ [outputs, inputs].T``, its dtype, and whether it has a bias and a tanh-GELU."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    biased: bool
    gelu: bool

    def __str__(self) -> str:
        ends = f"{' + bias' if self.biased else ''}{', GELU' if self.gelu else ''}"
        return f"{self.rows}x{self.inputs} @ {self.inputs}x{self.outputs}{ends} ({str(self.dtype).removeprefix('torch.')})"
