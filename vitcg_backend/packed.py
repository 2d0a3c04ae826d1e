"""Several tensors in one copy: many small ones in one buffer, results side by side."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["copy_all", "pack", "places", "unpack"]

_ALIGNMENT = 128  # bytes: kernels are compiled for inputs that begin at a multiple of 16


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in one buffer tensors of these sizes begin, and the buffer's size, all in bytes."""
    ends = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def pack(sources: Sequence[Sequence[Tensor]], *, pinned: bool) -> Tensor:
    """Tensors on the host in one buffer, where `places` says.

    Args:
        sources: for each of them dense tensors that make it up, one after another.
        pinned: the buffer is page-locked, so that a copy of it to a GPU waits for nothing.

    Returns:
        uint8, one axis; what lies between the tensors is not set.
    """
    sizes = [[piece.nbytes for piece in pieces] for pieces in sources]
    offsets, total = places([sum(each) for each in sizes])
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    start = buffer.data_ptr()
    for offset, pieces, each in zip(offsets, sources, sizes, strict=True):
        address = start + offset
        for piece, size in zip(pieces, each, strict=True):
            # Not `copy_` or `cat`: above 32 KiB these wake torch's threads, for longer than the copy takes.
            ctypes.memmove(address, piece.data_ptr(), size)
            address += size
    return buffer


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Views of a buffer's tensors."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    parts = zip(places(sizes)[0], sizes, shapes, dtypes, strict=True)
    return [buffer[offset : offset + size].view(dtype).view(tuple(shape)) for offset, size, shape, dtype in parts]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same shapes, in one launch where they are on one GPU and of one dtype."""
    to, of = list(targets), list(sources)
    if not to:
        return
    if all(map(_is_words, (*to, *of))) and all(t.dtype == s.dtype for t, s in zip(to, of, strict=True)):
        # Each thread moves four numbers at a time: of half precision that is half of what it can.
        to, of = [t.view(torch.int32) for t in to], [s.view(torch.int32) for s in of]
    torch._foreach_copy_(to, of, non_blocking=True)


def _is_words(tensor: Tensor) -> bool:
    """Whether a tensor of 16-bit numbers in one piece is a tensor of 32-bit words, too."""
    even = tensor.itemsize == 2 and tensor.dim() > 0 and tensor.shape[-1] % 2 == 0 and tensor.storage_offset() % 2 == 0
    return even and tensor.is_contiguous()
