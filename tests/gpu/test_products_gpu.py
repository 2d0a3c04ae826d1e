"""Products on a GPU: the kernel against float64, in a capture, the clock that chooses, and a tower whose captures use it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitcg_backend
from vitcg_backend import products, testing
from vitcg_backend.products import PRODUCT, Product, cublaslt, measure, op
from vitcg_backend.products.choice import Choices, name_of, named
from vitcg_backend.products.library import library
from vitcg_backend.products.op import Kernel
from vitcg_backend.products.triton_product import TILES, Tile, launch, promising, unusable

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LAYERS = (
    (3456, 1152, False),
    (1152, 1152, False),
    (4304, 1152, True),
    (1152, 4304, False),
)  # outputs, inputs, GELU: Qwen3-VL's


@pytest.fixture(autouse=True)
def usable() -> None:
    """Only where our kernel runs."""
    reason = unusable(DEVICE)
    if reason is not None:
        pytest.skip(reason)


def matrices(product: Product) -> tuple[Tensor, Tensor, Tensor | None]:
    """Seeded rows, weight and bias."""
    x, weights, bias = measure._matrices(product, DEVICE)
    return x, weights[0], bias


def exactly(x: Tensor, w: Tensor, b: Tensor | None, gelu: bool) -> Tensor:
    """The product in float64."""
    result = F.linear(x.double(), w.double(), None if b is None else b.double())
    return F.gelu(result, approximate="tanh") if gelu else result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_error_is_that_of_torch(tile: Tile, dtype: torch.dtype) -> None:
    """Any rows, sizes that are no multiples of a tile's, with bias and GELU or without: as near to float64 as torch."""
    for rows, outputs, inputs, biased, gelu in (
        (1664, 1152, 4304, True, False),
        (1, 264, 256, True, True),
        (333, 3424, 1280, False, False),
        (2049, 4304, 1152, True, True),
    ):
        x, w, b = matrices(Product(rows, outputs, inputs, dtype, biased, gelu))
        memory = torch.full((rows + 2, outputs), float("nan"), dtype=dtype, device=DEVICE)
        out = memory[1:-1]
        launch(tile, x, w, b, gelu, out)
        plain = library(x, w, b, gelu, torch.empty_like(out))
        exact = exactly(x, w, b, gelu)
        assert (out - exact).norm() <= 1.05 * (plain - exact).norm()
        assert measure.agrees(out, plain)
        assert memory[0].isnan().all()
        assert memory[-1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_the_librarys_algorithms_is_that_of_torch(dtype: torch.dtype) -> None:
    """Each for any rows, with bias and GELU or without: as near to float64 as torch, nothing outside; also as kept on disk."""
    for rows, outputs, inputs, biased, gelu in (
        (1568, 1152, 4304, True, False),
        (1, 264, 256, True, True),
        (333, 3424, 1280, False, False),
        (64, 4608, 4608, True, False),
        (2049, 4304, 1152, True, True),
    ):
        product = Product(rows, outputs, inputs, dtype, biased, gelu)
        x, w, b = matrices(product)
        memory = torch.full((rows + 2, outputs), float("nan"), dtype=dtype, device=DEVICE)
        out = memory[1:-1]
        plain = library(x, w, b, gelu, torch.empty_like(out))
        exact = exactly(x, w, b, gelu)
        found = cublaslt.algorithms(product, DEVICE)
        assert found
        for algorithm in (*found, *(named(name_of(one)) for one in found)):
            cublaslt.launch(algorithm, x, w, b, gelu, out.fill_(float("nan")))
            assert (out - exact).norm() <= 1.05 * (plain - exact).norm()
            assert measure.agrees(out, plain)
            assert memory[0].isnan().all()
            assert memory[-1].isnan().all()


def test_rows_that_lie_apart() -> None:
    """Rows of both matrices are read by their strides."""
    product = Product(300, 512, 768, torch.bfloat16, True, False)
    x, w, b = matrices(product)
    apart, weights = torch.randn(300, 1000, device=DEVICE).to(x.dtype), torch.randn(512, 1000, device=DEVICE).to(x.dtype)
    apart[:, :768], weights[:, :768] = x, w
    assert cublaslt.reads(apart[:, :768], weights[:, :768], b)
    for algorithm in cublaslt.algorithms(product, DEVICE):
        out, plain = (torch.empty(300, 512, dtype=x.dtype, device=DEVICE) for _ in range(2))
        cublaslt.launch(algorithm, x, w, b, False, plain)
        cublaslt.launch(algorithm, apart[:, :768], weights[:, :768], b, False, out)
        assert torch.equal(out, plain)


def test_in_a_capture() -> None:
    """The operator runs what was chosen while a graph is captured, and a replay reads what its inputs hold by then."""
    shape = Product(300, 512, 768, torch.bfloat16, True, True)
    x, w, b = matrices(shape)
    for kernel in (TILES[2], *cublaslt.algorithms(shape, DEVICE)):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), op.using({shape: kernel}), torch.no_grad():
            PRODUCT(x, w, b, True)
            side.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            out = PRODUCT(x, w, b, True)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        for seed in range(3):
            torch.manual_seed(seed)
            x.normal_()
            w.normal_().mul_(768**-0.5)
            graph.replay()
            expected = torch.empty_like(out)
            op.launch(kernel, x, w, b, True, expected)
            assert torch.equal(out, expected)


