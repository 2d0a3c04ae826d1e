"""Packed attention on the CPU: the operator, the reference kernel, the tile table, and the Triton kernel interpreted.

`TestEveryKernel` runs for the `sdpa` kernel here, and a second time for `triton` in a process of its own, in Triton's
interpreter: the interpreter has to be chosen before triton is imported.
"""

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitcg_backend.attention import KERNELS, SegmentBounds, choose, segments, tile_scheduled, tiles
from vitcg_backend.attention.op import VARLEN_ATTENTION, VARLEN_ATTENTION_BACKWARD
from vitcg_backend.errors import AttentionUnavailable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = "triton" if INTERPRETED else "sdpa"

LAYOUTS = {
    "one": [130],
    "equal": [64] * 3,
    "uneven": [70, 1, 130, 64, 3],
    "empty segments": [0, 40, 0, 0, 65, 0],
    "one long beside many short": [3] * 7 + [200] + [2] * 8,
    "many more than full tiles": [3] * 40,
}


def prefix_sums(lengths):
    return list(itertools.accumulate(lengths, initial=0))


def packed(lengths, *, heads=2, kv_heads=2, dim=72, tail=0, dtype=torch.float16, shift=0):
    """q, k and v as views of one fused buffer; `shift` elements move them off their alignment."""
    torch.manual_seed(len(lengths) + dim)
    rows, width = sum(lengths) + tail, (heads + 2 * kv_heads) * dim
    buffer = torch.randn(rows, width + shift).to(dtype)[:, shift:]
    parts = buffer.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    return [x.unflatten(1, (-1, dim)) for x in parts]


def reference(q, k, v, lengths, scale):
    """float64, written out, one segment at a time; zero rows after the last segment."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for start, end in itertools.pairwise(prefix_sums(lengths)):
        weights = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]).mul(scale).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v[start:end])
    return out


def within_budget(out, q, k, v, lengths, scale):
    """The error against float64 is at most twice that of eager attention in the same dtype."""
    exact = reference(q, k, v, lengths, scale)
    rows = sum(lengths)
    eager = segments.attention_by_segment(q[:rows], k[:rows], v[:rows], torch.tensor(prefix_sums(lengths)), scale)
    ours, theirs = (out[:rows] - exact[:rows]).norm(), (eager - exact[:rows]).norm()
    assert ours <= 2 * theirs, (ours, theirs)
    assert (out[:rows] - exact[:rows]).abs().max() <= 4 * (eager - exact[:rows]).abs().max()


def run(name, q, k, v, lengths, *, spare=0, longest=None, scale=None):
    kernel = KERNELS[name]
    bounds = SegmentBounds(q.shape[0], len(lengths) + spare, max(lengths) if longest is None else longest)
    metadata = kernel.metadata(prefix_sums(lengths), bounds)
    return kernel.forward(q, k, v, metadata, bounds, q.shape[2] ** -0.5 if scale is None else scale)


@pytest.fixture(params=[64, 128] if INTERPRETED else ["any"])
def height(request, monkeypatch):
    """Triton: both tile heights, where the head size has both, in spite of the few rows of a test."""
    if request.param == 128:
        monkeypatch.setattr(tile_scheduled, "_PROGRAMS", 0)
    return request.param


@pytest.fixture(scope="session", autouse=INTERPRETED)
def interpreter():
    """Skip where the installed Triton's interpreter does not run with the installed NumPy."""
    import numpy as np
    import triton

    try:
        q, k, v = packed([5], dim=16)
        run("triton", q, k, v, [5])
    except triton.runtime.errors.InterpreterError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        pytest.skip(f"the interpreter of triton {triton.__version__} does not run with numpy {np.__version__}")


