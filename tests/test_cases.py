"""Faults that others met, retold for towers that other test files do not have: overflow, large calls, tables, tiles, rotary."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from common import DEVICE, TOWERS, assert_same, compile_tower, run, stats, tensor, tiny_tower
from test_runtime import SAME_ROWS
from torch import Tensor, nn
from transformers import vision_utils

from vitcg_backend import testing
from vitcg_backend.backend import live_towers
from vitcg_backend.testing.families import discover
from vitcg_backend.testing.image_families import image_families

IMAGES = {family.name: family for family in image_families()}
FAMILIES = {family.name: family for family in discover()}

pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours


def call(compiled: Any, tower: nn.Module, inputs: dict[str, Tensor]) -> None:
    """One call within the error budget."""
    inputs = {name: t.to(DEVICE) for name, t in inputs.items()}
    with torch.no_grad():
        output, expected = compiled(**inputs), tower(**inputs)
    testing.assert_within_budget(output, expected, testing.reference_float64(tower, **inputs))


def keys(tower: nn.Module) -> set[Any]:
    """Every key that a capture is held under."""
    return {key for part in live_towers(tower) for key in part._captures}


def keys_hit(tower: nn.Module, calls: list[Any]) -> set[Any]:
    """Keys of the captures that serve these calls: each moves its own to the end."""
    hit = set()
    for make in calls:
        make()
        hit |= {next(reversed(part._captures)) for part in live_towers(tower) if part._captures}
    return hit


def test_b13_every_capture_of_tiles_is_reached_again() -> None:
    """Llama-4 with 1, 2 and 5 tiles: one capture a budget, each of them used when the calls come again."""
    tower = IMAGES["llama4"].tower(num_hidden_layers=1).to(DEVICE)
    compiled = compile_tower(tower, token_budgets=[1, 2, 6])
    calls = [lambda n=n: call(compiled, tower, IMAGES["llama4"].inputs(tower, n, seed=n)) for n in (1, 2, 5)]
    for make in calls:
        make()
    assert (len(keys(tower)), stats(tower).captures) == (3, 3)
    assert keys_hit(tower, calls) == keys(tower)
    other = IMAGES["llama4"].inputs(tower, 2, size=(16, 16))
    for given in (tower, compiled):  # a table of positions for one size of tiles: eager rejects another
        with torch.no_grad(), pytest.raises(RuntimeError):
            given(**{name: t.to(DEVICE) for name, t in other.items()})
    for make in calls:
        make()
    assert (stats(tower).captures, stats(tower).hits) == (3, 9)


def test_b13_every_capture_of_windows_is_reached_again() -> None:
    """Qwen2.5-VL with 4 to 64 windows in as many rows: a second pass captures nothing and uses every capture there is."""
    tower = tiny_tower("qwen2_5_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[64])
    calls = [lambda layout=layout: run(compiled, layout) for layout in SAME_ROWS]
    for make in calls:
        make()
    captures = stats(tower).captures
    assert captures == len(keys(tower)) < len(SAME_ROWS)  # one for each tier of attention segments
    assert keys_hit(tower, calls) == keys(tower)
    assert (stats(tower).captures, stats(tower).hits) == (captures, 2 * len(SAME_ROWS))


def test_b28_an_overflow_stays_in_its_image() -> None:
    """fp16 with large MLP weights: the image that overflows does so in the rows of eager, its neighbour and the next calls do
    not, however large the part of the bucket that is padded.
    """
    tower = tiny_tower("qwen2_5_vl", dtype=torch.float16)
    with torch.no_grad():
        for block in tower.blocks:
            block.mlp.down_proj.weight.mul_(8)
    compiled = compile_tower(tower, token_budgets=[40])
    layout = ((1, 8, 8), (1, 8, 8))
    pixels, grid = testing.make_inputs(tower, layout)
    bad = pixels.clone()
    bad[:64] *= 3e4
    clean = []
    for given in (bad, pixels, bad, pixels):
        with torch.no_grad():
            output, expected = (testing.flatten(call(given, grid_thw=grid)) for call in (compiled, tower))
        for a, b in zip(output, expected, strict=True):
            assert torch.equal(a.isfinite().all(-1), b.isfinite().all(-1))
        assert bool(expected[0].isfinite().all()) is (given is pixels)
        if given is pixels:
            clean.append(output)
            assert_same(compiled, tower, ((1, 4, 4),), exact=False)
    assert all(torch.equal(a, b) for a, b in zip(*clean, strict=True))
    assert stats(tower).hits == stats(tower).calls == 6


def peak_mib(function: Any) -> float:
    """MiB above what the process holds now that it reaches while `function` runs."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        pytest.skip(f"this system does not reset the peak of a process: {error}")

    def read(name: str) -> int:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    before = read("VmRSS")
    function()
    return (read("VmHWM") - before) / 2**10


