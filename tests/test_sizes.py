"""Sizes that Dynamo passes beside the tensors: each keeps its meaning in padded, cut and repeated calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import DEVICE
from torch import Tensor, nn

import vitcg_backend

LAYOUTS = ([[1, 4, 4]], [[1, 2, 4], [2, 2, 2]], [[1, 2, 2]] * 5)


def own_positions(grid_thw: Tensor) -> Tensor:
    """The place of each patch in its frame."""
    places = [torch.arange(h * w).repeat(t) for t, h, w in grid_thw.tolist()]
    return torch.cat(places).to(grid_thw.device)


class Worded(nn.Module):
    """Positions that are scaled by the length of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, pixels: Tensor, grid_thw: Tensor, text: Tensor) -> Tensor:
        """``[patches, values]``."""
        positions = own_positions(grid_thw) * text.shape[0]
        return pixels * self.scale + positions.sin()[:, None] + text.sum()


def compiled_pair(tower: nn.Module, **how: Any) -> tuple[nn.Module, Any]:
    vitcg_backend.register_lowering(own_positions)
    tower = tower.to(DEVICE)
    return tower, torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1}, **how)


def assert_same(compiled: Any, tower: nn.Module, layout: list[list[int]], *more: Any) -> None:
    grid = torch.tensor(layout)
    pixels = torch.randn(int(grid.prod(1).sum()), 8)
    arguments = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in (pixels, grid, *more)]
    with torch.no_grad():
        assert torch.equal(compiled(*arguments), tower(*arguments))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_size_of_another_input_is_that_of_the_call(dynamic: bool | None) -> None:
    """The length of a text is no number of items: of any length, the metadata made from it is eager's."""
    tower, compiled = compiled_pair(Worded(), dynamic=dynamic)
    for length in (3, 4, 5, 7, 1, 2, 4):
        for layout in LAYOUTS:
            assert_same(compiled, tower, layout, torch.randn(length))
    assert set(vitcg_backend.stats(tower).fallbacks) == {"caller_metadata"}


def test_a_lane_keeps_the_size_of_another_input() -> None:
    """A lane that has watched texts as long as a call has items serves longer ones rightly."""
    tower, compiled = compiled_pair(Worded(), dynamic=True)
    lane = vitcg_backend.fast_lane(compiled)
    for length in (2, 2, 2, 3, 5, 2, 4):
        assert_same(lane, tower, [[1, 2, 4], [2, 2, 2]], torch.randn(length))


def test_a_number_of_the_call() -> None:
    """A number that metadata depends on is a constant of its graph; a call with another one is served by the operators."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, pixels: Tensor, grid_thw: Tensor, factor: int) -> Tensor:
            return pixels * self.scale + (own_positions(grid_thw) * factor).sin()[:, None]

    tower, compiled = compiled_pair(Scaled())
    for factor in (3, 4, 5, 2, 4):
        for layout in LAYOUTS:
            assert_same(compiled, tower, layout, factor)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (2, 9)
    assert set(seen.fallbacks) == {"other_number"}