class TestEveryKernel:
    """What holds for each kernel that can run here."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_error_is_at_most_twice_that_of_eager(self, layout, height):
        """Every row of every layout is as near to float64 as eager attention is."""
        q, k, v = packed(LAYOUTS[layout])
        within_budget(run(HERE, q, k, v, LAYOUTS[layout]), q, k, v, LAYOUTS[layout], 72**-0.5)

    @pytest.mark.parametrize("dim", [16, 24, 40, 64, 72, 80, 88, 96, 104, 128])
    def test_head_sizes(self, dim, height):
        """Head sizes that are no power of two are as exact as the others."""
        lengths = [65, 10, 128]
        q, k, v = packed(lengths, dim=dim)
        within_budget(run(HERE, q, k, v, lengths), q, k, v, lengths, dim**-0.5)

    @pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
    def test_last_row_of_every_segment(self, length, height):
        """The last row of each segment is computed, from its own segment, whatever its place in a tile."""
        lengths = [length, length, 7]
        q, k, v = packed(lengths, heads=1, kv_heads=1)
        out = run(HERE, q, k, v, lengths)
        last = torch.tensor(prefix_sums(lengths)[1:]) - 1
        torch.testing.assert_close(out.double()[last], reference(q, k, v, lengths, 72**-0.5)[last], atol=4e-3, rtol=0)

    @pytest.mark.parametrize("which", ["q", "k", "v"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_stays_in_its_segment(self, which, value, height):
        """A NaN or an infinity anywhere in a segment changes no bit of the rows of another segment."""
        lengths = [70, 30, 64, 1, 130]
        q, k, v = packed(lengths)
        clean = run(HERE, q, k, v, lengths)
        starts = prefix_sums(lengths)
        for segment in (1, 3):
            own = slice(starts[segment], starts[segment + 1])
            bad = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
            bad[which][own] = value
            out = run(HERE, *bad.values(), lengths)
            if which == "v":  # torch's CPU kernel makes 0 of a row whose scores are all NaN
                assert not out[own].isfinite().any()
            out[own] = clean[own]
            assert torch.equal(out, clean)

    def test_padded_tail_is_zero(self, height):
        """Rows after the last segment are zero, also when they hold NaN, and reach no other row."""
        lengths = [65, 20]
        q, k, v = packed(lengths, tail=150)
        for x in (q, k, v):
            x[85:] = float("nan")
        out = run(HERE, q, k, v, lengths)
        assert torch.equal(out[85:], torch.zeros_like(out[85:]))
        within_budget(out, q, k, v, lengths, 72**-0.5)

    def test_views_of_a_fused_buffer_are_read_in_place(self, height):
        """Views of one QKV buffer give the bits of contiguous tensors; the result is contiguous and new."""
        lengths = [33, 90]
        fused = torch.randn(123, 3, 2, 80, generator=torch.Generator().manual_seed(0)).half()
        before = fused.clone()
        q, k, v = fused.unbind(1)
        out = run(HERE, q, k, v, lengths)
        assert not q.is_contiguous()
        assert out.is_contiguous()
        assert torch.equal(fused, before)
        assert torch.equal(out, run(HERE, *(x.contiguous() for x in (q, k, v)), lengths))

    def test_views_off_the_16_byte_grid(self, height):
        """Addresses and strides that no bulk load can take give the same result."""
        q, k, v = packed([70, 64], shift=1)
        assert q.data_ptr() % 16
        within_budget(run(HERE, q, k, v, [70, 64]), q, k, v, [70, 64], 72**-0.5)

    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_grouped_query_heads(self, kv_heads, height):
        """Query heads share key and value heads in order."""
        q, k, v = packed([70, 64], heads=4, kv_heads=kv_heads)
        within_budget(run(HERE, q, k, v, [70, 64]), q, k, v, [70, 64], 72**-0.5)

    def test_expanded_heads(self, height):
        """Key and value heads that are one head, expanded, are read with their stride of zero."""
        q, k, v = packed([70, 64], heads=2, kv_heads=1)
        k, v = (x.expand(-1, 2, -1) for x in (k, v))
        within_budget(run(HERE, q, k, v, [70, 64]), q, k, v, [70, 64], 72**-0.5)

    @pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
    def test_any_scale(self, scale, height):
        """The scale may be zero, negative or large."""
        q, k, v = packed([70, 64])
        within_budget(run(HERE, q, k, v, [70, 64], scale=scale), q, k, v, [70, 64], scale)

    def test_loose_bounds(self, height):
        """Room for many more segments, and much longer ones, leaves the result as exact."""
        q, k, v = packed([70, 64], tail=60)
        out = run(HERE, q, k, v, [70, 64], spare=1000, longest=5000)
        within_budget(out, q, k, v, [70, 64], 72**-0.5)

    def test_no_rows(self):
        """An empty bucket is an empty result."""
        q, k, v = packed([0])
        assert run(HERE, q, k, v, [0]).shape == (0, 2, 72)
        assert run(HERE, q, k, v, [0], spare=5).shape == (0, 2, 72)

    def test_tensors_that_do_not_belong_together(self):
        """Shapes and strides that a kernel cannot read are refused with what was seen."""
        q, k, v = packed([8])
        with pytest.raises(ValueError, match=r"packed attention of 8 rows got q \[8, 2, 72\], k \[7, 2, 72\]"):
            run(HERE, q, k[:7], v, [8])
        with pytest.raises(ValueError, match="must be equal and divide those of q"):
            run(HERE, q[:, :1], k, v, [8])
        with pytest.raises(ValueError, match="same head size"):
            run(HERE, q[..., :64], k, v, [8])
        with pytest.raises(ValueError, match=r"last axis of q, k and v must be contiguous, got strides \[1, 1, 2\]"):
            run(HERE, q[..., :36], k[..., :36], v[..., ::2], [8])
        with pytest.raises(ValueError, match=r"takes \[rows, heads, head_dim\] tensors, got q \[8, 144\]"):
            run(HERE, q.flatten(1), k, v, [8], scale=1.0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: its interpreter cannot run")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_triton_kernel_in_the_interpreter():
    """The Triton kernel passes `TestEveryKernel`, in both tile heights, in Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-p", "no:cacheprovider", "-o", "addopts="]
    # The interpreter computes with NumPy, which warns of NaN; some releases of it use what NumPy deprecates.
    command += ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning", f"{__file__}::TestEveryKernel"]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert child.returncode == 0, child.stdout + child.stderr
    if " passed" not in child.stdout:
        pytest.skip(next(line for line in child.stdout.splitlines() if line.startswith("SKIPPED")))