@pytest.mark.parametrize(
    ("budgets", "layout", "replays"),
    [([64], ((1, 160, 160),), 0), ([8192], ((1, 8, 8),) * 500, 1), ([2048], ((1, 8, 8),) * 500, 4)],
    ids=["one picture", "500 images", "500 images in parts"],
)
def test_b30_large_calls_take_no_table_of_all_pairs(budgets: list[int], layout: Any, replays: int) -> None:
    """Far above the largest bucket and 500 images: eager's result, and memory that grows with the patches, not their square."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=budgets, self_check=False)
    run(compiled, ((1, 4, 4),))
    pixels, grid = testing.make_inputs(tower, layout)
    patches, outputs = len(pixels), []
    with torch.no_grad():
        peak = peak_mib(lambda: outputs.append(compiled(pixels, grid_thw=grid)))
    assert len(stats(tower).last.replays) == replays
    assert replays or stats(tower).last.reason == "over_largest_budget"
    assert peak < patches**2 / 2**20 / 3, "a byte a pair of patches would be three times as much"
    if replays:  # eager's dense attention over a picture of that size is what this test keeps away from
        with torch.no_grad():
            testing.assert_within_budget(
                outputs[0], tower(pixels, grid_thw=grid), testing.reference_float64(tower, pixels, grid_thw=grid)
            )


def test_b31_positions_below_at_and_above_the_table() -> None:
    """GLM-4V resamples a table of 8 x 8 positions: smaller, equal and larger grids, alternating, with a margin of zeros."""
    family = FAMILIES["glm4v"]
    tower = family.tower(depth=1).to(DEVICE)
    compiled = compile_tower(tower)
    layouts = [((1, 4, 4),), ((1, 8, 8),), ((1, 16, 12),), ((1, 2, 16), (1, 8, 8)), ((1, 4, 4),)]
    for step, layout in enumerate((*layouts, *layouts)):
        call(compiled, tower, family.inputs(tower, layout, seed=step))
    assert stats(tower).hits == stats(tower).calls == 10
    frames = family.inputs(tower, ((3, 4, 4), (1, 4, 8)))
    for given in (
        (tower, compiled) if DEVICE == "cpu" else ()
    ):  # on a GPU eager's error is an assertion that ends all work there
        with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):  # its frames come as items of one frame
            given(**frames)
    call(compiled, tower, family.inputs(tower, layouts[2]))
    assert stats(tower).last.hit


def test_b31_images_and_clips_in_turns() -> None:
    """Kimi has a branch for one frame and one for several: both in one graph, whichever came first."""
    family = FAMILIES["kimi_k25"]
    tower = family.tower().to(DEVICE)
    compiled = compile_tower(tower)
    layouts = (((4, 8, 8),), ((1, 16, 12),), ((3, 4, 4), (1, 4, 8)), ((2, 4, 4), (2, 4, 8)), ((1, 8, 8),), ((3, 4, 4),))
    for step, layout in enumerate(layouts):
        inputs = {name: t.to(DEVICE) for name, t in family.inputs(tower, layout, seed=step).items()}
        with torch.no_grad():
            try:
                expected = tower(**inputs)
            except RuntimeError:  # transformers 5.17 takes clips of one length only
                with pytest.raises(RuntimeError):
                    compiled(**inputs)
                continue
            output = compiled(**inputs)
        for a, b in zip(testing.flatten(output), testing.flatten(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # its pooling is in float32: no float64 reference
    assert stats(tower).graphs == 1
    assert stats(tower).hits >= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b32_the_complex_rotary_stays_as_it_is(dtype: torch.dtype) -> None:
    """Llama-4 with 1, 3 and 5 tiles: its complex buffer is what it was, on the tower's device in the graph; after `.to()`,
    which makes it real in eager, too, eager's result.
    """
    tower = IMAGES["llama4"].tower(num_hidden_layers=1, dtype=dtype).to(DEVICE)
    compiled = compile_tower(tower, token_budgets=[1, 4, 6])
    rotary = tower.rotary_embedding.freqs_ci
    before = rotary.clone()
    for tiles in (1, 3, 5, 1):
        call(compiled, tower, IMAGES["llama4"].inputs(tower, tiles, seed=tiles))
    assert tower.rotary_embedding.freqs_ci is rotary
    assert rotary.is_complex()
    assert torch.equal(rotary, before)
    (part,) = live_towers(tower)
    tensors = [n.meta["val"] for n in part.body.bound.placeholders if isinstance(n.meta["val"], Tensor)]
    assert {t.device.type for t in tensors} == {DEVICE}
    assert any(t.is_complex() for t in tensors)
    assert (stats(tower).hits, stats(tower).captures) == (4, 3)
    tower.to(torch.bfloat16)
    inputs = {name: t.to(DEVICE) for name, t in IMAGES["llama4"].inputs(tower, 2).items()}
    with torch.no_grad():
        output, expected = (testing.flatten(given(**inputs)) for given in (compiled, tower))
    for a, b in zip(output, expected, strict=True):
        torch.testing.assert_close(a, b)


@torch.compile(backend="eager")
def gelu(x: Tensor) -> Tensor:
    """An activation that somebody has compiled already."""
    return nn.functional.gelu(x, approximate="tanh")


class Compiled(nn.Module):
    """A module around it."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation."""
        return gelu(x)


