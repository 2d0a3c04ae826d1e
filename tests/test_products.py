"""Products: the operator, the kernel against float64 (in Triton's interpreter), and the choice, by clocks of the tests' own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitcg_backend.kept_choices import KeptChoices
from vitcg_backend.products import PRODUCT, Product, choice, cublaslt, measure, op, triton_product
from vitcg_backend.products.choice import MARGIN, TILE_MARGIN, Choices, faster, name_of, named
from vitcg_backend.products.cublaslt import Algorithm, reads
from vitcg_backend.products.op import Kernel
from vitcg_backend.products.triton_product import TILES, Tile, promising

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
SMALL = Product(40, 72, 96, torch.bfloat16, biased=True, gelu=False)
ALGORITHM = Algorithm(bytes(range(64)), 4096, 2)


def matrices(product: Product, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Seeded rows, weight and bias of a product."""
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (
        torch.randn(shape, generator=generator).to(product.dtype)
        for shape in ((product.rows, product.inputs), (product.outputs, product.inputs), (product.outputs,))
    )
    return x, w * product.inputs**-0.5, b if product.biased else None


def exactly(x: Tensor, w: Tensor, b: Tensor | None, gelu: bool) -> Tensor:
    """The product in float64."""
    result = F.linear(x.double(), w.double(), None if b is None else b.double())
    return F.gelu(result, approximate="tanh") if gelu else result


# --- the operator ---


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_operator_on_a_cpu(biased: bool, gelu: bool) -> None:
    """It is the linear layer, with a tanh-GELU where one is asked for, and its fake knows the shape."""
    x, w, b = matrices(Product(5, 16, 24, torch.float32, biased, gelu))
    torch.testing.assert_close(PRODUCT(x, w, b, gelu).double(), exactly(x, w, b, gelu), rtol=1e-4, atol=1e-5)
    torch.library.opcheck(PRODUCT, (x, w, b, gelu), test_utils=("test_schema", "test_faketensor"))


def test_using_ends() -> None:
    """What a thread runs is as before after `using`, also after an error, and no other thread's."""
    elsewhere: list[Any] = []

    def fails() -> None:
        with op.using({SMALL: TILES[0]}):
            with op.using({}):
                assert op._chosen.kernels == {}
            assert op._chosen.kernels == {SMALL: TILES[0]}
            thread = threading.Thread(target=lambda: elsewhere.append(op._chosen.kernels))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert op._chosen.kernels is None
    assert elsewhere == [None]


