"""Times of a product on the device: the default, and the kernels that give the same result."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from . import cublaslt, triton_product
from .default import default, library
from .op import Kernel, launch
from .shape import Product
from .triton_product import promising

__all__ = ["agrees", "candidates", "device_seconds", "measure"]

log = _torch.log

Launch = Callable[[int], Any]

MOST = 2**27
"""Elements of the largest matrix of rows that is measured: above it measuring takes too much memory."""

_COLD = 2**25  # elements of the weights that launches take in turn: more than the L2 cache holds, as a tower's are
_LAUNCHES = 6
_ROUNDS = 3
_ROUND_S = 4e-4  # of long launches, fewer make a round


def candidates(product: Product, device: torch.device, tiles: bool) -> list[Kernel]:
    """Kernels that may be faster than the default on a device, the current one; with `tiles` two of our own are among them."""
    found: list[Kernel] = list(cublaslt.algorithms(product, device))
    if tiles and not product.added and triton_product.unusable(device) is None:
        found += promising(product.rows, product.outputs, torch.cuda.get_device_properties(device).multi_processor_count)
    return found


def measure(
    product: Product,
    device: torch.device,
    tiles: bool = False,
    *,
    kernels: Sequence[Kernel] | None = None,
    clock: Callable[[Sequence[Launch]], list[float]] | None = None,
) -> dict[Kernel | None, float]:
    """Seconds of a launch by kernel, by None for the default; those left out do not run, or do not give its result.

    It takes a few milliseconds and waits for the current stream, on which it works.

    Args:
        product: the sizes.
        device: the current device.
        tiles: see `candidates`.
        kernels: those to try; None = the candidates.
        clock: seconds of a launch for each of several functions of its number; None = `device_seconds`.

    Raises:
        torch.OutOfMemoryError: there is no room for the matrices.
    """
    if max(product.rows * product.inputs, product.rows * product.outputs) > MOST:
        return {}
    if kernels is None:
        kernels = candidates(product, device, tiles)
    with torch.inference_mode(False), torch.no_grad():
        x, weights, bias, added = _matrices(product, device)
        expected = library(x, weights[0], bias, product.gelu, _result(product, device), added)
        out = _result(product, device)

        def run(kernel: Kernel | None, number: int) -> None:
            weight = weights[number % len(weights)]
            if kernel is None:
                default(x, weight, bias, product.gelu, added, out)
            else:
                launch(kernel, x, weight, bias, product.gelu, added, out)

        launches: dict[Kernel | None, Launch] = {None: functools.partial(run, None)}
        for kernel in kernels:
            try:
                launch(kernel, x, weights[0], bias, product.gelu, added, out.fill_(float("nan")))
                right = agrees(out, expected)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler, a library or a device that does not take it: the default does
                log.warning("vitcg does not run %s in %s: %s: %s", product, kernel, type(error).__name__, error)
                continue
            if right:
                launches[kernel] = functools.partial(run, kernel)
            else:
                log.warning("vitcg does not run %s in %s: its result is not that of torch", product, kernel)
        if len(launches) == 1:
            return {}
        return dict(zip(launches, (clock or device_seconds)(list(launches.values())), strict=True))


def agrees(result: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by their rounding alone: over all by a rounding step, nowhere by more than a few."""
    step = torch.finfo(result.dtype).eps
    difference = result - expected  # exact for numbers that are close
    pairs = [(difference, expected, step, 2.0), (difference, expected, 4 * step, float("inf"))]
    norms = [
        (
            torch.linalg.vector_norm(a, order, dtype=torch.float32),
            share * torch.linalg.vector_norm(b, order, dtype=torch.float32),
        )
        for a, b, share, order in pairs
    ]
    return bool(torch.stack([error <= most for error, most in norms]).all())  # NaN is not


def _matrices(product: Product, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor | None]:
    """Seeded rows, several weights one after the other in one piece of memory, a bias, and what is added."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=product.dtype, device=device, generator=generator)

    size = product.outputs * product.inputs
    count = max(1, min(_COLD // size, _LAUNCHES))
    weights = normal(count, product.outputs, product.inputs).mul_(product.inputs**-0.5)
    bias = normal(product.outputs) if product.biased else None
    added = normal(product.rows, product.outputs) if product.added else None
    return normal(product.rows, product.inputs), list(weights), bias, added


def _result(product: Product, device: torch.device) -> Tensor:
    return torch.empty(product.rows, product.outputs, dtype=product.dtype, device=device)


def device_seconds(runs: Sequence[Launch]) -> list[float]:
    """The least seconds of a launch of each of `runs`, back to back on the current stream of the current device.

    In turns and in alternating order, as `costs.seconds` does it and for the same reason. A launch takes the host longer than
    a small product the device, which therefore is kept busy until the host is ahead.
    """
    first = [_round(run, _LAUNCHES, 0.0) for run in runs]
    launches = [max(2, min(_LAUNCHES, int(_ROUND_S / device))) for device, _ in first]
    best = [float("inf")] * len(runs)
    for number in range(_ROUNDS):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            took, _ = _round(runs[index], launches[index], 1.5 * first[index][1])
            best[index] = min(best[index], took)
    return best


def _round(run: Launch, launches: int, lead_s: float) -> tuple[float, float]:
    """Seconds of the device for a launch, and of the host for all of them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _torch.keep_busy(lead_s)
    begin.record()
    start = time.perf_counter()
    for number in range(launches):
        run(number)
    host = time.perf_counter() - start
    end.record()
    end.synchronize()  # not the device: another thread may be capturing on it
    return begin.elapsed_time(end) * 1e-3 / launches, host
