"""Who is measured: each variant is a function of no arguments that runs one call of one tower."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import flash
import torch

import vitcg_backend
from vitcg_backend import testing
from vitcg_backend.backend import live_towers

__all__ = ["ISOLATED", "VARIANTS", "Case", "Towers", "within_budget"]

# torch.compile breaks a tower into dozens of graphs and compiles them for minutes: these two run in a process of their
# own, which can be ended at a time limit.
ISOLATED = ("compile", "reduce_overhead")
VARIANTS = ("eager_sdpa", "eager_flash", "opbyop_graph", "vitcg_replay", "vitcg_call", "vitcg_lane", "vitcg_unseen", *ISOLATED)

Runner = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Input of one call.

    Attributes:
        name: its name in workloads.json.
        pixel_values: `[num_patches, patch_dim]`, seeded noise; of a tower of images `[images, 3, height, width]`.
        grid_thw: `[num_items, 3]` int64; None for a tower of images.
        num_patches: rows into the tower's blocks.
        num_tokens: output rows.
    """

    name: str
    pixel_values: torch.Tensor
    grid_thw: torch.Tensor | None
    num_patches: int
    num_tokens: int

    def inputs(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """Arguments of the tower, the pixels in another dtype where one is given."""
        pixels = self.pixel_values if dtype is None else self.pixel_values.to(dtype)
        return (pixels,) if self.grid_thw is None else (pixels, self.grid_thw)


class Towers:
    """One architecture with one set of weights, in the forms that the variants run; each is made when asked for."""

    def __init__(self, name: str, device: torch.device, depth: int | None, tiny: bool) -> None:
        self.name, self.device = name, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if tiny:
            self.eager = testing.tiny_tower(name, dtype=self.dtype, device=device, seed=0)
        else:
            self.eager = testing.published_tower(name, depth=depth, dtype=self.dtype, device=device, seed=0)

    @cached_property
    def flash(self) -> torch.nn.Module:
        """The eager tower with a packed flash attention."""
        flash.register()
        tower = copy.deepcopy(self.eager)
        config: Any = tower.config
        config._attn_implementation = flash.ATTENTION
        return tower

    @cached_property
    def reference(self) -> torch.nn.Module:
        """The eager tower in a format with far more digits: float32 for bfloat16, float64 for float32."""
        tower = copy.deepcopy(self.eager)  # not `to(dtype)`, which takes complex buffers for real ones
        return tower.float() if self.dtype == torch.bfloat16 else tower.double()

    @cached_property
    def vitcg(self) -> Any:
        """The tower compiled by this package."""
        return torch.compile(self.eager, backend="vitcg")

    @cached_property
    def lane(self) -> vitcg_backend.FastLane:
        """The same tower, called round Dynamo."""
        return vitcg_backend.fast_lane(self.vitcg)

    @cached_property
    def stock(self) -> Any:
        """The tower compiled by Inductor, as `torch.compile` does by default."""
        return torch.compile(self.eager)

    @cached_property
    def reduce_overhead(self) -> Any:
        """The tower compiled by Inductor with its own CUDA graphs."""
        return torch.compile(self.eager, mode="reduce-overhead")

    def case(self, name: str, grid: list[list[int]]) -> Case:
        """Seeded noise for a layout. A tower of images of one size gets as many of them as the layout has frames."""
        config: Any = self.eager.config
        if hasattr(config, "image_size"):
            images = sum(frames for frames, _, _ in grid)
            sides = (config.image_size, config.image_size)
            noise = torch.randn(images, 3, *sides, generator=torch.Generator().manual_seed(0))
            patches = images * (config.image_size // config.patch_size) ** 2
            tokens = round(patches * config.pixel_shuffle_ratio**2)
            return Case(name, noise.to(self.device, self.dtype), None, patches, tokens)
        pixels, grid_thw = testing.make_inputs(self.eager, grid)
        return Case(name, pixels, grid_thw, len(pixels), len(pixels) // config.spatial_merge_size**2)

    def runner(self, variant: str, case: Case) -> Runner:
        """The function to time, of every variant but `vitcg_replay`, which is `replay_of` the latest call."""
        given = case.inputs()
        if variant == "eager_sdpa":
            return lambda: self.eager(*given)
        if variant == "eager_flash":
            return lambda: self.flash(*given)
        if variant == "opbyop_graph":
            if case.grid_thw is None:  # SDPA runs flash attention on a batch by itself
                return _captured(lambda: self.eager(*given), self.device)
            metadata = flash.precompute(self.flash, case.grid_thw)
            # Modules pop what they use, so each run gets its own dictionary.
            return _captured(lambda: self.flash(*given, **metadata), self.device)
        if variant == "vitcg_call":
            return lambda: self.vitcg(*given)
        if variant == "vitcg_lane":
            return lambda: self.lane(*given)
        if variant == "vitcg_unseen":
            return _unseen(self.vitcg, live_towers(self.eager), given)
        if variant == "compile":
            return lambda: self.stock(*given)
        assert variant == "reduce_overhead", variant
        return lambda: _marked(self.reduce_overhead, given)


def _unseen(tower: Any, parts: list[Any], given: Sequence[torch.Tensor]) -> Runner:
    """Calls whose layout has not been seen before, of frames that have: what is known of layouts is forgotten each time."""

    def call() -> Any:
        for part in parts:
            part.forget_layouts()
        return tower(*given)

    return call


def _marked(tower: Any, given: Sequence[torch.Tensor]) -> Any:
    """A call that says that the outputs of the last one are no longer needed, as this mode asks for."""
    torch.compiler.cudagraph_mark_step_begin()
    return tower(*given)


def _captured(run: Runner, device: torch.device) -> Runner:
    """`run` in a CUDA graph; the result's tensors are the graph's own. On a CPU `run` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay(keep: Runner = run) -> Any:
        graph.replay()  # reads tensors that only `keep` owns
        return outputs

    return replay


def within_budget(outputs: Any, eager: Any, reference: Any) -> tuple[bool, float]:
    """Is the relative error against the reference at most twice eager's own, for each tensor?

    Returns:
        The answer, and the largest share of the allowed error that a tensor uses.
    """
    tensors = testing.check(outputs, eager, reference).tensors
    worst = max(math.inf if tensor.problem else tensor.rms_error / tensor.rms_budget for tensor in tensors)
    return worst <= 1, worst
