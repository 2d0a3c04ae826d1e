"""Sizes of the towers that `vitcg_backend.testing` builds: data, and how they follow a smaller depth."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ARCHITECTURES", "Architecture", "with_depth"]


@dataclass(frozen=True)
class Architecture:
    """Where a tower's class is, and what its configuration class is called with.

    Attributes:
        path: module and class name of the tower.
        published: the sizes of the released model.
        tiny: sizes for tests, of the same structure; None = no tiny tower.
    """

    path: str
    published: Mapping[str, Any]
    tiny: Mapping[str, Any] | None = None


ARCHITECTURES = {
    "qwen2_vl": Architecture(
        path="transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        published={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "num_heads": 16,
            "mlp_ratio": 4,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        tiny={"depth": 3, "embed_dim": 64, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
    ),
    "qwen2_5_vl": Architecture(
        path="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
        published={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        tiny={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [2],
        },
    ),
    "qwen3_vl": Architecture(
        path="transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
        published={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        tiny={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
    ),
    "llama4": Architecture(
        path="transformers.models.llama4.modeling_llama4.Llama4VisionModel",
        published={
            "num_hidden_layers": 34,
            "hidden_size": 1408,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "vision_output_dim": 4096,
        },
    ),
}


def with_depth(sizes: Mapping[str, Any], depth: int | None) -> dict[str, Any]:
    """Sizes of a tower with `depth` blocks; the lists of block indexes follow."""
    adapted = copy.deepcopy(dict(sizes))  # configurations keep the lists that they are given
    key = "depth" if "depth" in sizes else "num_hidden_layers"
    if depth is None or depth == sizes[key]:
        return adapted
    if depth < 1:
        raise ValueError(f"depth={depth}: expected at least 1 block.")
    adapted[key] = depth
    if "deepstack_visual_indexes" in sizes:
        levels = len(sizes["deepstack_visual_indexes"])
        adapted["deepstack_visual_indexes"] = sorted({(i + 1) * depth // (levels + 1) for i in range(levels)})
    if "fullatt_block_indexes" in sizes:
        adapted["fullatt_block_indexes"] = [i for i in sizes["fullatt_block_indexes"] if i < depth] or [depth - 1]
    return adapted
