"""The peers' attention: a packed flash attention for transformers towers, and metadata given by the caller.

With both, an eager forward neither loops over segments nor waits for the device, and can be captured op by op.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["ATTENTION", "precompute", "register"]

# `is_flash_attention_requested` of transformers looks for "flash" in the name: then modules take their packed branch.
ATTENTION = "bench_flash_varlen"


def register() -> None:
    """Make `ATTENTION` known to transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _flash_varlen)


def _flash_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Flash attention of torch's own build, over packed segments.

    Args:
        module: the attention module, unused.
        query: `[1, heads, rows, head_dim]`, as are `key` and `value`.
        key: keys.
        value: values.
        attention_mask: unused.
        scaling: factor of the scores.
        cu_seq_lens_q: `[segments + 1]` int32 boundaries.
        max_length_q: rows of the longest segment.
        kwargs: unused.

    Returns:
        `[1, rows, heads, head_dim]`, and no weights.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if q.device.type == "cpu":
        return _segments(q, k, v, cu_seq_lens_q, scaling).unsqueeze(0), None
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, 0.0, False, False, scale=scaling
    )[0]
    return out.unsqueeze(0), None


def _segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """The same on a CPU, one segment at a time: for trying the script without a GPU."""
    assert cu_seqlens is not None
    bounds = cu_seqlens.tolist()
    parts = []
    for low, high in pairwise(bounds):
        query, key, value = (tensor[low:high].transpose(0, 1) for tensor in (q, k, v))
        parts.append(F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(0, 1))
    return torch.cat(parts)


def precompute(tower: torch.nn.Module, grid_thw: torch.Tensor) -> dict[str, Any]:
    """Everything that a tower computes from the grid, as the keyword arguments by which a caller may give it.

    `max_seqlen` is the exact maximum, an int: the tightest launch that an op-by-op capture of one layout can have.
    """
    from transformers import vision_utils

    config: Any = tower.config
    merge = config.spatial_merge_size
    cu_seqlens = vision_utils.get_vision_cu_seqlens(grid_thw)
    given: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(cu_seqlens.diff().max()),
    }
    if hasattr(tower, "num_grid_per_side"):
        given["interp_indices"], given["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(tower, "window_size"):
        index, cu_windows = vision_utils.get_vision_window_index(grid_thw, merge, tower.window_size, tower.patch_size)
        given["window_index"] = index.to(grid_thw.device)
        given["cu_window_seqlens"] = cu_windows
        given["max_window_seqlen"] = int(cu_windows.diff().max())
    return given
