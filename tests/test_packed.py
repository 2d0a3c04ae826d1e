"""packed: tensors in one buffer and back."""

from __future__ import annotations

import torch

from vitcg_backend.packed import pack, places, unpack


def test_what_is_packed_comes_out_again() -> None:
    """Of every size and dtype, empty ones too, each at a multiple of 128 bytes; a source may be of several tensors."""
    wide, narrow = torch.randn(5, 3, dtype=torch.float64), torch.arange(7, dtype=torch.int8)
    flags, empty = torch.tensor([True, False, True]), torch.empty(0, 4, dtype=torch.int64)
    halves = torch.randn(6, 2, dtype=torch.bfloat16)
    buffer = pack([(wide[:2], wide[2:]), (narrow,), (empty,), (flags,), (halves,)], pinned=False)
    tensors = [wide, narrow, empty, flags, halves]
    found = unpack(buffer, [t.shape for t in tensors], [t.dtype for t in tensors])
    for tensor, again in zip(tensors, found, strict=True):
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)
    offsets, total = places([t.nbytes for t in tensors])
    assert total == len(buffer)
    assert [t.data_ptr() - buffer.data_ptr() for t in found if len(t)] == [offsets[0], offsets[1], offsets[3], offsets[4]]
    assert all(offset % 128 == 0 for offset in offsets)


def test_nothing_to_pack() -> None:
    """A capture that reads no metadata."""
    assert len(pack([], pinned=False)) == 0
    assert unpack(pack([], pinned=False), [], []) == []
