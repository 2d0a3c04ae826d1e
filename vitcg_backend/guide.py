"""The budget guide: from a model's configuration and the inputs to expect to grids, tokens, budgets and their padding."""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .budgets import fit_budgets, round_budget
from .errors import UnknownInput
from .grids import processor_of, values_of

__all__ = ["InputPlan", "Recommendation", "recommend_budgets"]

LEAST_FRAMES = 4


@dataclass(frozen=True)
class InputPlan:
    """One expected input.

    Attributes:
        input: frames x height x width in pixels, as given.
        grid: frames, height and width in patches, after the processor's resize.
        tokens: output tokens.
        budget: the recommended budget that serves it alone.
        padding: padded share of that budget.
        round_budget: the smallest ``2**k`` or ``3 * 2**k`` that holds it, what people set by hand.
        round_padding: padded share of that.
        power_padding: padded share of the smallest power of two that holds it.
    """

    input: str
    grid: tuple[int, int, int]
    tokens: int
    budget: int
    padding: float
    round_budget: int
    round_padding: float
    power_padding: float


@dataclass(frozen=True)
class Recommendation:
    """Budgets for the inputs to expect.

    Attributes:
        inputs: each input, in the order given.
        budgets: output tokens, ascending: for ``options={"token_budgets": [...]}``.
        packs: budget -> how many of each input it holds, in the order of `inputs`.
        max_items: most items that the largest budget can hold.
        max_frames: most frames, at least 4.
        max_segments: most attention segments, which is what the option ``max_frames`` counts: with windows in a tower more.
        memory_bytes: estimate for the static buffers and the graph pool of the largest budget in 16-bit numbers, None where
            the configuration does not give the widths.
    """

    inputs: tuple[InputPlan, ...]
    budgets: tuple[int, ...]
    packs: dict[int, tuple[int, ...]]
    max_items: int
    max_frames: int
    max_segments: int
    memory_bytes: int | None

    def __str__(self) -> str:
        lines = [("input", "grid", "tokens", "budget", "padding", "round", "padding", "power of two")]
        for plan in self.inputs:
            power = round(plan.tokens / (1 - plan.power_padding))
            lines.append(
                (
                    plan.input,
                    "x".join(map(str, plan.grid)),
                    str(plan.tokens),
                    str(plan.budget),
                    f"{plan.padding:.1%}",
                    str(plan.round_budget),
                    f"{plan.round_padding:.1%}",
                    f"{power} {plan.power_padding:.1%}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        text.append(f"token_budgets={list(self.budgets)}, max_items={self.max_items}, max_frames={self.max_segments}")
        for budget, counts in self.packs.items():
            holds = ", ".join(f"{count} of {plan.input}" for count, plan in zip(counts, self.inputs, strict=True) if count)
            text.append(f"  {budget} tokens hold {holds}")
        if self.memory_bytes is not None:
            text.append(f"memory of the largest budget: about {self.memory_bytes / 2**20:.0f} MiB in 16-bit numbers")
        return "\n".join(text)


def recommend_budgets(
    config: Any, inputs: Iterable[str | Sequence[int]], *, most: int = 12, max_tokens: int = 16384
) -> Recommendation:
    """Budgets that pad the expected inputs least, alone and two or four together.

    Args:
        config: a family's name, a configuration of transformers (or its dictionary), or a folder with ``config.json`` and
            the processors' files; see `vitcg_backend.grids.processor_of`.
        inputs: each ``"16x448x448"`` or ``(16, 448, 448)``: frames, height and width in pixels; one frame is a picture. An
            input that is given twice counts twice.
        most: budgets at most.
        max_tokens: of a budget, except where a single input has more.

    Raises:
        UnknownInput: unknown family, no such file, an input that is no size or that the processor refuses, none at all, or a
            value of another type.
    """
    processor = processor_of(config)
    if not isinstance(most, int) or most < 1:
        raise UnknownInput(f"most={most!r}: expected at least one budget")
    if not isinstance(max_tokens, int):
        raise UnknownInput(f"max_tokens={max_tokens!r}: expected a whole number of output tokens")
    sizes: dict[int, float] = {}
    plans: list[tuple[str, tuple[int, int, int], int]] = []
    for given in _listed(inputs):
        frames, height, width = _parsed(given)
        grid = processor.grid(frames, height, width)
        tokens = processor.tokens(grid)
        plans.append((f"{frames}x{height}x{width}", grid, tokens))
        for count in (1, 2, 4):
            if count == 1 or count * tokens <= max_tokens:
                share = 1 / count / (count * tokens)  # padding counts by its share of a call, however small the call
                sizes[count * tokens] = sizes.get(count * tokens, 0.0) + share
    if not plans:
        raise UnknownInput("no input: give at least one, such as 16x448x448 (frames x height x width in pixels)")
    budgets = fit_budgets(sizes, most)
    fewest = min(tokens for _, _, tokens in plans)
    frame = min(tokens // grid[0] for _, grid, tokens in plans)
    values = values_of(config)
    window = _window(values)
    segments = [(grid[0] * math.prod(-(-side // window) for side in grid[1:]) if window else grid[0]) for _, grid, _ in plans]
    return Recommendation(
        inputs=tuple(_plan(*plan, budgets) for plan in plans),
        budgets=budgets,
        packs={budget: tuple(budget // tokens for _, _, tokens in plans) for budget in budgets},
        max_items=budgets[-1] // fewest,
        max_frames=max(LEAST_FRAMES, budgets[-1] // max(frame, 1)),
        max_segments=max(LEAST_FRAMES, *(budgets[-1] * n // plan[2] for n, plan in zip(segments, plans, strict=True))),
        memory_bytes=_memory(values, budgets[-1], processor.merge_size**2),
    )


def _listed(inputs: Any) -> list[Any]:
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise UnknownInput(f"inputs={inputs!r}: expected a list of inputs, such as ['16x448x448', (1, 1024, 768)]")
    return list(inputs)


def _parsed(given: Any) -> tuple[int, int, int]:
    try:
        text = given if isinstance(given, str) else "x".join(str(operator.index(size)) for size in given)
    except TypeError:  # no sequence, or not one of whole numbers
        text = None
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text or "")
    if match is None:
        raise UnknownInput(
            f"input {given if text is None else text!r}: expected FRAMESxHEIGHTxWIDTH in pixels, such as 16x448x448 or "
            "1x1024x768, or three whole numbers"
        )
    frames, height, width = map(int, match.groups())
    return frames, height, width


def _plan(text: str, grid: tuple[int, int, int], tokens: int, budgets: Sequence[int]) -> InputPlan:
    budget, rounded = budgets[bisect_left(budgets, tokens)], round_budget(tokens)
    power = 1 << (tokens - 1).bit_length()
    return InputPlan(text, grid, tokens, budget, 1 - tokens / budget, rounded, 1 - tokens / rounded, 1 - tokens / power)


def _window(config: dict[str, Any]) -> int | None:
    """Side of a window of attention in patches, None without windows."""
    size, patch = config.get("window_size"), config.get("patch_size")
    return max(size // patch, 1) if isinstance(size, int) and isinstance(patch, int) else None


def _memory(config: dict[str, Any], tokens: int, unit: int) -> int | None:
    """Bytes of 16-bit numbers: pixels, hidden rows, results, and the activations that live at once in a block.

    A block holds at most the residual stream, its normed copy, queries, keys, values and attention's result (6 widths), and
    beside the stream two tensors of the MLP's width.
    """
    width = config.get("embed_dim") or config.get("hidden_size")
    ratio = config.get("mlp_ratio")
    inner = config.get("intermediate_size") or (width * ratio if width and ratio else None)
    patch = config.get("patch_size")
    if not (width and inner and isinstance(patch, int)):
        return None
    out = config.get("out_hidden_size") or config.get("hidden_size") or width
    pixels = 3 * config.get("temporal_patch_size", 2) * patch**2
    levels = 1 + len(config.get("deepstack_visual_indexes") or ())
    rows = tokens * unit
    return int(2 * (rows * (pixels + 7 * width + 2 * inner) + tokens * out * levels))
