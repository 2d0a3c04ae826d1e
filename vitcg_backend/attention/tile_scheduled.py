"""Our own packed attention in Triton: launches the kernel of `triton_kernel`, or on Hopper for segments that it suits that of
`hopper_kernel`, over the table of `tiles`.

Its cost follows the segments of the call, not the bounds of the bucket: empty segments and a generous ``longest`` are
free. Table and grid are fixed by the bounds, so one capture serves every layout that fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import tiles
from .base import SegmentBounds, VarlenKernel, check_tensors, check_values, checked_cu_seqlens

__all__ = ["HopperConfig", "TileConfig", "TileScheduledKernel", "hopper_config", "split_head", "tile_config"]

_UNIT = 8  # elements: 16 bytes of half precision, the widest load of a thread and the step of a TMA stride
_PROGRAMS = 132  # multiprocessors of an H200; fewer programs of a tile's height than this leave some of them idle
_LEAST_SCALE = 1e-30  # instead of 0: times the mask's score of -3e38 it still is a weight of 0
_SPARE_TILES = 16  # programs beyond those for full tiles; what still remains, the programs take in turn


@dataclass(frozen=True)
class TileConfig:
    """How the kernel is compiled: query rows and keys of a block, warps of a program, stages of the loads' pipeline.

    `registers` caps those of a thread (None: no cap) where a cap of 128 fits one more program on a multiprocessor.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def height(self) -> int:
        """Query rows of a tile."""
        return self.block_m


