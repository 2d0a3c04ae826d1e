"""Which kernel runs a product: the fastest on this device for these sizes, measured before a size is captured.

CuBLAS picks its kernel by rules, and its next ones may be faster: 3456 outputs of 1152 inputs at 16128 rows take it 211 us on
an H200, and another of its own algorithms 181; 4304 of 1152 at 8000 rows, with their GELU, 132 and 123. What is measured is
kept for the process and on disk, so that a size answers with the same bits each time it is captured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from .. import _torch
from ..kept_choices import KeptChoices, environment
from . import cublaslt
from .measure import load, measure
from .op import Kernel
from .shape import Product
from .triton_product import TILES, Tile

__all__ = ["CHOICES", "MARGIN", "TILE_MARGIN", "Choices", "faster", "kept_on_disk", "name_of", "named"]

log = _torch.log

MARGIN = 0.02  # another of cublasLt's algorithms has to be faster by this share,
TILE_MARGIN = 0.05  # and a kernel of ours by this one: in a tower less than that is left

Times = Mapping[Kernel | None, float]
"""Seconds of each kernel that gave the right result, and under None of torch's own; empty where nothing was measured."""


def faster(times: Times) -> Kernel | None:
    """The fastest kernel of those that are faster than torch's own by their margin; None for torch's own."""

    def wins(kernel: Kernel) -> bool:
        return times[kernel] <= (1 - (TILE_MARGIN if isinstance(kernel, Tile) else MARGIN)) * times[None]

    return min((kernel for kernel in times if kernel is not None and wins(kernel)), key=times.__getitem__, default=None)


def name_of(kernel: Kernel | None) -> str:
    """A kernel as it stands in the file of `KeptChoices`."""
    if isinstance(kernel, cublaslt.Algorithm):
        return f"cublasLt {kernel.place} {kernel.workspace} {kernel.data.hex()}"
    return "torch" if kernel is None else str(kernel)


def named(name: str) -> Kernel | None:
    """The kernel of a name.

    Raises:
        ValueError: it is none.
    """
    if name == "torch":
        return None
    if name.startswith("cublasLt "):
        _, place, workspace, data = name.split()
        if len(data) != 128:
            raise ValueError(name)
        return cublaslt.Algorithm(bytes.fromhex(data), int(workspace), int(place))
    for tile in TILES:
        if str(tile) == name:
            return tile
    raise ValueError(name)


@functools.cache
def kept_on_disk(device: torch.device) -> KeptChoices:
    """The file of a device and of the versions that its choices hold for."""
    return KeptChoices(environment(device) | {"cublasLt": cublaslt.library_version()}, "products")


class Choices:
    """What was chosen, by device and product.

    Args:
        measure: gives the times of a product on a device, with our own tiles among them or not.
        kept: the file of a device, None for choices of the process alone.
        load: runs a kernel that was not measured in this process once.
    """

    def __init__(
        self,
        measure: Callable[[Product, torch.device, bool], Times] = measure,
        kept: Callable[[torch.device], KeptChoices] | None = None,
        load: Callable[[Product, Kernel, torch.device], None] = load,
    ) -> None:
        self._measure, self._kept, self._load = measure, kept, load
        self._known: dict[tuple[torch.device, bool], dict[Product, Kernel | None]] = {}
        self._files: dict[torch.device, dict[str, str]] = {}
        self._lock = threading.Lock()

    def settle(self, products: Iterable[Product], device: torch.device, tiles: bool = False) -> dict[Product, Kernel]:
        """Measure what is new among `products` on a device, the current one; the kernels that are to run in place of torch's.

        Each of them has run in this process by then. With `tiles` our own kernel is tried, too. Nothing is chosen by a clock
        where the user wants `torch.use_deterministic_algorithms`.
        """
        if torch.are_deterministic_algorithms_enabled():
            return {}
        wanted = dict.fromkeys(products)
        with self._lock:
            known = self._known.setdefault((device, tiles), {})
            for product in wanted:
                if product in known:
                    continue
                try:
                    known[product] = self._choose(product, device, tiles)
                except torch.OutOfMemoryError as error:  # there may be room another time
                    log.info("%s is not measured: %s", product, error)
                except Exception as error:  # a library or a device that does not take it: torch's own does
                    log.warning("vitcg does not measure %s: %s: %s", product, type(error).__name__, error)
                    known[product] = None
            chosen = {product: known.get(product) for product in wanted}
        return {product: kernel for product, kernel in chosen.items() if kernel is not None}

    def _choose(self, product: Product, device: torch.device, tiles: bool) -> Kernel | None:
        key = f"{product}{', with tiles' if tiles else ''}"
        if self._kept is not None:
            if device not in self._files:
                self._files[device] = self._kept(device).read()
            try:
                kernel = named(self._files[device][key])
                if kernel is not None:
                    self._load(product, kernel, device)
                return kernel
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # not measured yet, a file that somebody has edited, a kernel that does not run here
                log.debug("%s: no choice is taken from disk: %s: %s", product, type(error).__name__, error)
        times = self._measure(product, device, tiles)
        kernel = faster(times)
        text = ", ".join(f"{name or 'torch'} {seconds * 1e6:.1f} us" for name, seconds in times.items())
        log.info("%s: %s; captured in %s", product, text or "not measured", kernel or "torch's own")
        if times and self._kept is not None:
            self._kept(device).add(key, name_of(kernel), {str(name or "torch"): s for name, s in times.items()})
        return kernel


CHOICES = Choices(kept=kept_on_disk)
"""Those of the process; they hold no memory of a device."""
