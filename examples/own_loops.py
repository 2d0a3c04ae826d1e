"""A packed tower that nobody taught us: it computes its metadata with Python loops of its own.

Without help it runs in parts, right and counted: Dynamo breaks it at each loop. `register_lowering` of the two functions that
loop makes it one graph, which buckets serve. ``python examples/own_loops.py`` shows both.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

import vitcg_backend

MERGE = 2


def patch_positions(sizes: Tensor, merge: int = MERGE) -> Tensor:
    """(row, column) of each patch, merge block by merge block, int64 ``[patches, 2]``; sizes ``[items, 3]``."""
    parts = []
    for frames, height, width in sizes.tolist():
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([rows, columns], -1).view(height // merge, merge, width // merge, merge, 2)
        parts.append(grid.transpose(1, 2).reshape(-1, 2).repeat(frames, 1))
    return torch.cat(parts).to(sizes.device)


def frame_boundaries(sizes: Tensor) -> Tensor:
    """Where each frame begins, int32 ``[frames + 1]``."""
    lengths = [height * width for frames, height, width in sizes.tolist() for _ in range(frames)]
    return F.pad(torch.tensor(lengths, device=sizes.device).cumsum(0), (1, 0)).int()


class Block(nn.Module):
    """Attention within a frame, and an MLP."""

    is_causal = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Packed if the attention can do it, else frame by frame, as towers of transformers do: ``[1, heads, rows, dim]``."""
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if is_flash_attention_requested(self.config):
            return attention(self, q, k, v, None, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)[0]
        lengths = cu_seqlens.diff().tolist()
        frames = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        return torch.cat([attention(self, *frame, None)[0] for frame in frames], dim=1)

    def forward(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Rows ``[patches, width]``."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = (t * angles.cos() + t.flip(-1) * angles.sin() for t in (q, k))
        y = self.attend(*(t.transpose(0, 1)[None] for t in (q, k, v)), cu_seqlens)
        x = x + self.out(y.reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class OwnLoops(nn.Module):
    """Patches ``[patches, 48]`` and sizes ``[items, 3]`` to tokens ``[patches / 4, width]``."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(48, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.merge = nn.Linear(MERGE**2 * width, width)
        self.register_buffer("frequencies", torch.arange(1, width // heads + 1) / 16, persistent=False)

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        """See the class."""
        places = patch_positions(sizes)
        cu_seqlens = frame_boundaries(sizes)
        x = self.embed(patches) + self.positions(places.sum(-1) % 64)
        angles = (places[:, :1] * self.frequencies + places[:, 1:] / 7)[:, None]
        for block in self.blocks:
            x = block(x, angles, cu_seqlens)
        return self.merge(x.view(x.shape[0] // MERGE**2, -1))


def calls(tower: OwnLoops) -> tuple[float, vitcg_backend.Stats]:
    """Run some layouts compiled; the largest difference from eager, and the counters."""
    torch._dynamo.reset()
    compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    worst = 0.0
    with torch.no_grad():
        for layout in (((1, 4, 4),), ((2, 8, 4), (1, 4, 4)), ((1, 8, 8), (1, 4, 8)), ((1, 4, 4),), ((2, 8, 4), (1, 4, 4))):
            sizes = torch.tensor(layout)
            patches = torch.randn(int(sizes.prod(1).sum()), 48)
            worst = max(worst, float((compiled(patches, sizes) - tower(patches, sizes)).abs().max()))
    return worst, vitcg_backend.stats(tower)


def main() -> int:
    """Without help, then with it."""
    for name in ("no help", "with help"):
        worst, seen = calls(OwnLoops().eval())  # a new one, whose counters begin at zero
        sys.stdout.write(f"{name}: {seen.graphs} graphs, {seen.hits} of {seen.calls} hits, max error {worst:.1e}\n")
        vitcg_backend.register_lowering(patch_positions, grid="sizes")
        vitcg_backend.register_lowering(frame_boundaries, grid="sizes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
