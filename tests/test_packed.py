"""packed: tensors in one buffer and back."""

from __future__ import annotations

import pytest
import torch

from vitcg_backend.packed import copy_all, pack, places, unpack


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


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float16, torch.float16], [torch.bfloat16, torch.float32]])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5), (7,), (), (0, 4), (2, 3, 8)])
def test_all_are_copied_whatever_they_are(dtypes: list[torch.dtype], shape: tuple[int, ...]) -> None:
    """Bit for bit: odd numbers of 16-bit numbers, tensors at odd places, with gaps, of several dtypes; NaN, too."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    words = [torch.randn(shape).to(dtype) for dtype in dtypes]
    words[0].view(-1)[:1] = float("nan")
    odd = [torch.randn(9).to(dtypes[0])[1:7]]
    gaps = [torch.randn(4, 8).to(dtypes[0])[:, :6]]
    for sources in (words, words + odd, words + gaps, odd, gaps):
        targets = [torch.zeros_like(source) for source in sources]
        copy_all(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(bits(target), bits(source))
    values = torch.zeros(8, dtype=torch.bfloat16)
    copy_all([values[1:7]], [torch.ones(6, dtype=torch.bfloat16)])
    assert values.tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    copy_all([], [])