def tile_config(head_dim: int, heads: int, bounds: SegmentBounds, *, bulk: bool) -> TileConfig:
    """The configuration that was fastest on an H200 for segments about as long as ``bounds.longest``.

    Args:
        head_dim: head size.
        heads: query heads.
        bounds: the bucket's bounds.
        bulk: blocks are loaded by TMA; without it only the configuration with the smallest footprint is used.
    """
    longest = bounds.longest
    small = TileConfig(64, 64, 4, 2, 128 if bulk and head_dim <= 80 else None)
    if not bulk or longest <= 64 or -(-bounds.rows // 128) * heads < _PROGRAMS:
        return small
    if head_dim <= 64:
        return small
    if head_dim == 80:  # 64 + 16 without a masked column
        return small if longest <= 8192 else TileConfig(128, 64, 4, 3)
    if head_dim < 80:
        if longest <= 1024:
            return TileConfig(128, 64, 8, 2 if longest <= 256 else 3, 128)
        return TileConfig(128, 64, 4, 3)
    if head_dim <= 96:
        return TileConfig(128, 64, 8, 3, 128) if 256 < longest <= 1024 else TileConfig(128, 64, 4, 3)
    return small if longest <= 2048 else TileConfig(128, 64, 8, 3)


def split_head(head_dim: int) -> tuple[int, int]:
    """The head size as two widths for `tl.dot`, powers of two from 16 on (the second may be 0).

    Examples: 64 -> (64, 0), 72 and 80 -> (64, 16), 88 and 96 -> (64, 32), 128 -> (128, 0).
    """
    whole = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - whole
    return whole, max(16, 1 << (rest - 1).bit_length()) if rest else 0


@dataclass(frozen=True)
class HopperConfig:
    """How `hopper_kernel` is compiled: consumer warpgroups, query rows of each, stages of the ring of blocks of 64 keys.

    `registers` are those of a thread (of a consumer other than the first where there are several), `resident` the programs
    that a multiprocessor holds at a time, and with `turns` consumers start their products one after the other.
    """

    consumers: int
    rows: int
    stages: int
    registers: int
    resident: int = 1
    turns: bool = False

    @property
    def height(self) -> int:
        """Query rows of a tile."""
        return self.consumers * self.rows


_HOPPER_SMALL = HopperConfig(1, 64, 3, 80, resident=3)
_HOPPER_TALL = HopperConfig(1, 128, 4, 128, resident=2)
_HOPPER_THREE = HopperConfig(3, 64, 4, 160, turns=True)
_HOPPER_KEYS = 64


def hopper_config(head_dim: int, heads: int, bounds: SegmentBounds) -> HopperConfig | None:
    """The configuration of `hopper_kernel` that was faster on an H200 than `tile_config`'s, None where none was.

    Args:
        head_dim: head size.
        heads: query heads.
        bounds: the bucket's bounds.
    """
    longest = bounds.longest
    if not 64 <= head_dim <= 80:
        return None
    if longest > 64 and head_dim > 64 and -(-bounds.rows // 128) * heads < _PROGRAMS:
        return _HOPPER_SMALL
    if longest <= 256:
        return None
    if longest <= 1024:
        return _HOPPER_THREE if head_dim == 72 else _HOPPER_SMALL
    if longest <= 8192:
        return _HOPPER_TALL if head_dim == 72 else None
    return _HOPPER_THREE if head_dim == 72 else _HOPPER_TALL


@functools.cache
def _import_hopper() -> tuple[Any, Any, Any] | None:
    """The kernel in Gluon, its class of host tensor descriptors and its class of layouts; None where Gluon is another.

    Gluon is experimental and changes with every triton: only the version that these kernels have run with is used.
    """
    try:
        import triton

        if triton.__version__.split(".")[:2] != ["3", "6"]:
            return None
        from triton.experimental.gluon import language
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from .hopper_kernel import hopper_attention_kernel
    except Exception:  # as for `_import_triton`, whose kernel does the same
        return None
    return hopper_attention_kernel, TensorDescriptor, language


@functools.cache
def _import_triton() -> tuple[Any, Any, str | None]:
    """The kernel, the class of host tensor descriptors, and None; or two Nones and why triton cannot be imported."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from .triton_kernel import attention_kernel
    except Exception as error:  # a broken triton raises more than ImportError
        return None, None, f"triton cannot be imported ({type(error).__name__}: {error})"
    return attention_kernel, TensorDescriptor, None


def _bulk_loads(*tensors: Tensor) -> bool:
    """Whether TMA can read all of `tensors` in place: a device that has it, and 16-byte aligned addresses and strides.

    Limited to the architectures whose shared memory holds every configuration (9.x and 10.x).
    """
    if tensors[0].device.type == "cuda" and torch.cuda.get_device_capability(tensors[0].device)[0] not in (9, 10):
        return False
    return all(x.data_ptr() % 16 == 0 and all(s > 0 and s * x.itemsize % 16 == 0 for s in x.stride()[:2]) for x in tensors)


class TileScheduledKernel(VarlenKernel):
    """Packed attention in Triton over a tile table made on the host."""

    name: ClassVar[str] = "triton"
    capturable: ClassVar[bool] = True
    needs_longest: ClassVar[bool] = False

    def unusable(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Half precision on an NVIDIA GPU of compute capability 8.0, head sizes in steps of 8 from 16 to 128."""
        if device.type != "cuda" or torch.version.cuda is None:
            return f"the Triton kernel needs an NVIDIA GPU, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"the Triton kernel needs float16 or bfloat16, not {dtype}"
        if head_dim % 8 or not 16 <= head_dim <= 128:
            return f"the Triton kernel needs a head size from 16 to 128 that is a multiple of 8, not {head_dim}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"the Triton kernel needs compute capability 8.0 or more ({torch.cuda.get_device_name(device)})"
        return _import_triton()[2]

    def metadata(self, cu_seqlens: Sequence[int], bounds: SegmentBounds) -> Tensor:
        """The tile table, int32 ``[tiles, 4]``; rows after the last segment are a padded tail."""
        return tiles.tile_table(checked_cu_seqlens(cu_seqlens, bounds, cover=False), bounds)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
        """As `VarlenKernel.forward`, for values of the same head size as the keys."""
        check_tensors(q, k, v, bounds.rows)
        rows, heads, head_dim = q.shape
        check_values(self.name, q, v)
        out = q.new_empty((rows, heads, head_dim))
        if out.numel() == 0:
            return out
        self._launch(*_config(q, k, v, bounds, scale), q, k, v, out, metadata, bounds, scale)
        return out

    def load(self, q: Tensor, k: Tensor, v: Tensor, bounds: Iterable[SegmentBounds], scale: float) -> None:
        """As `VarlenKernel.load`."""
        rows = q.shape[0]
        own = SegmentBounds(rows, 1, rows)
        metadata, out = self.metadata([0, rows], own).to(q.device), torch.empty_like(q)
        for config, bulk in dict.fromkeys(_config(q, k, v, each, scale) for each in bounds):
            if config.height in tiles.heights(own):
                self._launch(config, bulk, q, k, v, out, metadata, own, scale)

    def _launch(
        self,
        config: TileConfig | HopperConfig,
        bulk: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        metadata: Tensor,
        bounds: SegmentBounds,
        scale: float,
    ) -> None:
        if isinstance(config, HopperConfig):
            self._forward_hopper(config, q, k, v, out, metadata, bounds, scale)
            return
        kernel, descriptor, reason = _import_triton()
        if reason is not None:
            raise RuntimeError(reason)
        rows, heads, head_dim = q.shape
        d0, d1 = split_head(head_dim)

        def describe(x: Tensor, height: int, width: int) -> Any:
            if not bulk or width == 0:
                return None
            return descriptor(x, [x.shape[1], rows, head_dim], [x.stride(1), x.stride(0), 1], [1, height, width])

        strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
        unit = _UNIT if all(stride % _UNIT == 0 for stride in strides) else 1
        full_tiles = -(-rows // config.block_m)
        programs = min(full_tiles + _SPARE_TILES, tiles.capacity(bounds, config.block_m)) * heads
        with torch.cuda.device_of(q):
            kernel[(programs,)](
                q, k, v, out, metadata[tiles.section_start(bounds, config.block_m) :],
                describe(q, config.block_m, d0), describe(q, config.block_m, d1),
                describe(k, config.block_n, d0), describe(k, config.block_n, d1),
                describe(v, config.block_n, d0), describe(v, config.block_n, d1),
                *(stride // unit for stride in strides),
                max(abs(scale) * math.log2(math.e), _LEAST_SCALE),
                HEADS=heads, GROUPS=heads // k.shape[1], DIM=head_dim, D0=d0, D1=d1,
                UNIT=unit, BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
                TMA=bulk, NEGATIVE=scale < 0,
                num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
            )  # fmt: skip

    def _forward_hopper(
        self,
        config: HopperConfig,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        metadata: Tensor,
        bounds: SegmentBounds,
        scale: float,
    ) -> None:
        kernel, descriptor, language = _import_hopper()  # type: ignore[misc]  # `_is_hopper` has asked
        rows, heads, head_dim = q.shape
        d0, d1 = split_head(head_dim)
        element = language.float16 if q.dtype == torch.float16 else language.bfloat16

        def describe(x: Tensor, height: int, width: int) -> Any:
            block = [1, height, width]
            layout = language.NVMMASharedLayout.get_default_for(block, element)
            return descriptor(x, [x.shape[1], rows, head_dim], [x.stride(1), x.stride(0), 1], block, layout)

        tall, one = config.rows, config.consumers == 1
        tiles_at_most = tiles.capacity(bounds, config.height) * heads
        with torch.cuda.device_of(q):
            programs = config.resident * torch.cuda.get_device_properties(q.device).multi_processor_count
            kernel[(min(programs, tiles_at_most),)](
                describe(q, tall, d0), describe(q, tall, d1 or d0),
                describe(k, _HOPPER_KEYS, d0), describe(k, _HOPPER_KEYS, d1 or d0),
                describe(v, _HOPPER_KEYS, d0), describe(v, _HOPPER_KEYS, d1 or d0),
                out, metadata[tiles.section_start(bounds, config.height) :], scale * math.log2(math.e),
                HEADS=heads, GROUPS=heads // k.shape[1], DIM=head_dim, D0=d0, D1=d1, BLOCK_N=_HOPPER_KEYS,
                STAGES=config.stages, CONSUMERS=config.consumers, ROWS=tall,
                REGISTERS=config.registers, TURNS=config.turns,
                num_warps=4, maxnreg=config.registers if one else None,
            )  # fmt: skip


def _config(q: Tensor, k: Tensor, v: Tensor, bounds: SegmentBounds, scale: float) -> tuple[TileConfig | HopperConfig, bool]:
    """How the kernel for such tensors and bounds is compiled, and whether blocks are loaded by TMA."""
    _, heads, head_dim = q.shape
    bulk = _bulk_loads(q, k, v)
    hopper = hopper_config(head_dim, heads, bounds) if bulk and scale > 0 and _is_hopper(q) else None
    return (tile_config(head_dim, heads, bounds, bulk=bulk) if hopper is None else hopper), bulk


def _is_hopper(tensor: Tensor) -> bool:
    """Whether `hopper_kernel` can run there."""
    hopper = tensor.device.type == "cuda" and torch.cuda.get_device_capability(tensor.device) == (9, 0)
    return hopper and _import_hopper() is not None
