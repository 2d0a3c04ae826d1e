"""What every packed attention kernel has in common: its bounds, its interface, its checks.

A kernel is chosen when a bucket is built and then runs from a CUDA graph: everything that decides a launch is a
constant of the bucket (`SegmentBounds`), everything that changes between replays is the content of one tensor
(`VarlenKernel.metadata`).
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

__all__ = [
    "AttentionShape",
    "CuSeqlensKernel",
    "KernelChoice",
    "SegmentBounds",
    "VarlenKernel",
    "check_tensors",
    "check_values",
    "checked_cu_seqlens",
    "half_unusable",
    "padded_cu_seqlens",
]


@dataclass(frozen=True)
class SegmentBounds:
    """Static bounds of one captured size.

    Attributes:
        rows: packed rows of the bucket, ``q.shape[0]``.
        segments: capacity, the most segments a call may have (empty ones are allowed and count).
        longest: no segment has more rows than this.
    """

    rows: int
    segments: int
    longest: int

    def __post_init__(self) -> None:
        for name in ("rows", "segments", "longest"):
            if getattr(self, name) < 0:
                raise ValueError(f"SegmentBounds.{name} is {getattr(self, name)}: it must be zero or more")

    @classmethod
    def of(cls, cu_seqlens: Sequence[int]) -> SegmentBounds:
        """The exact bounds of segments: prefix sums of their lengths, ``[segments + 1]``, first entry 0."""
        longest = max((end - start for start, end in itertools.pairwise(cu_seqlens)), default=0)
        return cls(cu_seqlens[-1], len(cu_seqlens) - 1, longest)

    def joined(self, other: SegmentBounds) -> SegmentBounds:
        """The closest bounds of the same rows that admit segments within these and within `other`."""
        return SegmentBounds(self.rows, max(self.segments, other.segments), max(self.longest, other.longest))

    def admit(self, other: SegmentBounds) -> bool:
        """Whether segments within `other` are within these bounds, for the same rows."""
        return self.rows == other.rows and self.segments >= other.segments and self.longest >= other.longest


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed of an attention call, whatever its rows: q has `heads` heads, k and v have `kv_heads`."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class KernelChoice(Protocol):
    """Which kernel serves which segments of a tower: one for all (each `VarlenKernel` is that), or by their bounds."""

    @property
    def capturable(self) -> bool:
        """Whether what is chosen may run inside a CUDA graph capture."""

    def at(self, segments: int, bounds: SegmentBounds, *, measure: bool, shared: bool = False) -> VarlenKernel:
        """The kernel of one cu_seqlens of the tower.

        Args:
            segments: its index among the metadata.
            bounds: exact bounds of one layout.
            measure: whether candidates may be timed on the device for an answer that is not known yet.
            shared: other layouts are to use the same capture, so a kernel is wanted that serves wide bounds as well.
        """


class VarlenKernel(abc.ABC):
    """Non-causal attention over packed segments. Implementations are stateless.

    Attributes:
        name: its key in `KERNELS` and in the ``attention`` option.
        capturable: `forward` may run inside a CUDA graph capture.
        needs_longest: cost or launch depend on ``bounds.longest`` and ``bounds.segments``, so these are worth tiering.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool]
    needs_longest: ClassVar[bool]

    @abc.abstractmethod
    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot run there, in words, or None when it can."""

    def at(self, segments: int, bounds: SegmentBounds, *, measure: bool, shared: bool = False) -> VarlenKernel:
        """Itself, for all segments and bounds: see `KernelChoice.at`."""
        return self

    @abc.abstractmethod
    def metadata(self, cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
        """What `forward` reads on the device about the segments of one call.

        Args:
            cu_seqlens: prefix sums of the segment lengths on the host, ``[segments + 1]``, first entry 0.
            bounds: the bucket's bounds; the shape of the result depends on nothing else.

        Returns:
            An int32 CPU tensor.

        Raises:
            ValueError: `cu_seqlens` does not fit `bounds`.
        """

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """Attention of every row to the rows of its own segment.

        Args:
            q: ``[rows, heads, head_dim]``. Any strides with a contiguous last axis; q, k and v are read where they lie.
            k: ``[rows, kv_heads, head_dim]``, ``kv_heads`` divides ``heads``.
            v: ``[rows, kv_heads, value_dim]``.
            metadata: result of `metadata` for these bounds, on the device of `q`.
            bounds: the bucket's bounds.
            scale: factor of the scores before the softmax.

        Returns:
            A new contiguous ``[rows, heads, value_dim]`` tensor. Rows that no segment covers are zero.

        Raises:
            ValueError: shapes disagree with each other, with `bounds` or with what the kernel can do.
        """

    def load(  # noqa: B027  # most kernels have nothing to compile
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Iterable[SegmentBounds], scale: float
    ) -> None:
        """Compile what `forward` would compile for each of `bounds`, and load it, by launches on q, k and v of few rows.

        Nothing where bounds decide by numbers alone how a kernel is launched.
        """


class CuSeqlensKernel(VarlenKernel):
    """A kernel that reads cu_seqlens as they are, and launches for the longest of so many segments."""

    capturable: ClassVar[bool] = True
    needs_longest: ClassVar[bool] = True

    def metadata(self, cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
        """`cu_seqlens` padded to ``[bounds.segments + 1]``; it has to cover every row."""
        return padded_cu_seqlens(cu_seqlens, bounds, cover=True)


def half_unusable(who: str, device: torch.device, dtype: torch.dtype, head_dim: int, largest: int) -> str | None:
    """Why a kernel for half precision on CUDA, compute capability 8.0 and head sizes in steps of 8 cannot run, or None.

    Args:
        who: the kernel in words, for the text.
        device: where q, k and v live.
        dtype: their dtype.
        head_dim: their head size.
        largest: the largest head size.
    """
    if device.type != "cuda":
        return f"{who} needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{who} needs float16 or bfloat16, not {dtype}"
    if head_dim % 8 or not 0 < head_dim <= largest:
        return f"{who} needs a head size that is a multiple of 8 up to {largest}, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{who} needs compute capability 8.0 or more ({torch.cuda.get_device_name(device)})"
    return None


def check_values(name: str, q: Tensor, v: Tensor) -> None:
    """Check that values have the head size of the queries, for the kernel called `name`.

    Raises:
        ValueError: they have another.
    """
    if v.shape[2] != q.shape[2]:
        raise ValueError(f"attention {name!r} needs values of the keys' head size {q.shape[2]}, not {v.shape[2]}")


def checked_cu_seqlens(cu_seqlens: Sequence[int], bounds: SegmentBounds, *, cover: bool) -> list[int]:
    """`cu_seqlens` as a list of ints, after all checks against `bounds`.

    Plain Python: for the few hundred numbers of a call it is faster than a handful of tensor operations.

    Args:
        cu_seqlens: prefix sums of the segment lengths, ``[segments + 1]``.
        bounds: the bucket's bounds.
        cover: every row has to lie in a segment.

    Raises:
        ValueError: they do not start at 0, decrease, or do not fit `bounds`.
    """
    cu = [int(x) for x in cu_seqlens]
    if not cu or cu[0] != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {cu[:4]}{'...' if len(cu) > 4 else ''}")
    segments, last = len(cu) - 1, cu[-1]
    if segments > bounds.segments:
        raise ValueError(f"{segments} segments do not fit into the bucket's bound of {bounds.segments}")
    lengths = [end - start for start, end in itertools.pairwise(cu)]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest < 0:
        at = lengths.index(shortest)
        raise ValueError(f"cu_seqlens decreases from {cu[at]} to {cu[at + 1]} at index {at + 1}")
    if longest > bounds.longest:
        at = lengths.index(longest)
        raise ValueError(f"segment {at} has {longest} rows: the bucket's bound is {bounds.longest} rows a segment")
    if last > bounds.rows:
        raise ValueError(f"cu_seqlens ends at {last}: the bucket has only {bounds.rows} rows")
    if cover and last != bounds.rows:
        raise ValueError(
            f"cu_seqlens ends at {last}, the bucket has {bounds.rows} rows: this kernel leaves rows outside every "
            "segment unwritten, so add segments that cover the padded rows"
        )
    return cu


def padded_cu_seqlens(cu_seqlens: Sequence[int], bounds: SegmentBounds, *, cover: bool) -> Tensor:
    """Checked `cu_seqlens`, int32 ``[bounds.segments + 1]``: the segments that are not there are empty, at the end."""
    cu = checked_cu_seqlens(cu_seqlens, bounds, cover=cover)
    padded = torch.full((bounds.segments + 1,), cu[-1], dtype=torch.int32)
    padded[: len(cu)] = torch.tensor(cu, dtype=torch.int32)
    return padded


def check_tensors(q: Tensor, k: Tensor, v: Tensor, rows: int | None, *, strides: bool = True) -> None:
    """Check that q, k and v are packed heads of `rows` rows that belong together, and their last axes contiguous.

    Args:
        q: see `VarlenKernel.forward`, and so k and v.
        k: see `q`.
        v: see `q`.
        rows: rows that each of them must have; None = leave the rows alone.
        strides: also check the last axes.

    Raises:
        ValueError: one of them is not 3-dimensional, their shapes disagree, or a last axis is not contiguous.
    """
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"packed attention takes [rows, heads, head_dim] tensors, got {shapes}")
    if rows is not None and not q.shape[0] == k.shape[0] == v.shape[0] == rows:
        raise ValueError(f"packed attention of {rows} rows got {shapes}")
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of k and v must be equal and divide those of q, got {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same head size, got {shapes}")
    last = [x.stride(2) for x in (q, k, v)]
    if strides and last != [1, 1, 1]:
        raise ValueError(f"the last axis of q, k and v must be contiguous, got strides {last}")
