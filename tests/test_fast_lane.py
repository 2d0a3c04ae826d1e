"""fast_lane: calls that go round Dynamo, compared with eager on sequences; what is looked at, and what has no lane."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from common import (
    DEVICE,
    IMAGE,
    LAYOUTS,
    MIXED,
    TOWERS,
    TWO_IMAGES,
    VIDEO,
    assert_equal,
    assert_not_replayed_once_moved,
    compile_tower,
    edit_data,
    edit_in_place,
    edit_strides,
    run,
    stats,
    there_and_back,
    tiny_tower,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import vitcg_backend
from vitcg_backend import states, testing
from vitcg_backend.runtime import CompiledTower


def make(name: str = "qwen3_vl", **kwargs: Any) -> tuple[nn.Module, vitcg_backend.FastLane]:
    """A tiny tower and a lane to it."""
    tower = tiny_tower(name, depth=1, **kwargs)
    return tower, vitcg_backend.fast_lane(compile_tower(tower))


def assert_same(
    lane: vitcg_backend.FastLane, tower: nn.Module, layout: Any, seed: int = 0, *, exact: bool = True
) -> list[Tensor]:
    """One call, equal to eager; its output tensors."""
    pixels, grid = testing.make_inputs(tower, tuple(layout), seed=seed)
    with torch.no_grad():
        output, expected = lane(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
        assert type(output) is type(expected)
        assert_equal(output, expected, tower, pixels, grid_thw=grid, exact=exact)
    return testing.flatten(output)


def dynamos(tower: nn.Module, call: Callable[[], Any]) -> int:
    """How often `call` has reached a graph of the tower through Dynamo."""
    from vitcg_backend.backend import live_towers

    seen: list[Any] = []
    parts = live_towers(tower)
    for part in parts:
        part.watchers.append(lambda *what: seen.append(what))
    call()
    for part in parts:
        part.watchers.pop()
    return len(seen)


@pytest.mark.parametrize("name", TOWERS)
def test_layouts_in_any_order(name: str) -> None:
    """Shuffled and repeated layouts: eager's output, results stay as they were, every call counted and none through Dynamo."""
    tower, lane = make(name)
    order = [layout for layout in LAYOUTS for _ in range(3)]
    random.Random(0).shuffle(order)
    for layout in order[:2]:  # traced, then watched
        assert_same(lane, tower, layout)
    before, held = stats(tower).calls, []

    def sequence() -> None:
        for step, layout in enumerate(order):
            outputs = assert_same(lane, tower, layout, seed=step)
            held.append((outputs, [t.clone() for t in outputs]))

    assert dynamos(tower, sequence) == 0
    assert not lane.refusals
    assert stats(tower).calls == before + len(order)
    assert stats(tower).graphs == 1
    assert all(torch.equal(now, then) for outputs, copies in held for now, then in zip(outputs, copies, strict=True))


def _dtype(tower: nn.Module) -> None:
    tower.to(torch.float64)


def _load(tower: nn.Module) -> None:
    tower.load_state_dict({k: v * 0.75 for k, v in tower.state_dict().items()})


def _assign(tower: nn.Module) -> None:
    tower.load_state_dict({k: v * 1.25 for k, v in tower.state_dict().items()}, assign=True)


def _parameter(tower: nn.Module) -> None:
    tower.blocks[0].attn.proj.bias = nn.Parameter(tower.blocks[0].attn.proj.bias * 2)


def _submodule(tower: nn.Module) -> None:
    old = tower.blocks[0].mlp.linear_fc1
    tower.blocks[0].mlp.linear_fc1 = nn.Linear(old.in_features, old.out_features).to(old.weight)


def _train(tower: nn.Module) -> None:
    tower.train()


@pytest.mark.usefixtures("as_a_graph")
def test_what_is_seen() -> None:
    """Each edit shows in the very next call of the lane, and in those after it."""
    tower, lane = make()
    replaced = (_assign, _parameter, _submodule)
    for edit in (None, edit_in_place, _load, edit_data, *replaced, there_and_back, edit_strides, _train, _dtype):
        before, captures = testing.flatten(run(tower, IMAGE)), stats(tower).captures
        if edit is not None:
            with torch.no_grad():
                edit(tower)
        same = [torch.equal(a, b) for a, b in zip(before, testing.flatten(run(tower, IMAGE)), strict=True)]
        assert all(same) == (edit in (None, there_and_back, _train)), edit
        for seed, layout in enumerate((IMAGE, MIXED, IMAGE)):
            assert_same(lane, tower, layout, seed=seed, exact=edit is not edit_strides)
        if edit in (edit_data, *replaced, edit_strides, there_and_back):  # what was captured reads the memory of the old ones
            assert stats(tower).captures > captures
        if edit in (None, edit_in_place, _load, edit_data, *replaced):
            assert dynamos(tower, lambda: assert_same(lane, tower, IMAGE)) == 0


