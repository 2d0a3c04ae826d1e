"""Helpers of the tests: compile a tiny tower, run a sequence of layouts against eager, hold outputs and look again.

``VITCG_TEST_DEVICE=cuda`` runs the same tests on a GPU, there within the error budget instead of bit for bit: another attention
kernel runs than eager's.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import vitcg_backend
from vitcg_backend import testing
from vitcg_backend.backend import live_towers
from vitcg_backend.capture import Capture

DEVICE = os.environ.get("VITCG_TEST_DEVICE", "cpu")
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

IMAGE = ((1, 4, 4),)
TWO_IMAGES = ((1, 8, 4), (1, 4, 4))
VIDEO = ((2, 8, 8),)
MIXED = ((1, 4, 4), (1, 4, 4), (2, 8, 4))
LAYOUTS = (IMAGE, TWO_IMAGES, VIDEO, MIXED, ((1, 16, 16),), ((3, 12, 4), (1, 4, 8)))


def tiny_tower(name: str, depth: int | None = 2, **kwargs: Any) -> nn.Module:
    """`testing.tiny_tower` on the device of this run, by default of two blocks: that is each kind of block, and each piece but
    those of further repetitions. ``depth=None`` is the depth of `testing.tiny_tower`, for what grows with it.
    """
    return testing.tiny_tower(name, depth=depth, device=DEVICE, **kwargs)


def tensor(data: Any, **kwargs: Any) -> Tensor:
    """`torch.tensor` on the device of this run."""
    return torch.tensor(data, device=DEVICE, **kwargs)


def assert_equal(output: Any, expected: Any, tower: nn.Module, *args: Any, exact: bool = True, **kwargs: Any) -> None:
    """Bit for bit on a CPU, within the error budget on a GPU or with ``exact=False``: a CPU multiplies a single row otherwise
    than the same row among padded ones.
    """
    if DEVICE == "cpu" and exact:
        testing.assert_bitwise(output, expected)
    else:
        testing.assert_within_budget(output, expected, testing.reference_float64(tower, *args, **kwargs))


def compile_tower(tower: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Any:
    """`torch.compile` with pieces that run eagerly and buckets used whatever a clock says, unless the options say otherwise."""
    options = {"inner": "eager", "min_tokens": 1, **options}
    return torch.compile(tower, backend="vitcg", dynamic=dynamic, fullgraph=fullgraph, options=options)


def run(tower: nn.Module, layout: Sequence[Any], seed: int = 0, **kwargs: Any) -> Any:
    """One call under `no_grad`."""
    pixels, grid = testing.make_inputs(getattr(tower, "_orig_mod", tower), tuple(layout), seed=seed)
    with torch.no_grad():
        return tower(pixels, grid_thw=grid, **kwargs)


def assert_same(
    compiled: nn.Module, tower: nn.Module, layout: Sequence[Any], seed: int = 0, *, exact: bool = True, **kwargs: Any
) -> list[Tensor]:
    """One call, equal to eager; its output tensors."""
    pixels, grid = testing.make_inputs(tower, tuple(layout), seed=seed)
    with torch.no_grad():
        output, expected = compiled(pixels, grid_thw=grid, **kwargs), tower(pixels, grid_thw=grid, **kwargs)
        assert_equal(output, expected, tower, pixels, exact=exact, grid_thw=grid, **kwargs)
    return testing.flatten(output)


def assert_sequence(
    compiled: nn.Module, tower: nn.Module, layouts: Sequence[Any], rounds: int = 3, seed: int = 0, *, exact: bool = True
) -> None:
    """Layouts shuffled and repeated; every output is kept and compared again at the end."""
    order = [layout for layout in layouts for _ in range(rounds)]
    random.Random(seed).shuffle(order)
    held = []
    for step, layout in enumerate(order):
        outputs = assert_same(compiled, tower, layout, seed=step, exact=exact)
        held.append((outputs, [t.clone() for t in outputs]))
    for outputs, copies in held:
        for now, then in zip(outputs, copies, strict=True):
            assert torch.equal(now, then), "an earlier result changed"


def stats(tower: nn.Module) -> vitcg_backend.Stats:
    """Counters of the tower."""
    return vitcg_backend.stats(tower)


def assert_not_replayed_once_moved(tower: nn.Module, call: Callable[[], Any]) -> None:
    """A weight that moves takes its memory with it, and no call after that replays what reads it there."""
    weight = next(m for m in tower.modules() if isinstance(m, nn.Linear)).weight
    old = StorageWeakRef(weight.untyped_storage())
    captures = {id(c) for part in live_towers(tower) for c in part._captures.values()}
    weight.data = weight.data * 2
    gc.collect()
    assert old.expired()
    replayed = []
    with pytest.MonkeyPatch.context() as patch:
        replay = Capture.replay
        patch.setattr(Capture, "replay", lambda self, args: (replayed.append(id(self)), replay(self, args))[1])
        call()
    assert replayed
    assert not captures & set(replayed)


def edit_in_place(tower: nn.Module) -> None:
    """A weight edited where it lies."""
    tower.blocks[0].mlp.linear_fc1.weight.mul_(1.1)


def edit_data(tower: nn.Module) -> None:
    """All parameters moved."""
    for p in tower.parameters():
        p.data = p.data * 1.05


def edit_strides(tower: nn.Module) -> None:
    """A weight in place of its transpose, at the same address."""
    tower.blocks[0].attn.proj.weight.data = tower.blocks[0].attn.proj.weight.data.t()


def there_and_back(tower: nn.Module) -> None:
    """All parameters moved, with the values that they had."""
    tower.to(torch.float64).to(torch.float32)
