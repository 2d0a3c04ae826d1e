"""Packed attention: the kernels that run between the pieces of a tower, and the choice among them.

`op` holds the operator that attention is lowered to while a tower is traced. Importing this package needs neither a GPU
nor triton.
"""

from __future__ import annotations

import torch

from vitcg_backend.errors import AttentionUnavailable

from .aten import MemEfficientKernel, TorchFlashKernel
from .base import SegmentBounds, VarlenKernel
from .segments import SdpaKernel
from .tile_scheduled import TileScheduledKernel

__all__ = ["KERNELS", "SegmentBounds", "VarlenKernel", "choose"]

# In the order of preference of "auto".
KERNELS: dict[str, VarlenKernel] = {
    kernel.name: kernel for kernel in (TileScheduledKernel(), TorchFlashKernel(), MemEfficientKernel(), SdpaKernel())
}


def choose(name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int) -> VarlenKernel:
    """The kernel called `name`, or for "auto" the first usable one of `KERNELS`.

    Args:
        name: "auto" or a key of `KERNELS`.
        device: where q, k and v live.
        dtype: their dtype.
        head_dim: their head size.

    Raises:
        AttentionUnavailable: there is no kernel of that name, or it cannot run there; the text says why and what can.
    """
    device = torch.device(device)
    reasons = {key: kernel.unusable(device, dtype, head_dim) for key, kernel in KERNELS.items()}
    usable = [key for key, reason in reasons.items() if reason is None]
    if name == "auto" and usable:
        return KERNELS[usable[0]]
    if name in usable:
        return KERNELS[name]
    if name == "auto":
        why = "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    else:
        why = reasons.get(name) or f"there is no such kernel, only {', '.join(KERNELS)}"
    raise AttentionUnavailable(
        f"attention={name!r} cannot run on {device} with {dtype} and head size {head_dim}: {why}. "
        f"Usable here: {', '.join(['auto', *usable]) if usable else 'none'}"
    )
