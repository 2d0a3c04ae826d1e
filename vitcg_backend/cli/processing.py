"""From pictures to a tower's input: transformers' own image processor, built from its class, without a hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PROCESSORS", "Packed", "Preprocessor", "concatenate"]

_HALF = [0.5, 0.5, 0.5]

# Arguments of the published preprocessor_config.json files that differ from the class's defaults. One class serves all.
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"patch_size": 14},
    "qwen2_5_vl": {"patch_size": 14},
    "qwen3_vl": {"patch_size": 16, "image_mean": _HALF, "image_std": _HALF},
}


@dataclass(frozen=True)
class Packed:
    """Input of one call.

    Attributes:
        pixel_values: `[num_patches, channels * temporal_patch_size * patch_size ** 2]`, float32.
        grid_thw: `[num_items, 3]` int64, each row frames, height and width in patches.
    """

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor


def concatenate(parts: Sequence[Packed]) -> Packed:
    """Several inputs in one call, in order."""
    return Packed(torch.cat([part.pixel_values for part in parts]), torch.cat([part.grid_thw for part in parts]))


class Preprocessor:
    """The image processor of one model family, with a bound on the size of a picture.

    The variant that works on arrays (Pillow, no torchvision) is used: torchvision is one more package that has to match
    torch's build.
    """

    def __init__(self, model: str, max_pixels: int) -> None:
        """Build the processor.

        Args:
            model: a name in `PROCESSORS`.
            max_pixels: pictures are scaled down to at most this many pixels.

        Raises:
            UserError: transformers is missing or older than 5.17.
        """
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        except ImportError as error:
            raise UserError(f"the image processor needs transformers>=5.17 and Pillow ({error})") from None
        arguments = PROCESSORS[model]
        shortest = min(4 * (2 * arguments["patch_size"]) ** 2, max_pixels)
        self._processor = Qwen2VLImageProcessorPil(size={"shortest_edge": shortest, "longest_edge": max_pixels}, **arguments)

    def image(self, picture: Image) -> Packed:
        """One photograph: `grid_thw` is `[[1, height, width]]`."""
        return self._process([picture])

    def clip(self, frames: Sequence[Image]) -> Packed:
        """One clip: `grid_thw` is `[[frames / temporal_patch_size, height, width]]`.

        The families' video processors need torchvision, so the frames go through the image processor and are packed by
        the video processor's rule: a patch holds the same place of `temporal_patch_size` successive frames. The image
        processor repeats its one frame there, so the rule is a choice among repeats.

        Args:
            frames: pictures of one size, a multiple of `temporal_patch_size` of them.
        """
        frames_per_patch = self._processor.temporal_patch_size
        side = self._processor.patch_size
        single = self._process(frames)
        _, height, width = single.grid_thw[0].tolist()
        grid_t = len(frames) // frames_per_patch
        # [time, frame in patch, place, channel, repeat, pixel]
        pixels = single.pixel_values.reshape(grid_t, frames_per_patch, height * width, -1, frames_per_patch, side * side)
        patches = torch.stack([pixels[:, index, :, :, index] for index in range(frames_per_patch)], dim=3)
        return Packed(patches.reshape(grid_t * height * width, -1), torch.tensor([[grid_t, height, width]]))

    def _process(self, pictures: Sequence[Image]) -> Packed:
        batch = self._processor(images=list(pictures), return_tensors="pt")
        return Packed(batch["pixel_values"], batch["image_grid_thw"])