def test_nothing_is_replayed_on_memory_that_is_gone() -> None:
    """Parameters are looked at while the device works, and no lane keeps the memory of those that have moved."""
    tower, lane = make()
    for seed in range(3):
        assert_same(lane, tower, IMAGE, seed=seed)
    assert_not_replayed_once_moved(tower, lambda: assert_same(lane, tower, IMAGE))


def test_parameters_that_are_replaced_are_given_back() -> None:
    """No kind of call keeps the memory of weights that another has seen replaced; a weight that is gone is eager's error."""
    tower, lane = make()
    for seed in range(3):
        assert_same(lane, tower, IMAGE, seed=seed)
    with torch.no_grad():
        for _ in range(3):
            lane(*testing.make_inputs(tower, IMAGE))
    assert len(lane._routes) == 2
    old = StorageWeakRef(tower.blocks[0].attn.proj.weight.untyped_storage())
    _assign(tower)
    assert_same(lane, tower, IMAGE)
    gc.collect()
    assert old.expired()
    del tower.blocks[0].attn.proj.weight
    with pytest.raises(Exception, match="weight"):
        assert_same(lane, tower, IMAGE)


class Scale(nn.Module):
    """One parameter, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, device=DEVICE))

    def forward(self, pixels: Tensor) -> Tensor:
        """The pixels scaled."""
        return (pixels * self.weight).sin()


def test_a_tower_of_one_parameter() -> None:
    """It is looked at as many are."""
    tower = Scale()
    lane = vitcg_backend.fast_lane(compile_tower(tower))
    for batch in (2, 3, 4, 5, 3):
        pixels = torch.randn(batch, 4, 8, device=DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(lane(pixels), tower(pixels))
            if batch == 4:
                tower.weight = nn.Parameter(tower.weight * 2)
            if batch == 5:
                assert dynamos(tower, lambda p=pixels: lane(p)) == 0
    assert not lane.refusals


def test_modes_and_arguments_alternate() -> None:
    """Dtypes of the pixels, autocast, inference mode, gradients, positional arguments and other keywords, in turns."""
    tower, lane = make("qwen2_vl")
    pixels, grid = testing.make_inputs(tower, TWO_IMAGES)
    autocast = {"device_type": DEVICE, "dtype": torch.bfloat16}

    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return lane(*args, **kwargs), tower(*args, **kwargs)

    for _ in range(3):
        with torch.no_grad():
            for given in (pixels, pixels.double(), pixels.t().contiguous().t()):
                assert_equal(*both(given, grid_thw=grid), tower, given, grid_thw=grid)
            assert_equal(*both(pixels, grid), tower, pixels, grid)
            assert_equal(*both(grid_thw=grid, hidden_states=pixels), tower, pixels, grid)
            with torch.autocast(**autocast):
                ours, theirs = both(pixels, grid)
            torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=0.05, atol=0.05)
            assert ours.pooler_output.dtype == theirs.pooler_output.dtype
        with torch.inference_mode():
            ours, theirs = both(pixels, grid)
            assert ours.pooler_output.is_inference() == theirs.pooler_output.is_inference()
        ours, theirs = both(pixels, grid)
        assert ours.pooler_output.requires_grad
        ours.pooler_output.sum().backward()
    assert not lane.refusals


def test_bad_calls_raise_eagers_error() -> None:
    """A grid that is not of these pixels, no pixels at all, a missing argument: eager's type of error; good calls stay good."""
    tower, lane = make()
    for _ in range(3):
        assert_same(lane, tower, IMAGE)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    bad = [
        ((pixels[:12], grid), {}),
        ((pixels[:15], grid), {}),
        ((pixels[:0], grid), {}),
        ((pixels,), {}),
        ((pixels, grid * 3), {}),
    ]
    for args, kwargs in bad:
        with torch.no_grad():
            with pytest.raises(Exception) as theirs:
                tower(*args, **kwargs)
            with pytest.raises(Exception) as ours:
                lane(*args, **kwargs)
        assert isinstance(ours.value, RuntimeError) == isinstance(theirs.value, RuntimeError)
        assert_same(lane, tower, IMAGE)


