"""Which kernel runs a product: cuBLAS or ours, the faster on this device for these sizes, measured before a size is captured.

cuBLAS picks its kernel by rules, and where a product makes few tiles they are off: 1664 x 4304 by 4304 x 1152 takes it 36 us on
an H200, and a kernel of 128 x 128 tiles, which fill the machine once, 28. What is measured is kept for the process, so that a
size answers with the same bits each time it is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from .. import _torch
from .measure import measure
from .shape import Product
from .triton_product import Tile

__all__ = ["CHOICES", "MARGIN", "Choices", "faster"]

log = _torch.log

MARGIN = 0.05  # ours has to be faster by this share

Times = Mapping[Tile | None, float]
"""Seconds of each tile that gave the right result, and under None of torch's own kernel; empty where nothing was measured."""


def faster(times: Times) -> Tile | None:
    """The fastest tile, if it is faster than cuBLAS by `MARGIN`; None for cuBLAS."""
    best = min((tile for tile in times if tile is not None), key=times.__getitem__, default=None)
    return best if best is not None and times[best] <= (1 - MARGIN) * times[None] else None


class Choices:
    """What was chosen, by device and product.

    Args:
        measure: gives the times of a product on a device.
    """

    def __init__(self, measure: Callable[[Product, torch.device], Times] = measure) -> None:
        self._measure = measure
        self._known: dict[tuple[torch.device, Product], Tile | None] = {}
        self._lock = threading.Lock()

    def settle(self, products: Iterable[Product], device: torch.device) -> dict[Product, Tile]:
        """Measure what is new among `products` on a device, the current one; those that ours is to run, with its tile.

        Nothing is chosen by a clock where the user wants `torch.use_deterministic_algorithms`.
        """
        if torch.are_deterministic_algorithms_enabled():
            return {}
        wanted = dict.fromkeys(products)
        with self._lock:
            for product in wanted:
                if (device, product) in self._known:
                    continue
                try:
                    self._known[device, product] = self._choose(product, device)
                except torch.OutOfMemoryError as error:  # there may be room another time
                    log.info("%s is not measured: %s", product, error)
            chosen = {product: self._known.get((device, product)) for product in wanted}
        return {product: tile for product, tile in chosen.items() if tile is not None}

    def _choose(self, product: Product, device: torch.device) -> Tile | None:
        times = self._measure(product, device)
        tile = faster(times)
        text = ", ".join(f"{name or 'cuBLAS'} {seconds * 1e6:.1f} us" for name, seconds in times.items())
        log.info("%s: %s; captured in %s", product, text or "not measured", tile or "cuBLAS")
        return tile


CHOICES = Choices()
"""Those of the process; they hold no memory of a device."""