class TestMetadata:
    """The tensors that tell a kernel about the segments of a call."""

    BAD = (
        ([], "cu_seqlens must start with 0, got []"),
        ([1, 4], "cu_seqlens must start with 0, got [1, 4]"),
        ([0, 2, 4, 6, 8, 10], "5 segments do not fit into the bucket's bound of 4"),
        ([0, 8, 4, 10], "cu_seqlens decreases from 8 to 4 at index 2"),
        ([0, 1, 10], "segment 1 has 9 rows: the bucket's bound is 8 rows a segment"),
        ([0, 8, 12], "cu_seqlens ends at 12: the bucket has only 10 rows"),
    )

    @pytest.mark.parametrize("name", KERNELS)
    @pytest.mark.parametrize(("cu_seqlens", "text"), BAD)
    def test_what_does_not_fit_is_refused(self, name, cu_seqlens, text):
        """Each way of not fitting the bounds has its own text, with the numbers seen and allowed."""
        with pytest.raises(ValueError) as error:
            KERNELS[name].metadata(cu_seqlens, SegmentBounds(rows=10, segments=4, longest=8))
        assert str(error.value) == text

    @pytest.mark.parametrize("name", ["torch", "flash_attn", "flashinfer", "mem_efficient"])
    def test_kernels_that_leave_rows_unwritten_want_all_covered(self, name):
        """A layout with a padded tail is refused where the tail would stay unwritten."""
        with pytest.raises(ValueError, match=r"ends at 8, the bucket has 10 rows.*add segments that cover the padded"):
            KERNELS[name].metadata([0, 8], SegmentBounds(10, 4, 8))

    def test_negative_bounds(self):
        """Bounds cannot be negative."""
        with pytest.raises(ValueError, match=r"SegmentBounds\.longest is -1: it must be zero or more"):
            SegmentBounds(1, 1, -1)

    @pytest.mark.parametrize("name", KERNELS)
    @given(lengths=st.lists(st.integers(0, 300), max_size=12), spare=st.integers(0, 40), loose=st.integers(0, 300))
    @settings(max_examples=30, deadline=None)
    def test_shape_follows_from_the_bounds(self, name, lengths, spare, loose):
        """Two layouts within the same bounds have metadata of the same shape, int32, on the CPU."""
        bounds = SegmentBounds(sum(lengths), len(lengths) + spare, max(lengths, default=0) + loose)
        kernel = KERNELS[name]
        one = kernel.metadata(prefix_sums(lengths), bounds)
        other = kernel.metadata(prefix_sums(sorted(lengths)), bounds)
        assert one.shape == other.shape
        assert one.dtype == other.dtype == torch.int32
        assert one.device.type == "cpu"

    def test_padded_cu_seqlens(self):
        """Segments that are not there are empty ones at the end."""
        assert KERNELS["torch"].metadata([0, 2, 5], SegmentBounds(5, 4, 3)).tolist() == [0, 2, 5, 5, 5]


