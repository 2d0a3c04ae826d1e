"""Vision towers of the installed transformers, discovered: each family with a tiny seeded tower and inputs for a layout.

A family belongs here when its modelling file takes metadata from `transformers.vision_utils`, or has no tower of its own and
nests one of these. Nothing lists them: a new transformers brings new ones. What is data here are sizes (`_SIZES`, by the name
of a configuration's field) and, for the few that differ, the exceptions of a family (`_EXCEPTIONS`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..bucketing import Layout, num_patches
from ..counters import Stats
from ..family_record import FamilyStatus
from .error_budget import assert_within_budget
from .image_families import ImageFamily, in_order_then_shuffled
from .outputs import assert_bitwise, flatten, reference_float64
from .towers import randomise

__all__ = ["Family", "discover", "measure"]

_SIZES: Mapping[str, Any] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 128,
    "mlp_ratio": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "projection_hidden_dim": 64,
    "projection_intermediate_size": 128,
    "adapter_in_dim": 64,
    "adapter_out_dim": 32,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "patch_size": 4,
    "image_size": 32,
    "max_image_size": 32,
    "num_position_embeddings": 64,
    "num_patches": 64,
    "posemb_grid_size": 8,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}
"""Sizes of a tiny tower, by the field of a configuration: each configuration takes those that it has."""

_VIDEOS: tuple[Layout, ...] = (
    ((1, 4, 4),),
    ((1, 8, 4), (1, 4, 4)),
    ((2, 8, 8),),
    ((1, 4, 4), (1, 8, 4), (2, 4, 8)),
    ((2, 4, 8), (1, 4, 4), (1, 8, 4)),
    ((1, 16, 12),),
)
_IMAGES: tuple[Layout, ...] = tuple(tuple((1, t * h, w) for t, h, w in layout) for layout in _VIDEOS)


def _flat(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[patches, values of a patch]``: as wide as the patch embedding's weight reads."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    width = next(m.weight[0].numel() for name, m in tower.named_modules() if isinstance(m, kinds) and "embed" in name)
    return torch.randn(num_patches(layout), width, generator=noise)


def _patches(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[patches, channels, patch, patch]``."""
    return torch.randn(num_patches(layout), 3, 4, 4, generator=noise)


