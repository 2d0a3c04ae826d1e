"""The body of a tower as a short program: pieces and attention calls over numbered slots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..attention import AttentionShape
from .graph import Symbols

__all__ = ["AttentionStep", "PieceStep", "Program", "UniquePiece"]


@dataclass(frozen=True)
class PieceStep:
    """Call piece `piece` with ``[n, *inputs]`` and keep its results in `outputs`; `free` slots are dead afterwards.

    With `aside` no later step reads the results: they are results of the call.
    """

    piece: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...]
    aside: bool = False


@dataclass(frozen=True)
class AttentionStep:
    """Packed attention over slots ``[rows * n, H, D]``; `segments` is the index of the cu_seqlens among the metadata."""

    query: int
    key: int
    value: int
    segments: int
    rows: int
    scale: float
    output: int
    free: tuple[int, ...]


@dataclass
class UniquePiece:
    """A piece that is compiled once.

    Attributes:
        key: what makes two pieces equal.
        gm: its torch-level graph; inputs ``n`` and tensors with ``meta["val"]``; returns a tuple.
        metadata_inputs: for each use of the piece, placeholder position -> index of the metadata tensor.
        batch_inputs: for each use, placeholder positions of the call's other tensors with a row an image (`Role.BATCH`).
        uses: how often the program calls it.
    """

    key: tuple[Any, ...]
    gm: fx.GraphModule
    metadata_inputs: list[dict[int, int]] = field(default_factory=list)
    batch_inputs: list[set[int]] = field(default_factory=list)

    @property
    def uses(self) -> int:
        """Number of calls in the program."""
        return len(self.metadata_inputs)


@dataclass
class Program:
    """The body as steps over numbered slots.

    Attributes:
        symbols: sizes of the fakes in it.
        arguments: (slot, position in the call's arguments).
        metadata: slot of each prologue output.
        steps: pieces and attention calls in order.
        pieces: the unique pieces.
        num_slots: size of the slot table.
        outputs: for each result of the call: ("slot", s), ("argument", position), ("metadata", index) or ("constant", value).
        output_values: the fake of each result, None for constants.
        output_memory: the memory that each result lies in, the same for views of one another, None for what is no tensor.
        attention: index of a cu_seqlens -> the distinct attention calls over its segments.
    """

    symbols: Symbols
    arguments: list[tuple[int, int]] = field(default_factory=list)
    metadata: list[int] = field(default_factory=list)
    steps: list[PieceStep | AttentionStep] = field(default_factory=list)
    pieces: list[UniquePiece] = field(default_factory=list)
    num_slots: int = 0
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    output_values: list[Any] = field(default_factory=list)
    output_memory: list[int | None] = field(default_factory=list)
    attention: dict[int, list[AttentionShape]] = field(default_factory=dict)

    @property
    def views(self) -> dict[int, int]:
        """Result -> result whose memory it is a view of: the largest of those that share it, as the trace shows it."""
        owners: dict[Any, int] = {}
        found = [i for i, (kind, _) in enumerate(self.outputs) if kind == "slot"]
        for index in sorted(found, key=lambda i: -_hinted_numel(self.output_values[i])):
            owners.setdefault(self.output_memory[index], index)
        return {i: owners[self.output_memory[i]] for i in found if owners[self.output_memory[i]] != i}

    def reads(self, metadata: int) -> bool:
        """Whether a piece reads that metadata tensor: attention has its own form of it, a result is no read."""
        return any(self.metadata[metadata] in step.inputs for step in self.steps if isinstance(step, PieceStep))


def _hinted_numel(value: Tensor) -> int:
    """Elements of a fake tensor at the sizes that the trace had."""
    return math.prod(size.node.hint or 1 if isinstance(size, torch.SymInt) else size for size in value.shape)