class TestTiles:
    """The tile table that drives the Triton kernel."""

    @given(
        lengths=st.lists(st.integers(0, 400), max_size=20),
        tail=st.integers(0, 300),
        spare=st.integers(0, 20),
        loose=st.integers(0, 200),
    )
    @settings(max_examples=150, deadline=None)
    def test_every_row_is_in_exactly_one_tile(self, lengths, tail, spare, loose):
        """In each section the tiles cover each row once, know its segment, and come longest first; the rest is zero."""
        cu = prefix_sums(lengths)
        bounds = SegmentBounds(cu[-1] + tail, len(lengths) + spare, max(lengths, default=0) + loose)
        table = tiles.tile_table(cu, bounds)
        owner = [s for s, n in zip(itertools.pairwise(cu), lengths, strict=True) for _ in range(n)]
        owner += [(cu[-1], cu[-1])] * tail
        for height in tiles.heights(bounds):
            start, room = tiles.section_start(bounds, height), tiles.capacity(bounds, height)
            used, *rest = table[start].tolist()
            assert rest == [0, 0, 0]
            assert used <= room
            section = table[start + 1 : start + 1 + room].tolist()
            assert all(row == [0, 0, 0, 0] for row in section[used:])
            seen = []
            for first, keys, row, end in section[:used]:
                covered = range(row, min(row + height, end))
                assert all(owner[r] == (first, first + keys) for r in covered)
                assert len(covered) > 0
                seen += covered
            assert sorted(seen) == list(range(bounds.rows))
            lengths_in_order = [keys for _, keys, _, _ in section[:used]]
            assert lengths_in_order == sorted(lengths_in_order, reverse=True)

    @pytest.mark.parametrize("height", [64, 128, 192])
    def test_capacity_is_reached(self, height):
        """The capacity is not larger than the worst layout needs."""
        lengths = [1] * 5 + [1 + 3 * height]
        bounds = SegmentBounds(sum(lengths) + 1, 6, 400)
        table = tiles.tile_table(prefix_sums(lengths), bounds)
        assert int(table[tiles.section_start(bounds, height), 0]) == tiles.capacity(bounds, height)

    @given(
        dim=st.integers(2, 16).map(lambda n: 8 * n),
        heads=st.integers(1, 32),
        rows=st.integers(0, 20000),
        longest=st.integers(0, 20000),
        bulk=st.booleans(),
    )
    def test_the_chosen_height_has_a_section(self, dim, heads, rows, longest, bulk):
        """Whatever configuration the kernel takes, the table has the tiles for it."""
        bounds = SegmentBounds(rows, 8, longest)
        assert tile_scheduled.tile_config(dim, heads, bounds, bulk=bulk).block_m in tiles.heights(bounds)
        hopper = tile_scheduled.hopper_config(dim, heads, bounds)
        assert hopper is None or hopper.height in tiles.heights(bounds)

    def test_what_is_loaded_early(self, monkeypatch):
        """Each configuration that launches for some bounds would take is launched once, on few rows, with a table for it."""
        launched, kernel = [], KERNELS["triton"]

        def launch(self, config, bulk, q, k, v, out, metadata, bounds, scale):
            launched.append((config, q.shape[0], metadata.shape[0]))
            assert tiles.section_start(bounds, config.height) < metadata.shape[0]

        monkeypatch.setattr(tile_scheduled, "_is_hopper", lambda tensor: True)
        monkeypatch.setattr(type(kernel), "_launch", launch)
        some = [SegmentBounds(rows, 16, longest) for rows in (256, 1280, 8192, 16384) for longest in (64, 1280, 8192, 16384)]
        kernel.load(*packed([512], heads=16, dim=72, dtype=torch.bfloat16), some, 1.0)
        loaded = [config for config, rows, _ in launched if rows == 512]
        assert len(loaded) == len(set(loaded)) > 3
        launched.clear()
        for bounds in some:
            q, k, v = packed([bounds.rows], heads=16, dim=72, dtype=torch.bfloat16)
            kernel.forward(q, k, v, kernel.metadata([0, 0], bounds), bounds, 1.0)
        assert {config for config, _, _ in launched} == set(loaded)

    @pytest.mark.parametrize("dim", range(16, 136, 8))
    def test_split_head(self, dim):
        """The two widths of a head size cover it, with powers of two from 16 on."""
        d0, d1 = tile_scheduled.split_head(dim)
        assert d0 <= dim <= d0 + d1 < 2 * dim
        assert all(width == 0 or (width >= 16 and width & (width - 1) == 0) for width in (d0, d1))


