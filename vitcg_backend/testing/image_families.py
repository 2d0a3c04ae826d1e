"""Vision towers that take one image (or tile) a row: ``[batch, channels, height, width]`` and no grid. Here they are listed.

Everything that a tower needs is data: class, configuration, what else it is called with. All are tiny, with seeded weights.
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .towers import randomise

__all__ = ["ImageFamily", "image_families"]

_SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 32,
}
BATCHES = (1, 3, 2, 5, 9)


def _images(batch: int, noise: torch.Generator, size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Pixels ``[batch, 3, height, width]``."""
    return {"pixel_values": torch.randn(batch, 3, *size, generator=noise)}


def _masked(batch: int, noise: torch.Generator, size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Images with a mask of their patches, ``[batch, height, width]`` in patches: the last ones are smaller."""
    mask = torch.ones(batch, size[0] // 4, size[1] // 4, dtype=torch.bool)
    mask[batch // 2 :, 6:] = False
    return {**_images(batch, noise, size), "patch_attention_mask": mask}


def _padded(batch: int, noise: torch.Generator, size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Patches ``[batch, longest, values]`` with a mask and the sizes of the images in patches."""
    longest = size[0] * size[1] // 16
    shapes = torch.tensor([((8, 8), (4, 8), (6, 5))[i % 3] for i in range(batch)]).clamp(max=min(size) // 4)
    mask = (torch.arange(longest) < shapes.prod(1)[:, None]).long()
    pixels = torch.randn(batch, longest, 48, generator=noise)
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _sized(batch: int, noise: torch.Generator, size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Images in the corner of equal ones, with their sizes in pixels."""
    sizes = [((32, 32), (16, 32), (24, 20))[i % 3] for i in range(batch)]
    return {**_images(batch, noise, size), "image_sizes": torch.tensor(sizes).clamp(max=min(size))}


_Call = TypeVar("_Call")


def in_order_then_shuffled(calls: Sequence[_Call], rounds: int, seed: int) -> list[_Call]:
    """Calls once in order, then `rounds` times each in a seeded order."""
    again = [call for call in calls for _ in range(rounds)]
    random.Random(seed).shuffle(again)
    return [*calls, *again]


@dataclass(frozen=True)
class ImageFamily:
    """A family of towers that take one image a row.

    Attributes:
        name: what it is called in the record.
        path: module of `transformers.models` and class of the tower.
        sizes: fields of the configuration besides the usual ones.
        call: keyword arguments of a call of so many images.
    """

    name: str
    path: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[..., dict[str, Tensor]] = _images

    @property
    def tower_class(self) -> type[nn.Module]:
        """Class of the tower."""
        module, _, name = self.path.rpartition(".")
        found: type[nn.Module] = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        return found

    @property
    def layouts(self) -> tuple[int, ...]:
        """Numbers of images in a call."""
        return BATCHES

    def sequence(self, rounds: int = 2, seed: int = 0) -> list[int]:
        """The numbers of images once in order, then shuffled and repeated."""
        return in_order_then_shuffled(self.layouts, rounds, seed)

    def tower(self, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> nn.Module:
        """A tower of two narrow layers with seeded random weights, in eval mode.

        Args:
            dtype: of its parameters.
            seed: of the weights.
            **sizes: fields of its configuration that are to be different.
        """
        tower_class: Any = self.tower_class
        config = tower_class.config_class(**{**_SIZES, **self.sizes, **sizes})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tower: nn.Module = tower_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
        randomise(tower, torch.Generator().manual_seed(seed))
        return tower.eval()

    def inputs(self, tower: nn.Module, batch: int, seed: int = 0, **how: Any) -> dict[str, Tensor]:
        """Keyword arguments of one call of `batch` images; ``size=(height, width)`` in pixels."""
        arguments = self.call(batch, torch.Generator().manual_seed(seed), **how)
        dtype = next(tower.parameters()).dtype
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in arguments.items()}


_LLAMA4 = {
    "intermediate_size": 256,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_ALL = (
    ImageFamily("clip", "clip.modeling_clip.CLIPVisionModel"),
    ImageFamily("dinov2", "dinov2.modeling_dinov2.Dinov2Model"),
    ImageFamily("dinov3_vit", "dinov3_vit.modeling_dinov3_vit.DINOv3ViTModel"),
    ImageFamily("gemma3", "siglip.modeling_siglip.SiglipVisionModel", {"vision_use_head": False}),
    ImageFamily("idefics3", "idefics3.modeling_idefics3.Idefics3VisionTransformer", call=_masked),
    ImageFamily(
        "internvl",
        "internvl.modeling_internvl.InternVLVisionModel",
        {"patch_size": [4, 4], "image_size": [32, 32], "use_absolute_position_embeddings": True},
    ),
    ImageFamily("llama4", "llama4.modeling_llama4.Llama4VisionModel", _LLAMA4),
    ImageFamily("pixtral", "pixtral.modeling_pixtral.PixtralVisionModel", call=_sized),
    ImageFamily("siglip", "siglip.modeling_siglip.SiglipVisionModel"),
    ImageFamily("siglip2", "siglip2.modeling_siglip2.Siglip2VisionModel", {"num_patches": 64}, _padded),
    ImageFamily("vit", "vit.modeling_vit.ViTModel"),
)


def image_families() -> tuple[ImageFamily, ...]:
    """The families that are installed, by name."""
    return tuple(_installed())


def _installed() -> Iterator[ImageFamily]:
    for family in _ALL:
        try:
            family.tower_class  # noqa: B018  the import is what is tried
        except (ImportError, AttributeError):  # a transformers without it
            continue
        yield family
