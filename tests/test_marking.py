"""Marks and steps back: what a trace cannot do with unknown rows it does with known ones, and never raises for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import vitcg_backend


def item_numbers(grid_thw):
    """Item of each patch, int64 [patches]."""
    return torch.repeat_interleave(torch.arange(len(grid_thw)), torch.tensor([t * h * w for t, h, w in grid_thw.tolist()]))


def fails_on_every_grid(grid_thw):
    """Its shapes cannot be learnt."""
    if grid_thw.tolist() != [[1, 2, 4]]:
        raise ValueError("only one grid")
    return torch.ones(8)


class LoopsItself(nn.Module):
    """Reads its grid in its own forward, after a metadata function."""

    def forward(self, pixels, grid_thw):
        """Each item's rows less their mean, plus the item's number."""
        numbers = item_numbers(grid_thw)
        parts = pixels.split([t * h * w for t, h, w in grid_thw.tolist()])
        return torch.cat([part - part.mean(0) for part in parts]) + numbers[:, None]


class KeepsAView(nn.Module):
    """Writes into a tensor of which it holds a view."""

    def forward(self, pixels, grid_thw):
        """The view sees the write."""
        out = pixels * 2
        first = out[:, 1]
        out[:, 1] = item_numbers(grid_thw).float()
        return out + first[:, None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles by itself."""
    vitcg_backend.register_lowering(item_numbers)
    vitcg_backend.register_lowering(fails_on_every_grid)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(tower: nn.Module, *layouts) -> vitcg_backend.Stats:
    compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    with torch.no_grad():
        for layout in layouts:
            grid = torch.tensor(layout)
            pixels = torch.randn(int(grid.prod(1).sum()), 8)
            assert torch.equal(compiled(pixels, grid), tower(pixels, grid))
            assert not [name for t in (pixels, grid) for name in t.__dict__ if "dynamo" in name or "vitcg" in name]
    return vitcg_backend.stats(tower)


def test_a_loop_of_the_towers_own_is_traced_with_known_rows() -> None:
    """`grid.tolist()` in forward is a hard error with unknown rows: the trace goes on a step back, and says so."""
    seen = run(LoopsItself(), [[1, 2, 4]], [[1, 2, 4], [1, 2, 2]], [[1, 4, 4], [1, 2, 4], [1, 2, 2]], [[1, 2, 4]])
    assert "test_marking.py" in seen.refusals["host_loop"]


def test_a_function_that_cannot_be_learnt_is_not_lowered() -> None:
    """A metadata function that fails on the small grids leaves the compile to Dynamo, equal to eager."""

    class Tower(nn.Module):
        def forward(self, pixels, grid_thw):
            return pixels * fails_on_every_grid(grid_thw)[:, None]

    seen = run(Tower(), [[1, 2, 4]], [[1, 2, 4]])
    assert seen.hits == 0


def test_a_write_on_the_ordinary_path_is_not_dropped() -> None:
    """`x[...] = y` has no user in the graph and still counts."""
    seen = run(KeepsAView(), [[1, 2, 4]], [[1, 2, 4], [1, 2, 2]])
    assert seen.fallbacks["side_effect"] >= 1 or seen.graphs > 1  # torch 2.11 breaks the graph at the write
