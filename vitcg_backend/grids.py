"""From pixels to patches: the grid that a family's own processor makes of a picture or a video.

The resize rules are transformers' own functions (`smart_resize`); what differs between families is data.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import UnknownInput
from .testing.architectures import ARCHITECTURES

__all__ = ["FAMILIES", "FOLLOWS", "PROCESSORS", "Processor", "processor_of", "values_of"]

_IMAGES = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_VIDEOS_BY_FRAME = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_VIDEOS_BY_CLIP = "transformers.models.qwen3_vl.video_processing_qwen3_vl"


@dataclass(frozen=True)
class Processor:
    """How one model makes patches.

    Attributes:
        name: of the family.
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames in a patch.
        merge_size: sides of patches that become one output token.
        min_pixels: of a picture, at least.
        max_pixels: of a picture, at most.
        video_min_pixels: of a frame, or of a clip where `by_clip`.
        video_max_pixels: in the same way.
        by_clip: the bounds of a video count the pixels of all its frames (Qwen3-VL), not of one.
    """

    name: str
    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 3136
    max_pixels: int = 12845056
    video_min_pixels: int = 3136
    video_max_pixels: int = 12845056
    by_clip: bool = False

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """The grid of a picture (one frame) or a video, in patches.

        Args:
            frames: sampled frames; one more is repeated to fill the last patch.
            height: pixels before the resize.
            width: pixels before the resize.

        Raises:
            UnknownInput: a size below 1, or sides that the processor refuses.
        """
        if min(frames, height, width) < 1:
            raise UnknownInput(f"input {frames}x{height}x{width}: frames, height and width are at least 1")
        factor = self.patch_size * self.merge_size
        try:
            if frames == 1:
                size = _smart_resize(_IMAGES)(height, width, factor, self.min_pixels, self.max_pixels)
            elif self.by_clip:
                size = _smart_resize(_VIDEOS_BY_CLIP)(
                    frames, height, width, self.temporal_patch_size, factor, self.video_min_pixels, self.video_max_pixels
                )
            else:
                resize = _smart_resize(_VIDEOS_BY_FRAME)
                size = resize(height, width, factor, self.video_min_pixels, self.video_max_pixels)
        except ValueError as error:
            raise UnknownInput(f"input {frames}x{height}x{width}: {error}") from None
        return math.ceil(frames / self.temporal_patch_size), size[0] // self.patch_size, size[1] // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Output tokens of a grid."""
        return math.prod(grid) // self.merge_size**2


# The pixel bounds of the published preprocessor_config.json and video_preprocessor_config.json files.
PROCESSORS = {
    "qwen2_vl": Processor("qwen2_vl", 14),
    "qwen2_5_vl": Processor("qwen2_5_vl", 14),
    "qwen3_vl": Processor(
        "qwen3_vl",
        16,
        min_pixels=65536,
        max_pixels=16777216,
        video_min_pixels=4096,
        video_max_pixels=25165824,
        by_clip=True,
    ),
}
FOLLOWS = {
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
    "cosmos3_omni": "qwen3_vl",
    "dots3_note": "qwen3_vl",
    "lfm3_vl": "qwen3_vl",
    "qwen2_5_omni": "qwen2_5_vl",
    "qwen3_omni_moe": "qwen2_5_vl",
    "exaone4_5": "qwen2_5_vl",
    "hyperclovax_vision_v2": "qwen2_5_vl",
}
"""Families that have the processors of another: its rules, and its pixel bounds where no file gives others."""

FAMILIES = (*PROCESSORS, *FOLLOWS)
"""Names of all families that are known here."""


