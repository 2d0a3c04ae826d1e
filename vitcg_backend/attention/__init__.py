"""Packed attention: the kernels that run between the pieces of a tower, and the choice among them.

`op` holds the operator that attention is lowered to while a tower is traced. Importing this package needs neither a GPU
nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vitcg_backend.errors import AttentionUnavailable

from .aten import MemEfficientKernel, TorchFlashKernel
from .base import AttentionShape, KernelChoice, SegmentBounds, VarlenKernel
from .flash_attn_package import FlashAttnKernel
from .flashinfer_cudnn import FlashInferKernel
from .measured import MeasuredChoice
from .segments import SdpaKernel
from .tiers import tiered
from .tile_scheduled import TileScheduledKernel

__all__ = [
    "KERNELS",
    "AttentionShape",
    "KernelChoice",
    "SegmentBounds",
    "VarlenKernel",
    "choose",
    "choose_for",
    "tiered",
]

# In the order of preference of "auto" where nothing is measured.
KERNELS: dict[str, VarlenKernel] = {
    kernel.name: kernel
    for kernel in (
        TileScheduledKernel(),
        TorchFlashKernel(),
        FlashAttnKernel(),
        FlashInferKernel(),
        MemEfficientKernel(),
        SdpaKernel(),
    )
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
    for kernel in KERNELS.values():  # one by one: to ask may import a package
        if name in ("auto", kernel.name) and kernel.unusable(device, dtype, head_dim) is None:
            return kernel
    reasons = {key: kernel.unusable(device, dtype, head_dim) for key, kernel in KERNELS.items()}
    usable = [key for key, reason in reasons.items() if reason is None]
    if name == "auto":
        why = "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    else:
        why = reasons.get(name) or f"there is no such kernel, only {', '.join(KERNELS)}"
    raise AttentionUnavailable(
        f"attention={name!r} cannot run on {device} with {dtype} and head size {head_dim}: {why}. "
        f"Usable here: {', '.join(['auto', *usable]) if usable else 'none'}"
    )


def choose_for(name: str, shapes: Mapping[int, Sequence[AttentionShape]]) -> KernelChoice:
    """What serves all attention calls of a tower: one kernel, or for "auto" on a GPU the fastest by measurement.

    Args:
        name: "auto" or a key of `KERNELS`. A head size or dtype that the kernel cannot do makes it the next one's.
        shapes: index of a cu_seqlens -> the calls over its segments; at least one.

    Raises:
        AttentionUnavailable: as `choose`, or no kernel takes all of the calls.
    """
    calls = dict.fromkeys((call.device, call.dtype, call.head_dim) for some in shapes.values() for call in some)
    first = [choose(name, *call) for call in calls]
    for kernel in (*dict.fromkeys(first), *KERNELS.values()):
        if all(kernel.unusable(*call) is None for call in calls):
            break
    else:
        raise AttentionUnavailable(f"no attention kernel serves all of {list(calls)}")
    if name != "auto" or not kernel.capturable or all(device.type != "cuda" for device, _, _ in calls):
        return kernel
    others = [other for other in KERNELS.values() if other.capturable and other is not kernel]
    return MeasuredChoice([kernel, *others], shapes)
