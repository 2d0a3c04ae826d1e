"""Times of a product on the device: torch's own, and of the kernels that give its result those that may be the fastest."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from . import cublaslt, triton_product
from .library import library
from .op import Kernel, launch
from .shape import Product

__all__ = ["agrees", "candidates", "device_seconds", "load", "measure"]

log = _torch.log

Launch = Callable[[int], Any]
Clock = Callable[[Sequence[Launch]], list[float]]

FEWEST = 1024
"""Rows of the smallest product that is measured: with fewer the library's first algorithm is within 2 % of the best."""

MOST = 2**27
"""Elements of the largest matrix of rows that is measured: above it measuring takes too much memory."""

_FINALISTS = 3  # kernels that are timed for long, after one short round of all
_COLD = 2**25  # elements of the weights that launches take in turn: more than the L2 cache holds, as a tower's are
_LAUNCHES = 6
_ROUNDS = 3
_ROUND_S = 4e-4  # of long launches, fewer make a round
_LEAD_S = 1e-4  # in which the host gets ahead of the device by the launches of a short round


def candidates(product: Product, device: torch.device, tiles: bool) -> list[Kernel]:
    """Kernels that may be faster than torch's on a device, the current one; with `tiles` two of our own are among them."""
    found: list[Kernel] = list(cublaslt.algorithms(product, device))
    if tiles and triton_product.unusable(device) is None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        found += triton_product.promising(product.rows, product.outputs, processors)
    return found


def measure(
    product: Product,
    device: torch.device,
    tiles: bool = False,
    *,
    kernels: Sequence[Kernel] | None = None,
    sieve: Clock | None = None,
    clock: Clock | None = None,
) -> dict[Kernel | None, float]:
    """Seconds of a launch of torch's own, under None, and of the fastest few kernels that give its result.

    It takes some ten milliseconds and waits for the current stream, on which it works.

    Args:
        product: the sizes.
        device: the current device.
        tiles: see `candidates`.
        kernels: those to try; None = the candidates.
        sieve: rough seconds of a launch for each of several functions of its number; None = one short round.
        clock: the same for those that are left; None = `device_seconds`.

    Returns:
        Nothing for a product that is too small or too large to be measured.

    Raises:
        torch.OutOfMemoryError: there is no room for the matrices.
    """
    if product.rows < FEWEST or max(product.rows * product.inputs, product.rows * product.outputs) > MOST:
        return {}
    if kernels is None:
        kernels = candidates(product, device, tiles)
    with torch.inference_mode(False), torch.no_grad():
        x, weights, bias = _matrices(product, device)
        expected, out = (x.new_empty(product.rows, product.outputs) for _ in range(2))
        library(x, weights[0], bias, product.gelu, expected)

        def run(kernel: Kernel | None, number: int) -> None:
            weight = weights[number % len(weights)]
            if kernel is None:
                library(x, weight, bias, product.gelu, out)
            else:
                launch(kernel, x, weight, bias, product.gelu, out)

        launches: dict[Kernel, Launch] = {}
        for kernel in kernels:
            try:
                run(kernel, 0)
                launches[kernel] = functools.partial(run, kernel)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler, a library or a device that does not take it: torch's own does
                log.warning("vitcg does not run %s in %s: %s: %s", product, kernel, type(error).__name__, error)
        rough = dict(zip(launches, (sieve or _short_round)(list(launches.values())), strict=True))
        runs: dict[Kernel | None, Launch] = {None: functools.partial(run, None)}
        for kernel in sorted(rough, key=rough.__getitem__):
            if len(runs) > _FINALISTS:
                break
            out.fill_(float("nan"))
            run(kernel, 0)
            if agrees(out, expected):
                runs[kernel] = launches[kernel]
            else:
                log.warning("vitcg does not run %s in %s: its result is not that of torch", product, kernel)
        return dict(zip(runs, (clock or device_seconds)(list(runs.values())), strict=True))


def load(product: Product, kernel: Kernel, device: torch.device) -> None:
    """Launch a kernel once for a product, on whatever lies in memory, as a measurement does: a capture loads nothing then."""
    with torch.inference_mode(False), torch.no_grad():
        x, weight, bias, out = (
            torch.empty(shape, dtype=product.dtype, device=device)
            for shape in (
                (product.rows, product.inputs),
                (product.outputs, product.inputs),
                (product.outputs,),
                (product.rows, product.outputs),
            )
        )
        launch(kernel, x, weight, bias if product.biased else None, product.gelu, out)


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


def _matrices(product: Product, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Seeded rows, several weights one after the other in one piece of memory, and a bias."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=product.dtype, device=device, generator=generator)

    size = product.outputs * product.inputs
    count = max(1, min(_COLD // size, _LAUNCHES))
    weights = normal(count, product.outputs, product.inputs).mul_(product.inputs**-0.5)
    return normal(product.rows, product.inputs), list(weights), normal(product.outputs) if product.biased else None


def _short_round(runs: Sequence[Launch]) -> list[float]:
    """Seconds of a launch of each of `runs`, of two."""
    return [_round(run, 2, _LEAD_S)[0] for run in runs]


def device_seconds(runs: Sequence[Launch]) -> list[float]:
    """The least seconds of a launch of each of `runs`, back to back on the current stream of the current device.

    In turns and in alternating order, as `costs.seconds` does it and for the same reason. A launch takes the host longer than
    a small product the device, which therefore is kept busy until the host is ahead.
    """
    first = [_round(run, 2, 0.0) for run in runs]
    launches = [max(2, min(_LAUNCHES, int(_ROUND_S / device))) for device, _ in first]
    best = [float("inf")] * len(runs)
    for number in range(_ROUNDS):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            took, _ = _round(runs[index], launches[index], 0.75 * first[index][1] * launches[index])
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