def test_what_has_no_lane() -> None:
    """Hooks, tensors given twice and arguments in containers: served by the compiled tower, with the reason kept."""
    tower, lane = make()
    kept: list[Any] = []
    handle = tower.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output))
    for _ in range(4):
        kept.clear()
        assert_same(lane, tower, IMAGE)
        assert len(kept) >= 2
    assert list(lane.refusals) == ["hooks"]
    assert "has hooks, and what they do" in lane.refusals["hooks"]
    handle.remove()
    lane.forget()
    for layout in (IMAGE, MIXED, IMAGE):
        assert_same(lane, tower, layout)
    assert not lane.refusals
    call = partial(assert_same, lane, tower, IMAGE)
    assert dynamos(tower, call) == 0
    with torch.compiler.set_stance("force_eager"):
        before = stats(tower).calls
        call()
        assert stats(tower).calls == before
    with Noting() as mode, torch.no_grad():
        pixels, grid = testing.make_inputs(tower, IMAGE)
        lane(pixels, grid_thw=grid)
    assert any("mm" in str(function) for function in mode.seen)
    assert dynamos(tower, call) == 0


class Noting(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself."""
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Rows(nn.Module):
    """A tower that reports how many rows it had."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> dict[str, Any]:
        """The result of the tower, and a number."""
        return {"out": self.tower(pixels, grid_thw=grid_thw).pooler_output, "rows": pixels.shape[0]}


def test_numbers_in_the_output_follow_the_rows() -> None:
    """An output with a number made from a size is never served from a lane."""
    tower = tiny_tower("qwen2_vl", depth=1)
    lane = vitcg_backend.fast_lane(compile_tower(Rows(tower)))
    with torch.no_grad():
        for layout in (IMAGE, MIXED, VIDEO, IMAGE, TWO_IMAGES):
            pixels, grid = testing.make_inputs(tower, layout)
            assert lane(pixels, grid_thw=grid)["rows"] == len(pixels)


class Branching(nn.Module):
    """A tower that treats large calls otherwise."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """The result of the tower, of doubled pixels where there are many."""
        return self.tower(pixels * 2 if len(pixels) > 40 else pixels, grid_thw=grid_thw)


class Parted(Branching):
    """A tower whose own Python code asks how many items there are."""

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """The result of the tower, of doubled pixels where there are several items."""
        return self.tower(pixels * 2 if len(grid_thw) > 1 else pixels, grid_thw=grid_thw)


class Untraced(Parted):
    """The same, and Dynamo is kept out of it."""

    forward = torch.compiler.disable(Parted.forward, recursive=False)


class Keeping(Branching):
    """A tower that keeps its last result."""

    last: Any = None

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """The result of the tower."""
        self.last = self.tower(pixels, grid_thw=grid_thw)
        return self.last


@pytest.mark.parametrize(("kind", "whole"), [(Branching, True), (Parted, False), (Untraced, False), (Keeping, False)])
def test_what_the_towers_own_code_does_with_sizes(kind: type[nn.Module], whole: bool) -> None:
    """Each answer of a question about rows has its own route; code around the graph, and what it keeps, is never left out."""
    tower = tiny_tower("qwen2_vl", depth=1)
    wrapped = kind(tower)
    lane = vitcg_backend.fast_lane(compile_tower(wrapped))
    layouts = (IMAGE, IMAGE, IMAGE, MIXED, MIXED, MIXED, IMAGE, VIDEO, TWO_IMAGES, IMAGE)
    for seed, layout in enumerate(layouts):
        pixels, grid = testing.make_inputs(tower, layout, seed=seed)
        with torch.no_grad():
            output = lane(pixels, grid)
            assert wrapped.last is output if kind is Keeping else True
            assert_equal(output, wrapped(pixels, grid), wrapped, pixels, grid)
    assert list(lane.refusals) == ([] if whole else ["more_than_graph"])

    def again() -> None:
        for layout in (IMAGE, VIDEO, MIXED):
            with torch.no_grad():
                lane(*testing.make_inputs(tower, layout))

    assert (dynamos(wrapped, again) == 0) == whole


def test_two_towers_of_one_class() -> None:
    """A, B, A, B through lanes of their own, which share a graph; then B's lane after A is gone."""
    towers = [tiny_tower("qwen3_vl", depth=1, seed=seed) for seed in (1, 2)]
    lanes = [vitcg_backend.fast_lane(compile_tower(tower)) for tower in towers]
    for step in range(8):
        assert_same(lanes[step % 2], towers[step % 2], (IMAGE, MIXED)[step % 3 % 2], seed=step)
    del lanes[0]
    third = copy.deepcopy(towers.pop(0))
    assert_same(lanes[0], towers[0], IMAGE)
    assert_same(vitcg_backend.fast_lane(compile_tower(third)), third, IMAGE)


def test_a_model_that_holds_its_lane_is_copied() -> None:
    """The copy's lane serves the copy, with the weights that it has then."""
    model = nn.Module()
    model.tower = tiny_tower("qwen2_vl", depth=1)
    model.tower.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    model.lane = vitcg_backend.fast_lane(model.tower)
    plain = tiny_tower("qwen2_vl", depth=1)
    for _ in range(3):
        assert_same(model.lane, plain, IMAGE)
    twin = copy.deepcopy(model)
    assert twin.lane.tower is twin.tower
    with torch.no_grad():
        for tower in (twin.tower, other := copy.deepcopy(plain)):
            tower.blocks[0].mlp.fc1.weight.mul_(2)
    for seed in range(3):
        assert_same(twin.lane, other, IMAGE, seed=seed)
        assert_same(model.lane, plain, IMAGE, seed=seed)


def test_reset_in_between() -> None:
    """After `torch._dynamo.reset()` calls are served, and captured anew."""
    tower, lane = make()
    for _ in range(3):
        assert_same(lane, tower, IMAGE)
    torch._dynamo.reset()
    for layout in (IMAGE, MIXED, IMAGE):
        assert_same(lane, tower, layout)


def test_a_module_compiled_in_place() -> None:
    """``tower.compile(backend="vitcg")`` has a lane."""
    tower = tiny_tower("qwen3_vl", depth=1)
    twin = copy.deepcopy(tower)
    tower.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    lane = vitcg_backend.fast_lane(tower)
    for layout in (IMAGE, MIXED, IMAGE, VIDEO):
        assert_same(lane, twin, layout)
    assert dynamos(tower, lambda: assert_same(lane, twin, IMAGE)) == 0


@pytest.mark.parametrize("backend", ["eager", "inductor", "aot_eager"])
def test_what_is_compiled_with_another_backend(backend: str) -> None:
    """A lane says so when it is asked for, of a module compiled in place, too; a function that calls this backend has one."""

    def of_users(gm: Any, example_inputs: Any) -> Any:
        return vitcg_backend.vitcg(gm, example_inputs, options={"inner": "eager", "min_tokens": 1})

    tower, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend=backend)
    for other in (torch.compile(tower, backend=backend), in_place):
        with pytest.raises(TypeError, match=rf"compiled with this backend, .*: Linear is compiled with backend='{backend}'\."):
            vitcg_backend.fast_lane(other)
    assert vitcg_backend.fast_lane(torch.compile(tower, backend=of_users)).refusals == {}


