"""The streams of calls that benchmarks and padding figures are made on: seeded, from the numbers in ``workloads.json``.

``python benchmarks/streams.py`` prints the padding of the automatic ladder on each.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcg_backend.bucketing import Ladder, Layout, num_patches

__all__ = ["Padding", "image_grid", "load_workloads", "padding", "stream", "stream_names"]

WORKLOADS = Path(__file__).with_name("workloads.json")
LARGEST_ASPECT_RATIO = 200


def load_workloads() -> dict[str, Any]:
    """The data: `towers` (published architectures), `processor`, `calls` (name -> layout) and `streams`."""
    workloads: dict[str, Any] = json.loads(WORKLOADS.read_text(encoding="utf-8"))
    return workloads


def stream_names() -> list[str]:
    """What `stream` can make."""
    return list(load_workloads()["streams"])


def image_grid(width: int, height: int, *, patch: int, merge: int, min_pixels: int, max_pixels: int) -> tuple[int, int, int]:
    """The patch grid ``(1, h, w)`` of an image of `width` x `height` pixels after the processor's resize.

    Each side becomes the nearest whole number of merge blocks (a half goes to the even one). A picture that then has
    more than `max_pixels` is scaled to that area and cut down to whole blocks, at least one; one with fewer than
    `min_pixels` is scaled up to that area and filled up to whole blocks.

    Source: `smart_resize` in transformers/models/qwen2_vl/image_processing_pil_qwen2_vl.py (5.24); Qwen3-VL shares it.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(width, height) > LARGEST_ASPECT_RATIO * min(width, height):
        raise ValueError(f"{width}x{height}: expected sides at most {LARGEST_ASPECT_RATIO} times each other.")
    block = patch * merge
    rows, columns = round(height / block), round(width / block)
    area = rows * columns * block**2
    if area > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / block))
        columns = max(1, math.floor(width / shrink / block))
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
    return 1, rows * merge, columns * merge


def stream(name: str, seed: int = 0) -> list[Layout]:
    """The layouts of the calls of one stream, in order; the same `seed` gives the same calls on every machine.

    Raises:
        ValueError: no stream has this name.
    """
    workloads = load_workloads()
    if name not in workloads["streams"]:
        raise ValueError(f"unknown stream {name!r}; known streams: {', '.join(workloads['streams'])}.")
    spec = workloads["streams"][name]
    chance = random.Random(seed)
    if "grid" in spec:
        return [tuple((t, h, w) for t, h, w in spec["grid"])] * spec["calls"]
    if "sides" in spec:
        return [_video(chance, spec) for _ in range(spec["calls"])]
    processor = {key: value for key, value in workloads["processor"].items() if key != "note"}
    grids = [image_grid(width, height, **processor) for width, height, _ in spec["sizes"]]
    shares = [share for *_, share in spec["sizes"]]  # relative: `choices` normalises them
    fewest, most = spec["images_per_call"]
    return [tuple(chance.choices(grids, shares, k=chance.randint(fewest, most))) for _ in range(spec["calls"])]


def _video(chance: random.Random, spec: dict[str, Any]) -> Layout:
    frames, side = chance.randint(*spec["frames"]), chance.choice(spec["sides"])
    return ((frames, side, side),)


@dataclass(frozen=True)
class Padding:
    """What a ladder does to a stream.

    Attributes:
        calls: calls that a bucket holds; only they enter the other figures.
        oversize: calls above the largest budget, which run uncaptured.
        buckets: different buckets used.
        tokens: output tokens of the calls.
        bucket_tokens: output tokens of their buckets.
    """

    calls: int
    oversize: int
    buckets: int
    tokens: int
    bucket_tokens: int

    @property
    def fraction(self) -> float:
        """Padded tokens by bucket tokens, over all calls together."""
        return 1 - self.tokens / self.bucket_tokens if self.bucket_tokens else 0.0


def padding(ladder: Ladder, layouts: Iterable[Layout]) -> Padding:
    """Measure the padding of `layouts` on `ladder`."""
    rows = [num_patches(layout) for layout in layouts]
    fits = [(size, bucket) for size in rows if (bucket := ladder.fit(size))]
    return Padding(
        calls=len(fits),
        oversize=len(rows) - len(fits),
        buckets=len({bucket for _, bucket in fits}),
        tokens=sum(size // ladder.unit for size, _ in fits),
        bucket_tokens=sum(bucket.tokens for _, bucket in fits),
    )


def main() -> None:
    """Print one line a stream."""
    ladder = Ladder.automatic(16384, unit=load_workloads()["processor"]["merge"] ** 2)
    print(f"automatic ladder up to {ladder.budgets[-1]} tokens: {len(ladder.budgets)} budgets")
    for name in stream_names():
        result = padding(ladder, stream(name))
        print(
            f"{name:12} {100 * result.fraction:5.2f} % padding, {result.calls} calls in {result.buckets} buckets, "
            f"{result.oversize} above the largest"
        )


if __name__ == "__main__":
    main()
