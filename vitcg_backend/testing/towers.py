"""Vision towers of transformers with seeded random weights: tiny ones for tests, published sizes for measurements."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..bucketing import Layout, num_patches
from .architectures import ARCHITECTURES, with_depth

__all__ = ["make_inputs", "published_tower", "tiny_tower"]


def tiny_tower(
    name: str,
    *,
    depth: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    seed: int = 0,
    heavy_tailed: bool = False,
) -> nn.Module:
    """A tower of a few narrow layers, in eval mode.

    Width 64, 4 heads, patches of 4 x 4 pixels in 2 frames, merge 2. qwen3_vl has two deepstack levels; qwen2_5_vl has
    windows of 4 x 4 patches and one block of full attention. Every parameter is random, those too that transformers
    starts at zero, so that leaving one out shows; values stay of order 1. The same `seed` gives the same weights on
    every device, rounded to `dtype`.

    Args:
        name: qwen2_vl, qwen2_5_vl or qwen3_vl.
        depth: number of blocks; default 3 (qwen2_vl) or 4.
        dtype: of the parameters. Rotary buffers stay float32, as `from_pretrained` leaves them.
        device: where the tower lives.
        attn_implementation: passed on to transformers.
        seed: of the weights.
        heavy_tailed: give a few channels of the residual stream weights 20 to 50 times larger in some layers, as
            trained models have them. Errors are then judged against larger norms: use it beside plain weights.

    Raises:
        ValueError: unknown `name`, or a `depth` below 1.
    """
    sizes = {key: architecture.tiny for key, architecture in ARCHITECTURES.items() if architecture.tiny is not None}
    _check_name(name, list(sizes), "tiny tower")
    # Made on the CPU: the weights do not depend on the device.
    tower = _build(name, sizes[name], depth, torch.device("cpu"), dtype, attn_implementation)
    chance = torch.Generator().manual_seed(seed)
    randomise(tower, chance)
    if heavy_tailed:
        _add_outliers(tower, chance)
    return tower.to(device)


def published_tower(
    name: str,
    *,
    depth: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> nn.Module:
    """A tower of the released model's sizes with seeded random weights, in eval mode, made on `device`.

    Args:
        name: qwen2_vl, qwen2_5_vl, qwen3_vl or llama4.
        depth: fewer blocks than the released model has. Deepstack levels are spread over them, and the blocks of full
            attention stay where they are or become the last one: each kind of block occurs where there is room for it.
        dtype: of the parameters; rotary buffers stay as the model makes them.
        device: where the tower is made. The random numbers are this device's: weights differ between kinds of device.
        seed: of the weights.

    Raises:
        ValueError: unknown `name`, or a `depth` below 1.
    """
    _check_name(name, list(ARCHITECTURES), "published tower")
    tower = _build(name, ARCHITECTURES[name].published, depth, torch.device(device), dtype, "sdpa")
    randomise(tower, torch.Generator(device).manual_seed(seed))
    return tower


def make_inputs(
    tower: nn.Module,
    layout: Layout | Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Random pixels and the grid of one call: ``tower(pixels, grid_thw=grid)``.

    Args:
        tower: a tower that takes `grid_thw`, compiled or not.
        layout: ``(frames, height, width)`` in patches, one triple per item. Sizes that a tower refuses (odd sides, no
            item) are made as asked for.
        dtype: of the pixels; default the tower's. The same `seed` gives the same values, rounded to it.
        device: of both; default the tower's.
        seed: of the pixels.

    Returns:
        pixels ``[num_patches, channels * temporal_patch_size * patch_size ** 2]``, standard normal, and the grid
        ``[items, 3]`` int64.

    Raises:
        ValueError: the tower takes no `grid_thw`.
    """
    tower = getattr(tower, "_orig_mod", tower)  # what torch.compile wraps
    if "grid_thw" not in inspect.signature(tower.forward).parameters:
        what = f"{type(tower).__name__} takes no grid_thw, so a layout does not describe its inputs"
        raise ValueError(f"{what}; make its image batch yourself: torch.randn(tiles, 3, image_size, image_size).")
    config: Any = tower.config
    weight = next(tower.parameters())
    device = weight.device if device is None else device
    channels = config.in_channels if hasattr(config, "in_channels") else config.num_channels
    row = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    grids = tuple((t, h, w) for t, h, w in layout)
    # Made on the CPU: the values do not depend on the device.
    pixels = torch.randn(num_patches(grids), row, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    return pixels.to(device=device, dtype=dtype or weight.dtype), grid.to(device)


def _check_name(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}.")


def _build(
    name: str,
    sizes: Mapping[str, Any],
    depth: int | None,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
) -> nn.Module:
    """The tower on `device` with its parameters in `dtype`; their values are overwritten later."""
    module, _, tower_class = ARCHITECTURES[name].path.rpartition(".")
    cls = getattr(importlib.import_module(module), tower_class)
    config = cls.config_class(**with_depth(sizes, depth))
    # `_from_config` (modeling_utils.py, transformers 5.24) is what AutoModel calls, which lacks two of these.
    # Casting the finished tower instead would also cast its rotary buffers, and drop the imaginary part of Llama-4's.
    with torch.device(device):
        tower: nn.Module = cls._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return tower.eval()


def _linear_modules(tower: nn.Module) -> Iterator[nn.Linear | nn.Conv2d | nn.Conv3d]:
    return (module for module in tower.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)))


@torch.no_grad()
def randomise(tower: nn.Module, chance: torch.Generator) -> None:
    """Overwrite every parameter so that values of order 1 stay of order 1.

    Weights of linear layers and convolutions by their fan-in, norm weights around 1, biases of 0.1, and what is added
    to the stream (position tables, class tokens) of 0.5.
    """
    linear = {id(module.weight) for module in _linear_modules(tower)}
    for name, parameter in tower.named_parameters():
        spread, centre = 0.5, 0.0
        if id(parameter) in linear:
            spread = parameter[0].numel() ** -0.5
        elif name.endswith("bias"):
            spread = 0.1
        elif name.endswith("weight") and parameter.dim() == 1:
            spread, centre = 0.1, 1.0
        # Drawn in float32, so that towers of different dtypes hold the same numbers.
        values = torch.randn(parameter.shape, generator=chance, device=chance.device, dtype=torch.float32)
        parameter.copy_(values.mul_(spread).add_(centre))


@torch.no_grad()
def _add_outliers(tower: nn.Module, chance: torch.Generator) -> None:
    """Scale one of three channels in every third layer that writes into the residual stream.

    More of them would drown the other channels of so narrow a stream, and with them what a test looks for.
    """
    width = next(tower.parameters()).shape[0]  # the patch embedding comes first
    channels = torch.randperm(width, generator=chance)[:3].tolist()
    writers = [module.weight for module in _linear_modules(tower) if module.weight.shape[0] == width]
    for index, weight in enumerate(writers[::3]):
        weight[channels[index % 3]] *= float(torch.empty(()).uniform_(20, 50, generator=chance))