def test_b43_a_helper_that_is_itself_compiled() -> None:
    """A tower that calls a compiled function is one graph with it, from the first call on."""
    tower = tiny_tower("qwen2_vl", depth=1)
    tower.blocks[0].mlp.act = Compiled()
    compiled = compile_tower(tower)
    for layout in (((1, 4, 4),), ((2, 8, 8),), ((1, 4, 4),)):
        assert_same(compiled, tower, layout)
    assert (stats(tower).graphs, stats(tower).hits) == (1, 3)


class Interleaved(nn.Module):
    """Rotary angles whose axes are interleaved by an assignment to every third column, as interleaved rope does it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, ...]:
        """Rows turned, and beside them positions, angles and both tables."""
        positions = vision_utils.get_vision_position_ids(grid_thw, 2)
        frequencies = 1.0 / 10000 ** (torch.arange(12, device=pixels.device) / 12)
        high, wide = (positions[:, axis, None] * frequencies for axis in (0, 1))
        angles = high.clone()
        angles[..., 1:12:3] = wide[..., 1:12:3]
        cos, sin = angles.cos(), angles.sin()
        turned = torch.cat([pixels[:, :12] * cos - pixels[:, 12:] * sin, pixels[:, 12:] * cos + pixels[:, :12] * sin], -1)
        return turned * self.scale, positions, angles, cos, sin


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_b34_rotary_by_every_third_column(inner: str) -> None:
    """Positions bit for bit, angles and both tables by themselves within 1e-6, whatever compiles the pieces."""
    tower = Interleaved().to(DEVICE)
    compiled = compile_tower(tower, inner=inner)
    for layout in (((1, 4, 4),), ((2, 4, 4), (1, 6, 8)), ((1, 4, 4),)):
        grid = tensor(layout)
        pixels = torch.randn(int(grid.prod(1).sum()), 24, device=DEVICE)
        with torch.no_grad():
            turned, positions, *tables = compiled(pixels, grid)
            expected, positions_of_eager, *tables_of_eager = tower(pixels, grid)
        assert torch.equal(positions, positions_of_eager)
        for table, of_eager in zip((turned, *tables), (expected, *tables_of_eager), strict=True):
            torch.testing.assert_close(table, of_eager, rtol=0, atol=1e-6)
    assert stats(tower).hits == 3, stats(tower)


@pytest.mark.parametrize("name", TOWERS)
def test_b51_nothing_is_captured_before_the_first_call(name: str) -> None:
    """A tower that is compiled and never called, as on a rank without images, has no graph, no buffer and no capture."""
    tower = tiny_tower(name, depth=1)
    compile_tower(tower)
    seen = stats(tower)
    assert (seen.calls, seen.graphs, seen.captures, live_towers(tower)) == (0, 0, 0, [])