def launched(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles that are launched from now on; nothing is computed."""
    tiles: list[Tile] = []

    def launch(tile: Tile, x: Tensor, weight: Tensor, bias: Any, gelu: bool, out: Tensor) -> None:
        tiles.append(tile)

    monkeypatch.setattr(triton_product, "launch", launch)
    return tiles


def test_who_runs_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours only inside of `using`, for the sizes that it was chosen for, and for matrices that it can read; else torch's."""
    tiles = launched(monkeypatch)
    x, w, b = matrices(SMALL)
    exact = exactly(x, w, b, False)

    def by_torch(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
        before = len(tiles)
        result = op._cuda(x, w, b, False)
        assert result.shape == (x.shape[0], w.shape[0])
        return len(tiles) == before and torch.allclose(result.double(), exact[: x.shape[0]], rtol=2e-2, atol=2e-2)

    assert by_torch(x, w, b)
    with op.using({SMALL: TILES[1]}):
        assert not by_torch(x, w, b)
        assert tiles == [TILES[1]]
        assert by_torch(x[:39], w, b)  # other sizes
        shifted = torch.empty(SMALL.outputs + 1, dtype=SMALL.dtype)[1:].copy_(b)
        assert by_torch(x, w, shifted)  # an address that is no multiple of 16 bytes
    assert by_torch(x, w, b)
    algorithms: list[Algorithm] = []
    monkeypatch.setattr(cublaslt, "launch", lambda algorithm, *args: algorithms.append(algorithm))
    with op.using({SMALL: ALGORITHM}):
        op._cuda(x, w, b, False)
    assert algorithms == [ALGORITHM]


def test_cublaslt_says_why_not() -> None:
    """On a CPU, and where the library cannot be loaded."""
    assert cublaslt.unusable(CPU) == "cublasLt needs an NVIDIA GPU, not cpu"
    cublaslt._library.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.version, "cuda", "1.0")
            library, reason = cublaslt._library()
            assert library is None
            assert reason is not None
            assert reason.startswith("libcublasLt.so.1 cannot be loaded (")
            assert cublaslt.library_version() == "none"
    finally:
        cublaslt._library.cache_clear()


def test_what_the_kernel_reads() -> None:
    """Rows that begin at multiples of 16 bytes, one after the other, and results whose rows do."""
    x, w, b = matrices(SMALL)
    assert reads(x, w, b)
    assert reads(x, w, None)
    assert reads(torch.empty(40, 104, dtype=x.dtype)[:, :96], w, b)  # rows may lie apart
    assert not reads(torch.empty(40, 100, dtype=x.dtype)[:, :96], w, b)
    assert not reads(x.t().contiguous().t(), w, b)
    assert not reads(x, torch.empty(72 * 96 + 1, dtype=x.dtype)[1:].view(72, 96), b)
    assert not reads(x, w[:71], b)
    assert not reads(x, w, b[:1].expand(72))
    assert not reads(x[:0], w, b)


# --- the choice ---


def test_the_faster_by_a_margin() -> None:
    """Ours runs where it is the fastest and by the margin; torch's where it is not, or where nothing was measured."""
    clear, close = 1 - 2 * TILE_MARGIN, 1 - TILE_MARGIN / 2
    assert faster({None: 1.0, TILES[0]: 1.1, TILES[1]: clear}) == TILES[1]
    assert faster({None: 1.0, TILES[0]: clear - 0.1, TILES[1]: clear}) == TILES[0]
    assert faster({None: 1.0, TILES[0]: close}) is None
    assert faster({None: 1.0}) is None
    assert faster({}) is None


def test_the_librarys_own_kernels_have_a_margin_of_their_own() -> None:
    """It is smaller than that of ours, and a kernel of ours that misses its own does not hide one of the library's."""
    between = 1 - (MARGIN + TILE_MARGIN) / 2
    assert faster({None: 1.0, ALGORITHM: between}) == ALGORITHM
    assert faster({None: 1.0, TILES[0]: between}) is None
    assert faster({None: 1.0, ALGORITHM: between + 0.001, TILES[0]: between}) == ALGORITHM
    assert faster({None: 1.0, ALGORITHM: 1 - MARGIN / 2}) is None


@pytest.mark.parametrize("kernel", [None, ALGORITHM, TILES[1]], ids=str)
def test_names_stand_for_kernels(kernel: Kernel | None) -> None:
    """What is kept on disk gives the same kernel, and no other text gives one."""
    assert named(name_of(kernel)) == kernel
    for wrong in ("", "cublasLt", "cublasLt 1 2 00", "cublasLt 1 x " + "00" * 64, "triton 1x1x1"):
        with pytest.raises(ValueError):  # whatever its text
            named(wrong)


def test_choices_are_kept_on_disk(tmp_path: Path) -> None:
    """Another process takes what one has measured, with tiles or without, the default as well; a damaged name is none."""
    asked: list[tuple[Product, bool]] = []
    loaded: list[tuple[Product, Kernel]] = []
    other = replace(SMALL, rows=80)

    def fake(product: Product, device: torch.device, tiles: bool) -> dict[Kernel | None, float]:
        asked.append((product, tiles))
        return {None: 1.0, ALGORITHM: 0.5 if product == SMALL else 2.0} | ({TILES[0]: 0.4} if tiles else {})

    def load(product: Product, kernel: Kernel, device: torch.device) -> None:
        loaded.append((product, kernel))
        if product == other:
            raise RuntimeError("another library")

    def process() -> Choices:
        return Choices(fake, lambda device: KeptChoices({"device": str(device)}, "products", tmp_path), load)

    for again in (False, True):
        asked.clear()
        choices = process()
        assert choices.settle([SMALL, other], CPU) == {SMALL: ALGORITHM}
        assert choices.settle([SMALL], CPU, tiles=True) == {SMALL: TILES[0]}
        assert asked == ([] if again else [(SMALL, False), (other, False), (SMALL, True)])
        assert loaded == ([(SMALL, ALGORITHM), (SMALL, TILES[0])] if again else [])  # what was measured has run already
    path = KeptChoices({"device": "cpu"}, "products", tmp_path).path
    assert path.name.startswith("products-")
    path.write_text(path.read_text().replace(ALGORITHM.data.hex(), "00"))
    assert process().settle([SMALL, other], CPU) == {SMALL: ALGORITHM}
    assert asked == [(SMALL, False)]
    KeptChoices({"device": "cpu"}, "products", tmp_path).add(str(other), name_of(ALGORITHM), {})
    asked.clear()
    assert process().settle([other], CPU) == {}  # it does not run here: measured anew
    assert asked == [(other, False)]


def test_what_is_loaded_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With matrices of the product's sizes and dtype, and a bias where it has one."""
    seen: list[Any] = []
    monkeypatch.setattr(measure, "launch", lambda kernel, *args: seen.append((kernel, *args)))
    for biased in (True, False):
        measure.load(replace(SMALL, biased=biased), ALGORITHM, CPU)
        ((kernel, x, weight, bias, gelu, out),) = seen
        assert (kernel, gelu, bias is not None) == (ALGORITHM, False, biased)
        assert reads(x, weight, bias)
        assert out.shape == (SMALL.rows, SMALL.outputs)
        assert {t.dtype for t in (x, weight, out)} == {SMALL.dtype}
        seen.clear()


def test_products_are_measured_once() -> None:
    """Each product of each device once in all, those that stay with the default too; what comes back is the others."""
    asked: list[tuple[torch.device, Product]] = []
    large = Product(4000, 72, 96, torch.bfloat16, biased=True, gelu=False)

    def fake(product: Product, device: torch.device, tiles: bool) -> dict[Kernel | None, float]:
        asked.append((device, product))
        return {None: 1.0, TILES[2]: 0.5 if product == SMALL else 2.0}

    choices = Choices(fake)
    assert choices.settle([SMALL, large, SMALL], CPU) == {SMALL: TILES[2]}
    assert choices.settle([large], CPU) == {}
    assert choices.settle([SMALL], CPU) == {SMALL: TILES[2]}
    assert asked == [(CPU, SMALL), (CPU, large)]
    choices.settle([SMALL], torch.device("meta"))
    assert len(asked) == 3


def test_without_room_it_is_measured_another_time() -> None:
    """Out of memory: torch's kernel for now."""
    rooms = iter([False, True])

    def fake(product: Product, device: torch.device, tiles: bool) -> dict[Kernel | None, float]:
        if not next(rooms):
            raise torch.OutOfMemoryError("no room")
        return {None: 1.0, TILES[0]: 0.5}

    choices = Choices(fake)
    assert choices.settle([SMALL], CPU) == {}
    assert choices.settle([SMALL], CPU) == {SMALL: TILES[0]}


def test_what_cannot_be_measured_stays_with_torch(caplog: Any) -> None:
    """Another error than a lack of room costs the choice and a warning, once, and not the bucket."""
    asked: list[Product] = []

    def fails(product: Product, device: torch.device, tiles: bool) -> dict[Kernel | None, float]:
        asked.append(product)
        raise RuntimeError("cublasLt: cublasLtCreate returned status 3")

    choices = Choices(fails)
    with caplog.at_level("WARNING", logger="vitcg_backend"):
        assert choices.settle([SMALL], CPU) == choices.settle([SMALL], CPU) == {}
    assert asked == [SMALL]
    assert [record.getMessage() for record in caplog.records] == [
        f"vitcg does not measure {SMALL}: RuntimeError: cublasLt: cublasLtCreate returned status 3"
    ]


def test_what_does_not_load_is_measured(tmp_path: Path) -> None:
    """Whatever a choice from disk raises here, a compiler's error say; a lack of room is waited out."""
    errors: list[Exception] = [TypeError("no compiler"), torch.OutOfMemoryError("no room")]

    def fails(product: Product, kernel: Kernel, device: torch.device) -> None:
        raise errors.pop(0)

    def kept(device: torch.device) -> KeptChoices:
        return KeptChoices({"device": str(device)}, "products", tmp_path)

    kept(CPU).add(str(SMALL), name_of(ALGORITHM), {})
    assert Choices(lambda *_: {None: 1.0, TILES[0]: 0.5}, kept, fails).settle([SMALL], CPU) == {SMALL: TILES[0]}
    choices = Choices(lambda *_: pytest.fail("there was no room"), kept, fails)
    assert choices.settle([SMALL], CPU) == {}
    assert SMALL not in choices._known[CPU, False]


def test_deterministic_algorithms_are_not_chosen_by_a_clock() -> None:
    """Where the user wants them, torch's kernels run, also for what was chosen before."""
    choices = Choices(lambda product, device, tiles: {None: 1.0, TILES[0]: 0.5})
    assert choices.settle([SMALL], CPU)
    torch.use_deterministic_algorithms(True)
    try:
        assert choices.settle([SMALL], CPU) == {}
    finally:
        torch.use_deterministic_algorithms(False)


def test_promising_tiles() -> None:
    """Two are tried: small ones for few rows, those that fill the machine once, the largest for many."""
    assert TILES[3] in promising(256, 1152, 132)
    assert promising(1664, 1152, 132)[0] == TILES[1]
    assert TILES[0] in promising(8192, 4304, 132)
    assert len(promising(1, 1, 132)) == 2


# --- what is measured ---


@pytest.fixture
def small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows are measured, too."""
    monkeypatch.setattr(measure, "FEWEST", 1)


def same(runs: Any) -> list[float]:
    """A clock that says how many it was asked for."""
    return [float(len(runs))] * len(runs)


def test_a_result_that_is_not_torchs_is_no_candidate(monkeypatch: pytest.MonkeyPatch, caplog: Any, small_ones: None) -> None:
    """A kernel whose result is wrong anywhere, or that does not run, is left out with a warning; the right one is timed."""

    def launch(tile: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> None:
        if tile == TILES[3]:
            raise RuntimeError("no such tile")
        out.copy_(F.linear(x, weight, bias))
        if tile == TILES[0]:
            out[-1, -1] += 1.0
        if tile == TILES[1]:
            out[3:] = float("nan")

    monkeypatch.setattr(measure, "launch", launch)
    with caplog.at_level("WARNING", logger="vitcg_backend"):
        times = measure.measure(SMALL, CPU, kernels=TILES, sieve=same, clock=same)
    assert times == {None: 2.0, TILES[2]: 2.0}
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        f"vitcg does not run {SMALL} in {TILES[3]}: RuntimeError: no such tile",
        f"vitcg does not run {SMALL} in {TILES[0]}: its result is not that of torch",
        f"vitcg does not run {SMALL} in {TILES[1]}: its result is not that of torch",
    ]


def test_the_clocks_get_each_candidates_own_launch(monkeypatch: pytest.MonkeyPatch, small_ones: None) -> None:
    """Functions of a launch's number, on weights in turn: the short round all, the long one torch's and the three fastest."""
    kernels = [Algorithm(bytes([number]) * 64, 0, number) for number in range(5)]
    rough = dict(zip(kernels, (3.0, 1.0, 5.0, 2.0, 4.0), strict=True))
    seen: list[tuple[Kernel, int]] = []

    def launch(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> None:
        seen.append((kernel, weight.data_ptr()))
        out.copy_(F.linear(x, weight, bias))

    def run_all(runs: Any) -> list[Kernel]:
        seen.clear()
        for run in runs:
            run(0)
            run(1)
        assert len({address for _, address in seen}) == 2
        return [kernel for kernel, _ in seen[::2]]

    def sieve(runs: Any) -> list[float]:
        assert run_all(runs) == kernels
        return list(rough.values())

    def clock(runs: Any) -> list[float]:
        assert len(runs) == 4
        assert run_all(runs[1:]) == [kernels[1], kernels[3], kernels[0]]
        return [0.0, 1.0, 2.0, 3.0]

    monkeypatch.setattr(measure, "launch", launch)
    times = measure.measure(SMALL, CPU, kernels=kernels, sieve=sieve, clock=clock)
    assert times == {None: 0.0, kernels[1]: 1.0, kernels[3]: 2.0, kernels[0]: 3.0}


def test_what_is_too_small_or_too_large_is_not_measured() -> None:
    """There is nothing to win, or it would take memory."""
    assert measure.measure(Product(measure.MOST, 256, 256, torch.bfloat16, False, False), CPU, kernels=TILES) == {}
    assert measure.measure(Product(measure.FEWEST - 1, 256, 256, torch.bfloat16, False, False), CPU, kernels=TILES) == {}


def test_the_global_random_numbers_stay(small_ones: None) -> None:
    """Measuring draws from a generator of its own."""
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    measure.measure(SMALL, CPU, kernels=(), sieve=same, clock=same)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_agrees_and_more_does_not(dtype: torch.dtype) -> None:
    """Two roundings of the same sums agree; another element, row or formula does not, nor what is not finite."""
    x, w, b = matrices(Product(64, 128, 512, dtype, True, False))
    exact = exactly(x, w, b, False)
    result = exact.to(dtype)
    up = torch.where(exact > 0, exact * (1 + torch.finfo(dtype).eps / 2), exact).to(dtype)
    assert not torch.equal(up, result)
    assert measure.agrees(up, result)
    for spoil in (lambda y: y[5, 7].add_(1), lambda y: y[-1].mul_(1.5), lambda y: y[0, 0].fill_(float("inf"))):
        other = result.clone()
        spoil(other)
        assert not measure.agrees(other, result)
    assert not measure.agrees(F.gelu(result), F.gelu(result).relu())


def test_the_process_keeps_its_choices() -> None:
    """One object for all captures, with the device's own clock."""
    assert isinstance(choice.CHOICES, Choices)
    assert choice.CHOICES._measure is measure.measure
    assert choice.CHOICES._kept is choice.kept_on_disk


# --- the kernel ---


class TestKernel:
    """The device code, which Triton's interpreter runs on a CPU."""

    @pytest.fixture(autouse=True)
    def interpreter(self) -> None:
        """Only where it runs; and skip where the installed Triton's does not run with the installed NumPy."""
        if not INTERPRETED:
            pytest.skip("needs TRITON_INTERPRET=1: run by test_kernel_in_the_interpreter")
        import numpy as np
        import triton

        x, w, _ = matrices(SMALL)
        try:
            triton_product.launch(TILES[3], x, w, None, False, torch.empty(40, 72, dtype=x.dtype))
        except triton.runtime.errors.InterpreterError as error:
            if not isinstance(error.__cause__, TypeError):
                raise
            pytest.skip(f"the interpreter of triton {triton.__version__} does not run with numpy {np.__version__}")

    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize(("biased", "gelu"), [(True, True), (True, False), (False, False), (False, True)])
    def test_error(self, tile: Tile, biased: bool, gelu: bool) -> None:
        """Sizes that are no multiples of a tile's, several tiles each way: rounded once from float32, and all is written."""
        x, w, b = matrices(Product(2 * tile.block_m + 3, tile.block_n + 40, 2 * tile.block_k + 8, torch.float16, biased, gelu))
        memory = torch.full((x.shape[0] + 2, w.shape[0]), float("nan"), dtype=x.dtype)
        out = memory[1:-1]
        triton_product.launch(tile, x, w, b, gelu, out)
        exact = exactly(x, w, b, gelu)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
        assert measure.agrees(out, exact.to(x.dtype))
        assert memory[0].isnan().all()
        assert memory[-1].isnan().all()

    def test_many_groups_of_rows(self) -> None:
        """More rows of tiles than a group has, and a last group that is not full: each tile is computed once."""
        tile = TILES[3]
        x, w, b = matrices(Product(19 * tile.block_m + 1, 3 * tile.block_n, 64, torch.float16, True, False))
        out = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype)
        triton_product.launch(tile, x, w, b, False, out)
        torch.testing.assert_close(out.double(), exactly(x, w, b, False), rtol=1e-3, atol=1e-3)

    def test_large_numbers(self) -> None:
        """The activation of what is far from zero is the number itself, or zero: nothing overflows."""
        x = torch.tensor([[-30000.0], [-100.0], [0.0], [100.0], [30000.0]]).expand(5, 32).half()
        w = torch.zeros(8, 32, dtype=torch.float16)
        w[:, 0] = 1
        out = torch.empty(5, 8, dtype=torch.float16)
        triton_product.launch(TILES[3], x.contiguous(), w, None, True, out)
        assert out[:, 0].tolist() == [0.0, 0.0, 0.0, 100.0, 30000.0]

    def test_rows_that_lie_apart(self) -> None:
        """Rows are read by their stride."""
        x, w, b = matrices(Product(40, 72, 96, torch.float16, True, False))  # the interpreter multiplies no bfloat16
        apart = torch.full((40, 104), float("nan"), dtype=x.dtype)
        apart[:, :96] = x
        out = torch.empty(40, 72, dtype=x.dtype)
        assert reads(apart[:, :96], w, b)
        triton_product.launch(TILES[1], apart[:, :96], w, b, False, out)
        assert measure.agrees(out, exactly(x, w, b, False).to(x.dtype))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: its interpreter cannot run")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernel_in_the_interpreter() -> None:
    """The Triton kernel passes `TestKernel` in Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-p", "no:cacheprovider", "-o", "addopts="]
    # The interpreter computes with NumPy, which warns of overflow; some releases of it use what NumPy deprecates.
    command += ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning", f"{__file__}::TestKernel"]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert child.returncode == 0, child.stdout + child.stderr
    if " passed" not in child.stdout:
        pytest.skip(next(line for line in child.stdout.splitlines() if line.startswith("SKIPPED")))