def processor_of(config: Any) -> Processor:
    """The processor of a family's name, a configuration, or a folder with ``config.json``.

    Args:
        config: a name such as "qwen3_vl"; a configuration of transformers, of the model or of its tower, or its dictionary
            (patch sizes are taken from it); or a folder, whose ``preprocessor_config.json`` and
            ``video_preprocessor_config.json`` give the pixel bounds where they exist.

    Raises:
        UnknownInput: unknown family, no such folder, a file that is no configuration, or a value of another kind.
    """
    if isinstance(config, str) and not _is_folder(config):
        return _with_sizes(_family(config), values_of(config))
    if isinstance(config, (str, Path)):
        return _from_folder(Path(config))
    return _from_values(_dictionary(config))


def values_of(config: Any) -> dict[str, Any]:
    """The vision part of a configuration, see `processor_of`; for a name released or default sizes."""
    if isinstance(config, str) and not _is_folder(config):
        name = _family(config).name
        return dict(ARCHITECTURES[name].published) if name in ARCHITECTURES else _vision(_default(name))
    return _vision(_read(Path(config) / "config.json") if isinstance(config, (str, Path)) else _dictionary(config))


def _dictionary(config: Any) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if not callable(getattr(config, "to_dict", None)):
        raise UnknownInput(
            f"config {config!r:.60}: expected the name of a family ({', '.join(FAMILIES)}), a configuration of "
            "transformers or its dictionary, or a folder with config.json"
        )
    values: dict[str, Any] = config.to_dict()
    return values


def _default(name: str) -> dict[str, Any]:
    """The dictionary of a family's configuration with its default sizes."""
    try:
        config_class = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[name]
    except (ImportError, KeyError):
        raise UnknownInput(f"the sizes of {name!r} come from transformers, and the installed one has no such family") from None
    config_class = config_class.sub_configs.get("thinker_config", config_class)  # a model that speaks, too
    values: dict[str, Any] = config_class().to_dict()
    return values


def _vision(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] | None = (values.get("thinker_config") or values).get("vision_config")
    return nested or values


def _is_folder(text: str) -> bool:
    return "/" in text or Path(text).is_dir()


def _from_values(values: dict[str, Any]) -> Processor:
    vision = _vision(values)
    kind = str(values.get("model_type") or vision.get("model_type") or "")
    return _with_sizes(_family(re.sub("_thinker$|_vision$|_vision_encoder$", "", kind)), vision)


def _with_sizes(processor: Processor, vision: dict[str, Any]) -> Processor:
    named = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "spatial_merge_size": "merge_size"}
    given = {field: vision[name] for name, field in named.items() if isinstance(vision.get(name), int)}
    return replace(processor, **given)


def _from_folder(folder: Path) -> Processor:
    processor = _from_values(_read(folder / "config.json"))
    images, videos = (folder / name for name in ("preprocessor_config.json", "video_preprocessor_config.json"))
    if images.is_file():
        low, high = _bounds(_read(images), (processor.min_pixels, processor.max_pixels))
        processor = replace(processor, min_pixels=low, max_pixels=high)
        if not processor.by_clip:  # without a file of their own, videos take the pictures' bounds
            processor = replace(processor, video_min_pixels=low, video_max_pixels=high)
    if videos.is_file():
        low, high = _bounds(_read(videos), (processor.video_min_pixels, processor.video_max_pixels))
        processor = replace(processor, video_min_pixels=low, video_max_pixels=high)
    return processor


def _bounds(values: dict[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    size = values.get("size") or {}
    low = values.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or default[0]
    high = values.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or default[1]
    return int(low), int(high)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UnknownInput(f"no such file: {path}") from None
    except ValueError as error:
        raise UnknownInput(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UnknownInput(f"{path} is not a configuration: it holds a {type(values).__name__}")
    return values


def _family(name: str) -> Processor:
    rules = PROCESSORS.get(FOLLOWS.get(name, name))
    if rules is None:
        raise UnknownInput(f"unknown model {name!r}; known: {', '.join(FAMILIES)}")
    return replace(rules, name=name)


def _smart_resize(module: str) -> Any:
    try:
        return importlib.import_module(module).smart_resize
    except ImportError as error:
        raise UnknownInput(f"the rules of the processors come from transformers>=5.17 ({error})") from None