def _batched(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[1, patches, channels, patch, patch]``."""
    return _patches(tower, layout, noise)[None]


def _side_by_side(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[1, channels, patch, patch * patches]``."""
    return torch.randn(1, 3, 4, 4 * num_patches(layout), generator=noise)


def _merged(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[tokens, merge * patch, merge * patch, channels]``; the grid counts tokens."""
    return torch.randn(num_patches(layout), 8, 8, 3, generator=noise)


def _image(tower: nn.Module, layout: Layout, noise: torch.Generator) -> Tensor:
    """``[images, channels, height, width]``: one size a call, that of the first item."""
    _, height, width = layout[0]
    return torch.randn(len(layout), 3, 4 * height, 4 * width, generator=noise)


@dataclass(frozen=True)
class _Exception:
    """How a family differs: sizes, pixels, and the layouts that eager takes."""

    sizes: Mapping[str, Any] | None = None
    pixels: Callable[[nn.Module, Layout, torch.Generator], Tensor] = _flat
    layouts: tuple[Layout, ...] = _VIDEOS


_MUSE = _Exception({"pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16})
_MINICPM = _Exception({"num_hidden_layers": 3, "insert_layer_id": 1}, _side_by_side, _IMAGES)
_EXCEPTIONS = {
    "dots3_note": _Exception({"mlp_layer_types": ["dense", "sparse"]}),
    "glm46v": _Exception(layouts=_IMAGES),  # frames come as items of one frame: eager rejects t > 1
    "glm4v": _Exception(layouts=_IMAGES),
    "glm4v_moe": _Exception(layouts=_IMAGES),
    "glm_image": _Exception(layouts=_IMAGES),
    "glmga": _Exception(layouts=_IMAGES),
    "hunyuan_vl": _Exception(layouts=_IMAGES),
    "hy_v4_vl": _Exception(layouts=_IMAGES),
    "inkling2": _Exception(pixels=_merged, layouts=_IMAGES),
    "inkling2_loop": _Exception(pixels=_merged, layouts=_IMAGES),
    "kimi_k25": _Exception(pixels=_patches),
    "lfm3_vl": _Exception({"layer_types": ["conv", "full_attention"]}),
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "muse_glimmer": _MUSE,
    "muse_spark": _MUSE,
    "paddleocr_vl": _Exception(pixels=_batched, layouts=_IMAGES),
    "qwen2_vl": _Exception({"hidden_size": 32}),
    "step3p7": _Exception(
        {"max_position_embeddings": 64},
        _image,
        (((1, 8, 8),), ((1, 8, 8), (1, 8, 8)), ((1, 8, 8),) * 3, ((1, 4, 8), (1, 4, 8)), ((1, 4, 4),)),
    ),
}


@dataclass(frozen=True)
class Family:
    """A family of models with a vision tower.

    Attributes:
        name: its folder in `transformers.models`.
        tower_class: the tower's class; of another family where this one nests its tower.
        config_class: the tower's configuration class.
        pixels: name of the tower's argument of pixels.
        grid: name of its argument of sizes, None when it takes one image size a call.
    """

    name: str
    tower_class: type[nn.Module]
    config_class: type
    pixels: str
    grid: str | None

    @property
    def measured_by(self) -> tuple[Any, ...]:
        """What `measure` depends on: families that agree in it, one of which nests the tower of the other, come out alike."""
        return self.tower_class, self.config_class, self.pixels, self.grid, _EXCEPTIONS.get(self.name, _Exception())

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that eager takes: one item first, then several, frames where it takes them."""
        return _EXCEPTIONS.get(self.name, _Exception()).layouts

    def sequence(self, rounds: int = 2, seed: int = 0) -> list[Layout]:
        """The layouts once in order, then shuffled and repeated."""
        return in_order_then_shuffled(self.layouts, rounds, seed)

    def tower(self, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> nn.Module:
        """A tower of two narrow layers with seeded random weights, in eval mode.

        Args:
            dtype: of its parameters.
            seed: of the weights.
            **sizes: fields of its configuration that are to be different.
        """
        given = {**_SIZES, **(_EXCEPTIONS.get(self.name, _Exception()).sizes or {}), **sizes}
        fields = _fields(self.config_class)
        config = self.config_class(**_suited({k: v for k, v in given.items() if k in fields}, self.config_class))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tower: nn.Module = self.tower_class._from_config(config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[attr-defined]
        randomise(tower, torch.Generator().manual_seed(seed))
        return tower.eval()

    def inputs(self, tower: nn.Module, layout: Layout, seed: int = 0) -> dict[str, Tensor]:
        """Keyword arguments of one call: random pixels and the layout's grid."""
        noise = torch.Generator().manual_seed(seed)
        dtype = next(tower.parameters()).dtype
        pixels = _EXCEPTIONS.get(self.name, _Exception()).pixels(tower, layout, noise)
        arguments = {self.pixels: pixels.to(dtype)}
        if self.grid == "target_sizes":
            arguments[self.grid] = torch.tensor([row[1:] for row in layout], dtype=torch.int32)
        elif self.grid is not None:
            arguments[self.grid] = torch.tensor(layout)
        if "merge_sizes" in inspect.signature(tower.forward).parameters:
            arguments["merge_sizes"] = torch.tensor([2 if t > 1 else 1 for t, _, _ in layout])
        return arguments


def _fields(config_class: type) -> set[str]:
    """Fields that a configuration class takes: a dataclass from transformers 5 on, an ``__init__`` before."""
    names = set(inspect.signature(config_class.__init__).parameters)  # type: ignore[misc]
    return names | set(getattr(config_class, "__dataclass_fields__", ()))


def _suited(sizes: dict[str, Any], config_class: type) -> dict[str, Any]:
    """Numbers of the type that the configuration has, pairs where it has pairs, and layer types cut to the depth."""
    default = config_class().to_dict()
    for name, size in list(sizes.items()):
        usual = default.get(name)
        if isinstance(usual, float):
            sizes[name] = float(size)
        elif isinstance(usual, (list, tuple)) and isinstance(size, int):
            sizes[name] = [size] * len(usual)
        elif usual is None and isinstance(size, list):
            del sizes[name]  # a tower that has none by default
    kinds = default.get("layer_types")
    if kinds and "layer_types" not in sizes and "layer_types" in _fields(config_class):
        different = list(dict.fromkeys(kinds))
        sizes["layer_types"] = (different * 2)[: sizes.get("num_hidden_layers", 2)]
    return sizes


def measure(family: Family | ImageFamily) -> FamilyStatus:
    """Run a tiny tower of a family, compiled and eager, over its sequence of layouts.

    A layout that eager rejects is left out. The pieces run eagerly: what is looked at is what is traced, proved and captured.
    Every output is kept and looked at again at the end.

    Raises:
        AssertionError: an output differs from eager, or changed later; or eager rejects most layouts.
    """
    from .. import stats

    tower = family.tower()
    torch._dynamo.reset()
    compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    held: list[tuple[Any, Any]] = []
    rejected: dict[Any, Exception] = {}
    with torch.no_grad():
        for step, layout in enumerate(family.sequence()):
            inputs = family.inputs(tower, layout, seed=step)  # type: ignore[arg-type]  # one of the family's own
            try:
                expected = tower(**inputs)
            except (RuntimeError, IndexError, ValueError) as error:  # a layout for other versions of the family
                rejected[layout] = error
                continue
            output = compiled(**inputs)
            _assert_equal(output, expected, tower, inputs)
            held += [(tensor, tensor.clone()) for tensor in flatten(output)]
    if len(rejected) * 2 > len(family.layouts):
        raise AssertionError(f"eager rejects most layouts of {family.name}: {rejected}")
    if any(not torch.equal(now, then) for now, then in held):
        raise AssertionError(f"an earlier result of {family.name} changed")
    seen = stats(tower)
    status = "graphed" if seen.graphs == 1 and seen.hits == seen.calls else "in parts" if seen.hits else "refused"
    return FamilyStatus(
        family.name,
        family.tower_class.__name__,
        status,
        seen.graphs,
        seen.calls,
        seen.hits,
        "" if status == "graphed" else _reason(seen),
        torch.__version__,
        importlib.import_module("transformers").__version__,
    )


def _assert_equal(output: Any, expected: Any, tower: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Bit for bit, or within the error budget: a CPU multiplies a single row otherwise than among padded ones."""
    try:
        assert_bitwise(output, expected)
    except AssertionError:
        assert_within_budget(output, expected, reference_float64(tower, **inputs))


def _reason(seen: Stats) -> str:
    """Why Dynamo had to break the tower, or else the reason of most calls, with the text of its refusal."""
    often = max(seen.fallbacks, key=lambda reason: seen.fallbacks[reason], default="graph_break")
    name = "host_loop" if "host_loop" in seen.refusals else "graph_break" if "graph_break" in seen.fallbacks else often
    text = seen.refusals.get(name, "")
    return f"{name}: {text.splitlines()[0]}" if text else name


@functools.cache
def discover() -> tuple[Family, ...]:
    """The families of the installed transformers, by name."""
    transformers = importlib.import_module("transformers")
    models = pathlib.Path(str(transformers.__file__)).parent / "models"
    found = {family.name: family for file in sorted(models.glob("*/modeling_*.py")) for family in _own(file)}
    by_config = {family.config_class: family for family in found.values()}
    for file in sorted(models.glob("*/configuration_*.py")):
        if file.parent.name not in found:
            for config_class in _nested(file, by_config):
                if config_class in by_config:
                    tower = by_config[config_class]
                    found[file.parent.name] = Family(
                        file.parent.name, tower.tower_class, config_class, tower.pixels, tower.grid
                    )
    return tuple(found[name] for name in sorted(found))


def _own(file: pathlib.Path) -> Iterator[Family]:
    """The tower of a modelling file: the outermost class with a vision configuration that takes pixels."""
    if "vision_utils import" not in file.read_text(encoding="utf-8"):
        return
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    tower = None
    for cls in vars(module).values():
        config = getattr(cls, "config_class", None) if isinstance(cls, type) and cls.__module__ == module.__name__ else None
        if config is not None and "Vision" in getattr(config, "__name__", "") and "forward" in vars(cls):
            parameters = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]  # type: ignore[attr-defined]
            if parameters[:1] in (["pixel_values"], ["hidden_states"]):
                tower = cls, config, parameters
    if tower is not None:
        cls, config, parameters = tower
        grid = next((p for p in parameters if p.endswith("grid_thw") or p == "target_sizes"), None)
        yield Family(file.parent.name, cls, config, parameters[0], grid)


def _nested(file: pathlib.Path, known: Mapping[Any, Family]) -> Iterator[type]:
    """Classes of the vision configurations that the configurations of a file have by default.

    Only a file that names a known one is looked at: the defaults of others may come from the network.
    """
    text = file.read_text(encoding="utf-8")
    names = (f'"{getattr(config, "model_type", "")}"' for config in known)
    if "vision_config" not in text or not any(name in text for name in (*names, *(c.__name__ for c in known))):
        return
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    for name, cls in vars(module).items():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and name.endswith("Config"):
            try:
                yield type(getattr(cls(), "vision_config", None))
            except Exception:  # a configuration without defaults nests nothing by default
                continue