def eager(q, k, v, cu_seqlens, scale):
    """The steps of transformers' vision attention under sdpa, from packed tensors."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    splits = [torch.split(x.transpose(0, 1).unsqueeze(0), lengths, dim=2) for x in (q, k, v)]
    outputs = [
        F.scaled_dot_product_attention(*part, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2).contiguous()
        for part in zip(*splits, strict=True)
    ]
    return torch.cat(outputs, dim=1)[0]


class TestOperator:
    """``vitcg::varlen_attention``."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize("index", [torch.int32, torch.int64])
    def test_bits_of_eager(self, dtype, kv_heads, index):
        """On the CPU the result is that of the eager tower, bit for bit, and so is the reference kernel's."""
        lengths = [20, 0, 1, 33]
        q, k, v = packed(lengths, heads=4, kv_heads=kv_heads, dtype=dtype)
        cu = torch.tensor(prefix_sums(lengths), dtype=index)
        out = VARLEN_ATTENTION(q, k, v, cu, 0.3)
        assert out.is_contiguous()
        assert torch.equal(out, eager(q, k, v, cu, 0.3))
        assert torch.equal(out, run("sdpa", q, k, v, lengths, scale=0.3))

    def test_default_scale_and_values_of_another_size(self):
        """Without a scale it is that of SDPA; values may be wider than keys."""
        q, k, _ = packed([5, 6], dtype=torch.float32)
        v = torch.randn(11, 2, 40)
        cu = torch.tensor([0, 5, 11])
        assert torch.equal(VARLEN_ATTENTION(q, k, v, cu, None), eager(q, k, v, cu, None))

    @pytest.mark.parametrize("cu_seqlens", [[0, 5, 10], [0, 5, 13], [0]])
    def test_wrong_lengths_raise_what_eager_raises(self, cu_seqlens):
        """Segments that do not add up to the rows, or none at all, raise eager's own error."""
        q, k, v = packed([11], dtype=torch.float32)
        cu = torch.tensor(cu_seqlens)
        with pytest.raises(RuntimeError) as theirs:
            eager(q, k, v, cu, None)
        with pytest.raises(RuntimeError) as ours:
            VARLEN_ATTENTION(q, k, v, cu, None)
        assert str(ours.value) == str(theirs.value)

    def test_arguments_that_make_no_sense(self):
        """Tensors that do not belong together and cu_seqlens that are no indices are refused."""
        q, k, v = packed([8])
        with pytest.raises(TypeError, match=r"cu_seqlens must be a flat tensor of integers, got torch.float32 \[2\]"):
            VARLEN_ATTENTION(q, k, v, torch.tensor([0.0, 8.0]), None)
        with pytest.raises(ValueError, match="packed attention of 8 rows"):
            VARLEN_ATTENTION(q, k[:7], v, torch.tensor([0, 8]), None)

    @pytest.mark.parametrize("kv_heads", [2, 1])
    @pytest.mark.parametrize("scores", [1 << 25, 8])
    def test_gradcheck(self, kv_heads, scores, monkeypatch):
        """First-order gradients are right in float64, also when the scores are recomputed in small parts."""
        monkeypatch.setattr(segments, "_SCORES", scores)
        torch.manual_seed(0)
        q = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
        k = torch.randn(9, kv_heads, 4, dtype=torch.float64, requires_grad=True)
        v = torch.randn(9, kv_heads, 3, dtype=torch.float64, requires_grad=True)
        cu = torch.tensor([0, 4, 4, 5, 9])
        for scale in (None, -0.7):
            assert torch.autograd.gradcheck(lambda q, k, v, s=scale: VARLEN_ATTENTION(q, k, v, cu, s), (q, k, v))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_are_as_exact_as_eager(self, dtype):
        """Gradients are at most twice as far from float64 as those of eager attention."""
        lengths = [20, 0, 1, 33]
        cu = torch.tensor(prefix_sums(lengths))

        def gradients(function, dtype):
            leaves = [x.to(dtype).requires_grad_() for x in packed(lengths, heads=4, kv_heads=2, dtype=torch.bfloat16)]
            out = function(*leaves, cu, None)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            return torch.autograd.grad(out, leaves, weights.to(dtype))

        exact = gradients(eager, torch.float64)
        ours, theirs = gradients(VARLEN_ATTENTION, dtype), gradients(eager, dtype)
        for x, y, z in zip(ours, theirs, exact, strict=True):
            assert x.dtype == dtype
            assert (x - z).norm() <= 2 * (y - z).norm()

    def test_second_order_gradients_are_refused(self):
        """A gradient of a gradient raises instead of being wrong."""
        q, k, v = (x.requires_grad_() for x in packed([6], dtype=torch.float32))
        (dq,) = torch.autograd.grad(VARLEN_ATTENTION(q, k, v, torch.tensor([0, 6]), None).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="first-order gradients only"):
            dq.sum().backward()

    def test_opcheck(self):
        """Schema, fake implementations, autograd registration and dynamic AOTAutograd pass torch's own checks."""
        cu = torch.tensor([0, 5, 5, 11])
        for grad in (False, True):
            q, k, v = (x.requires_grad_(grad) for x in packed([5, 0, 6], heads=4, kv_heads=2, dtype=torch.float32))
            torch.library.opcheck(VARLEN_ATTENTION, (q, k, v, cu, None))
            torch.library.opcheck(VARLEN_ATTENTION, (q, k, v, cu, 0.5, 6))
        q, k, v = packed([5, 0, 6], heads=4, kv_heads=2, dtype=torch.float32)
        torch.library.opcheck(VARLEN_ATTENTION_BACKWARD, (torch.randn(q.shape), q, k, v, cu, None))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_autocast_casts_as_eager_does(self, dtype):
        """Under autocast the inputs are cast as those of SDPA are, values and gradients included."""
        lengths = [20, 33]
        cu = torch.tensor(prefix_sums(lengths))
        results = []
        for function in (eager, VARLEN_ATTENTION):
            leaves = [x.requires_grad_() for x in packed(lengths, dtype=dtype)]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = function(*leaves, cu, None)
            results.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
        (theirs, *_), (ours, *gradients) = results
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert all(x.dtype == dtype for x in gradients)

    def test_backward_inside_autocast_keeps_its_precision(self):
        """The recomputed scores are float32 also when backward is called under autocast."""
        q, k, v = (x.requires_grad_() for x in packed([20], dtype=torch.float32))
        out = VARLEN_ATTENTION(q, k, v, torch.tensor([0, 20]), None)
        expected = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(inside, expected, strict=True))

    @pytest.mark.parametrize("autocast", [False, True])
    def test_compiles_once_for_any_rows_with_gradients(self, autocast):
        """With a symbolic row count it is one graph for every layout, with the results and gradients of eager calls."""
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(VARLEN_ATTENTION, backend=counter, fullgraph=True, dynamic=True)
        for lengths in ([5, 6], [7, 20], [31, 9]):
            cu = torch.tensor(prefix_sums(lengths))
            leaves = [x.detach().requires_grad_() for x in packed(lengths, dtype=torch.float32)]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                out, expected = compiled(*leaves, cu, None), VARLEN_ATTENTION(*leaves, cu, None)
            assert torch.equal(out, expected)
            ours, theirs = (torch.autograd.grad(x.float().sum(), leaves) for x in (out, expected))
            assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
        assert counter.frame_count == 1

    def test_rows_that_nobody_knows(self):
        """q, k and v may be traced with three different unknown sizes: they are compared when the graph runs."""
        q, k, v = packed([5, 6], dtype=torch.float32)
        cu = torch.tensor([0, 5, 11])
        for x in (q, k, v):
            torch._dynamo.decorators.mark_unbacked(x, 0)
        compiled = torch.compile(VARLEN_ATTENTION, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v, cu, None), eager(q, k, v, cu, None))


