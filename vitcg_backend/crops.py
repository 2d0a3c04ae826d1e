"""Images that lie padded in one batch, as the patches of each alone: an operator in front of all that a bucket holds.

A tower that crops each image to its own size in a loop, and packs the rows, cannot be traced as it stands. With the crops as
one operator it is a packed tower: rows are patches, and its grid is that of the cropped images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _torch
from .marking import mark_padded_images

__all__ = ["CROPS", "crops", "cut", "image_boundaries", "image_positions"]


def crops(pixels: Tensor, sizes: Tensor | Sequence[Sequence[int]] | None, patch: int) -> tuple[Tensor, Tensor]:
    """The patches of images that lie padded in one batch. To be called while Dynamo traces, in the packed form of a forward.

    Args:
        pixels: ``[images, channels, height, width]``.
        sizes: height and width of each image in pixels: whole numbers ``[images, 2]``, pairs, or None where all are full.
            As in a slice, what is too large is cut off, and below zero it counts from the end.
        patch: side of a patch in pixels.

    Returns:
        The patches ``[patches, channels, patch, patch]``, image by image and row by row, and the grid int64 ``[images, 3]``:
        one frame, height and width in patches, without images that have no patch.
    """
    mark_padded_images(patch)
    if sizes is None or isinstance(sizes, Tensor):
        return torch.ops.vitcg.crops(pixels, sizes, None, patch)
    return torch.ops.vitcg.crops(pixels, None, [number for size in sizes for number in (size[0], size[1])], patch)


def cut(pixels: Tensor, sizes: Tensor | None, numbers: Sequence[int] | None, patch: int) -> tuple[Tensor, Tensor]:
    """What the operator does; `numbers` are sizes one after another.

    Raises:
        RuntimeError: no image, or one smaller than a patch: eager's own error.
    """
    channels, height, width = pixels.shape[1:]
    high, wide = height // patch, width // patch
    if high == 0 or wide == 0:  # the convolution says so
        torch.nn.functional.conv2d(pixels[:, :1], pixels.new_zeros(1, 1, patch, patch), stride=patch)
    if sizes is not None:
        given = sizes.tolist()
    elif numbers is not None:
        given = list(zip(numbers[::2], numbers[1::2], strict=True))
    else:
        given = [(height, width)] * len(pixels)
    shapes = [(len(range(high)[: h // patch]), len(range(wide)[: w // patch])) for h, w in given[: len(pixels)]]
    tiles = pixels[:, :, : high * patch, : wide * patch].unflatten(3, (wide, patch)).unflatten(2, (high, patch))
    tiles = tiles.permute(0, 2, 4, 1, 3, 5)
    patches = torch.cat([tiles[i, :h, :w].reshape(-1, channels, patch, patch) for i, (h, w) in enumerate(shapes)])
    on_gpu = pixels.device.type == "cuda"
    rows = [(1, h, w) for h, w in shapes if h and w]
    grid = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu).view(-1, 3).to(pixels.device, non_blocking=True)
    return patches, grid


@torch.library.custom_op("vitcg::crops", mutates_args=())
def _crops(pixels: Tensor, sizes: Tensor | None, numbers: Sequence[int] | None, patch: int) -> tuple[Tensor, Tensor]:
    return cut(pixels, sizes, numbers, patch)


@_crops.register_fake
def _(pixels: Tensor, sizes: Tensor | None, numbers: Sequence[int] | None, patch: int) -> tuple[Tensor, Tensor]:
    rows, images = _torch.fresh_size(), _torch.fresh_size()
    grid = pixels.new_empty((images, 3), dtype=torch.int64)
    grid._vitcg_patches = rows  # type: ignore[attr-defined]  # for the metadata operators that read it, see `ops`
    return pixels.new_empty((rows, pixels.shape[1], patch, patch)), grid


CROPS = (torch.ops.vitcg.crops, torch.ops.vitcg.crops.default)


def image_positions(grid_thw: Tensor) -> Tensor:
    """Row and column of each patch in its image, int64 ``[patches, 2]``, for a grid of single frames."""
    places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grid_thw.tolist()]
    return torch.cat([torch.empty(0, 2, dtype=torch.int64), *places])


def image_boundaries(grid_thw: Tensor) -> Tensor:
    """Where each image begins, and the end of the last, int32 ``[images + 1]``; without any, one without patches."""
    lengths = [t * h * w for t, h, w in grid_thw.tolist()]
    return torch.tensor([0, *(lengths or [0])]).cumsum(0).int()
