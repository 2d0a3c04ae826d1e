"""Parameters that Dynamo does not gather: they are looked at while the device works, whatever has become of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import (
    DEVICE,
    IMAGE,
    MIXED,
    VIDEO,
    assert_not_replayed_once_moved,
    assert_same,
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

from vitcg_backend import testing
from vitcg_backend.backend import live_towers
from vitcg_backend.runtime import CompiledTower
from vitcg_backend.states import States


def _nothing(tower: nn.Module) -> None:
    pass


def _new_parameter(tower: nn.Module) -> None:
    tower.blocks[0].norm1.weight = nn.Parameter(tower.blocks[0].norm1.weight.detach() * 1.2)


def _new_block(tower: nn.Module) -> None:
    block = copy.deepcopy(tower.blocks[0])
    block.attn.qkv.weight.mul_(0.9)
    tower.blocks[0] = block


def _assigned(tower: nn.Module) -> None:
    tower.load_state_dict({k: v * 0.95 for k, v in tower.state_dict().items()}, assign=True)


EDITS: tuple[Callable[[nn.Module], None], ...] = (
    _nothing, edit_in_place, edit_data, _new_parameter, _new_block, _assigned, there_and_back, edit_strides, _nothing,
)  # fmt: skip


@pytest.mark.usefixtures("as_a_graph")
def test_what_is_seen() -> None:
    """Each edit shows in the very next call of a layout that was served before, and in those after it."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    kept = []  # memory of old parameters stays where it was: a replay on it gives old results
    for edit in EDITS:
        kept.append([p.data for p in tower.parameters()])
        with torch.no_grad():
            edit(tower)
        for seed, layout in enumerate((IMAGE, IMAGE, MIXED, IMAGE)):
            assert_same(compiled, tower, layout, seed=seed, exact=edit is not edit_strides)
    assert stats(tower).graphs <= 3  # another config object and other strides are graphs of their own
    assert stats(tower).hits == stats(tower).calls


@pytest.mark.usefixtures("as_a_graph")
def test_towers_that_share_a_graph() -> None:
    """Two towers in turns, a third in the place of one that is gone: each gets its own results, and its own guess."""
    first = tiny_tower("qwen3_vl", depth=1)
    towers = [first, copy.deepcopy(first)]
    with torch.no_grad():
        towers[1].blocks[0].mlp.linear_fc1.weight.mul_(2)
    compiled = [compile_tower(tower) for tower in towers]
    for seed in range(6):
        for one, tower in zip(compiled, towers, strict=True):
            assert_same(one, tower, IMAGE, seed=seed)
    seen = _guesses(lambda: [run(one, IMAGE) for _ in range(3) for one in compiled])
    assert None not in seen
    assert len(set(seen)) == 2
    del one, tower
    towers[1] = copy.deepcopy(first)
    compiled[1] = compile_tower(towers[1])
    for seed in range(3):
        assert_same(compiled[1], towers[1], IMAGE, seed=seed)


def test_nothing_is_replayed_on_memory_that_is_gone() -> None:
    """What a replay reads is there when it begins."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    for seed in range(3):
        assert_same(compiled, tower, IMAGE, seed=seed)
    assert_not_replayed_once_moved(tower, lambda: assert_same(compiled, tower, IMAGE))


@pytest.mark.usefixtures("as_a_graph")
def test_weights_that_alternate_are_not_guessed() -> None:
    """Each wrong guess costs a replay: after one the parameters are looked at first for a while."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    weight = tower.blocks[0].mlp.linear_fc1.weight
    values = [weight.data, weight.data * 2]

    def turns() -> None:
        for step in range(8):
            weight.data = values[step % 2]
            assert_same(compiled, tower, IMAGE, seed=step)

    turns()
    assert set(_guesses(turns)) == {None}


@pytest.mark.parametrize("held_as", ["closure", "global", "attribute"])
def test_a_tower_reached_in_other_ways(held_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function, of a function with the tower among its globals, of a model around it."""
    tower = tiny_tower("qwen3_vl", depth=1)
    monkeypatch.setitem(globals(), "_HELD", tower)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = tower

        def forward(self, pixels: Tensor, grid: Tensor) -> Any:
            return self.visual(pixels, grid_thw=grid)

    function = {
        "closure": lambda pixels, grid: tower(pixels, grid_thw=grid),
        "global": _call_held,
        "attribute": Model(),
    }[held_as]
    compiled = compile_tower(function)  # type: ignore[arg-type]
    for step, layout in enumerate((IMAGE, VIDEO, IMAGE, IMAGE)):
        pixels, grid = testing.make_inputs(tower, layout, seed=step)
        with torch.no_grad():
            output, expected = compiled(pixels, grid), tower(pixels, grid_thw=grid)
            if DEVICE == "cpu":
                testing.assert_bitwise(output, expected)
            tower.blocks[0].mlp.linear_fc1.weight.data = tower.blocks[0].mlp.linear_fc1.weight.data * 1.5
    assert stats(tower).graphs == 1


_HELD: Any = None


def _call_held(pixels: Tensor, grid: Tensor) -> Any:
    return _HELD(pixels, grid_thw=grid)


def test_dynamo_does_not_gather_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is called with the tower in place of its parameters."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    (part,) = live_towers(tower)
    given: list[tuple[Any, ...]] = []
    served = CompiledTower.__call__
    monkeypatch.setattr(CompiledTower, "__call__", lambda self, *args: (given.append(args), served(self, *args))[1])
    assert_same(compiled, tower, IMAGE)
    ((first, *others),) = [[given[0][i] for i in part._states.positions]]
    assert first is tower
    assert set(others) == {None}


def _guesses(calls: Callable[[], Any]) -> list[int | None]:
    """What was guessed in some calls."""
    seen: list[int | None] = []
    guess = States.guess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(States, "guess", lambda self, owner: (seen.append(guess(self, owner)), seen[-1])[1])
        calls()
    return seen


@pytest.mark.usefixtures("as_a_graph")
def test_weights_that_come_back_to_their_memory_are_served_fast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter merged and taken out again: the addresses are those of before, the memory is not."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    for _ in range(3):
        assert_same(compiled, tower, IMAGE)
    (part,) = live_towers(tower)
    states = part._states
    first = states.number(part._gather(tower))
    states._find(first).gone.append(states._find(first).storages[0])  # as if it had died, and other memory lay there now
    assert not states.in_memory(first)
    assert states.number(part._gather(tower)) == first
    assert states.in_memory(first)
    served: list[bool] = []
    original = CompiledTower._by_one_replay

    def spy(self: CompiledTower, *args: Any) -> Any:
        results = original(self, *args)
        served.append(results is not None)
        return results

    monkeypatch.setattr(CompiledTower, "_by_one_replay", spy)
    for _ in range(3):
        assert_same(compiled, tower, IMAGE)
    assert served == [True] * 3