def test_the_clock_is_the_devices() -> None:
    """A host that is slow costs nothing, and twice the work costs more: times are those of the kernels."""
    x, w, b = matrices(Product(2048, 1152, 4304, torch.bfloat16, True, False))
    out = torch.empty(2048, 1152, dtype=x.dtype, device=DEVICE)

    def once(number: int) -> None:
        launch(TILES[1], x, w, b, False, out)

    def slowly(number: int) -> None:
        time.sleep(2e-4)
        once(number)

    def twice(number: int) -> None:
        once(number)
        once(number)

    fast, slow, double = measure.device_seconds([once, slowly, twice])
    assert 5e-6 < fast < 1e-3
    assert slow < 1.3 * fast
    assert double > 1.6 * fast


def test_what_is_measured() -> None:
    """The layers of a tower: the default's and every kernel's times, all plausible, and every kernel gives torch's result."""
    for outputs, inputs, gelu in LAYERS:
        product = Product(1664, outputs, inputs, torch.bfloat16, True, gelu)
        found = measure.candidates(product, DEVICE, tiles=True)
        assert sum(isinstance(kernel, Tile) for kernel in found) == 2
        assert len(found) > 4
        times = measure.measure(product, DEVICE, kernels=(*found, *TILES))
        assert None in times
        assert len(times) == 4
        assert set(times) <= {None, *found, *TILES}
        assert all(1e-6 < seconds < 1e-3 for seconds in times.values()), times


@pytest.mark.slow
def test_cost_of_a_ladder() -> None:
    """The products of 24 sizes are chosen once: the second time takes no time."""
    choices = Choices()
    sizes = [int(64 * 1.27**step) // 4 * 4 for step in range(24)]
    choices.settle([Product(sizes[0], *LAYERS[0][:2], torch.bfloat16, True, True)], DEVICE)
    wanted = [[Product(rows, n, k, torch.bfloat16, True, gelu) for n, k, gelu in LAYERS] for rows in sizes]
    start = time.perf_counter()
    chosen = [choices.settle(bucket, DEVICE) for bucket in wanted]
    first = time.perf_counter() - start
    start = time.perf_counter()
    assert [choices.settle(bucket, DEVICE) for bucket in wanted] == chosen
    assert time.perf_counter() - start < min(0.05, first)


@pytest.mark.slow
def test_captures_of_a_tower(monkeypatch: pytest.MonkeyPatch, own_pieces: None) -> None:
    """A layer of the published Qwen3-VL: captures run in what was chosen, with tiles where asked, and are right,
    uncaptured calls in torch's own, and so does everything with ``matmul="torch"``.
    """
    asked: list[Product] = []
    launched: list[Kernel] = []
    run_kernel = op.launch

    def fake(product: Product, device: torch.device, tiles: bool) -> dict[Kernel | None, float]:
        asked.append(product)
        algorithm = cublaslt.algorithms(product, device)[-1]
        tile = promising(product.rows, product.outputs, 132)[0]
        return {None: 1.0, algorithm: 0.7} | ({tile: 0.5} if tiles else {})

    def counted(kernel: Kernel, *args: Any) -> None:
        launched.append(kernel)
        run_kernel(kernel, *args)

    monkeypatch.setattr(products, "CHOICES", Choices(fake))
    monkeypatch.setattr(op, "launch", counted)
    for matmul, captured in (("auto", True), ("auto", False), ("max-autotune", True), ("torch", True)):
        torch._dynamo.reset()
        tower = testing.published_tower("qwen3_vl", depth=1)  # a new one, whose counters begin at zero
        asked.clear()
        launched.clear()
        options = {"min_tokens": 1, "matmul": matmul, "capture": "lazy" if captured else "never"}
        compiled = torch.compile(tower, backend="vitcg", options=options)
        with torch.no_grad():
            for seed, layout in enumerate([((8, 14, 14),), ((1, 28, 28), (4, 12, 16)), ((8, 14, 14),)]):
                pixels, grid = testing.make_inputs(tower, layout, seed=seed)
                output, eager = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
                testing.assert_within_budget(output, eager, testing.reference_float64(tower, pixels, grid_thw=grid))
        seen = vitcg_backend.stats(tower)
        assert seen.hits == (seen.calls if captured else 0)
        chosen = matmul != "torch" and captured
        assert bool(asked) == bool(launched) == chosen
        if chosen:
            assert any(isinstance(kernel, Tile) for kernel in launched) == (matmul == "max-autotune")
            assert {(p.outputs, p.inputs, p.gelu) for p in asked} >= set(LAYERS)
            a_capture, rest = divmod(len(launched), 2 * seen.captures)  # a warm-up and a capture, and no replay or other call
            assert rest == 0
            assert a_capture >= len(LAYERS)