@pytest.mark.parametrize(("tower", "text"), [(nn.Linear(2, 2), "Linear is not compiled"), (print, "method is no module")])
def test_what_is_not_compiled(tower: Any, text: str) -> None:
    """An error that says what was given and what is to be given."""
    with pytest.raises(TypeError, match=rf"torch\.compile\(tower, backend='vitcg'\) .*: .*{text}\."):
        vitcg_backend.fast_lane(tower)


def test_a_model_around_the_compiled_tower() -> None:
    """The error names the part to give."""
    tower = tiny_tower("qwen2_vl", depth=1)
    model = nn.ModuleDict({"visual": tower})
    tower.compile(backend="vitcg")
    with pytest.raises(TypeError, match=r"ModuleDict is not compiled, its part \.visual is: give that\."):
        vitcg_backend.fast_lane(model)
    with pytest.raises(vitcg_backend.OptionError, match=r"ModuleDict is not compiled, its part \.visual is: give that\."):
        vitcg_backend.warmup(model)


def test_a_lane_shows_what_it_routes() -> None:
    """By its printed form."""
    tower, lane = make()
    assert repr(lane) == "FastLane(Qwen3VLVisionModel, kinds of calls routed: 0, refusals: none)"
    for seed in range(3):
        assert_same(lane, tower, IMAGE, seed=seed)
    assert repr(lane) == "FastLane(Qwen3VLVisionModel, kinds of calls routed: 1, refusals: none)"


def test_parameters_whose_memory_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lane, with the reason, and no guess by Dynamo's calls, which go straight to their replay all the same."""
    monkeypatch.setattr(states, "_storages", lambda tensors, gone: None)
    tower, lane = make()
    for seed in range(3):
        assert_same(lane, tower, IMAGE, seed=seed)
    assert list(lane.refusals) == ["parameter_memory"]
    assert "memory of its parameters is not known" in lane.refusals["parameter_memory"]
    monkeypatch.setattr(CompiledTower, "_ask", None)
    assert_same(lane, tower, IMAGE)