class TestChoice:
    """Which kernel runs where."""

    def test_auto_on_the_cpu(self):
        """Without a GPU the reference kernel is chosen."""
        assert choose("auto", torch.device("cpu"), torch.float32, 72).name == "sdpa"
        assert choose("sdpa", "cpu", torch.bfloat16, 13).name == "sdpa"

    @pytest.mark.parametrize("name", ["triton", "torch", "flash_attn", "flashinfer", "mem_efficient"])
    def test_a_kernel_that_cannot_run_is_an_error(self, name):
        """Asked for by name, a kernel that cannot run says why and what can."""
        with pytest.raises(
            AttentionUnavailable, match=f"attention='{name}' cannot run on cpu.*not cpu. Usable here: auto, sdpa"
        ):
            choose(name, torch.device("cpu"), torch.bfloat16, 72)

    def test_unknown_name(self):
        """A name that no kernel has is answered with the names that there are."""
        with pytest.raises(
            AttentionUnavailable, match="no such kernel, only triton, torch, flash_attn, flashinfer, mem_efficient"
        ):
            choose("cudnn", torch.device("cpu"), torch.float32, 72)

    def test_nothing_is_usable(self):
        """For a dtype that no kernel takes, every reason is given."""
        with pytest.raises(
            AttentionUnavailable, match=r"triton: .*; sdpa: attention needs a floating-point.* Usable here: none"
        ):
            choose("auto", torch.device("cpu"), torch.int8, 72)

    def test_import_needs_no_triton(self):
        """The package is imported, and a kernel chosen, without importing triton."""
        code = (
            "import sys; sys.modules['triton'] = None\n"
            "from vitcg_backend.attention import choose, op\n"
            "print(choose('auto', 'cpu', __import__('torch').float32, 64).name)"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
        assert child.stdout.strip() == "sdpa", child.stderr

    def test_every_kernel_is_called_by_its_name(self):
        """The keys are the kernels' names, in the order of preference."""
        assert list(KERNELS) == ["triton", "torch", "flash_attn", "flashinfer", "mem_efficient", "sdpa"]
        assert all(kernel.name == name for name, kernel in KERNELS.items())
