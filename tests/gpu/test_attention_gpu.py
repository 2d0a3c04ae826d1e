"""Packed attention on a GPU: every kernel against float64, CUDA graph capture and replay, no wait for the device."""

import contextlib
import itertools
import json
from typing import ClassVar

import pytest
import torch

from vitcg_backend.attention import (
    KERNELS,
    AttentionShape,
    SegmentBounds,
    choose,
    choose_for,
    flashinfer_cudnn,
    measured,
    segments,
    tile_scheduled,
)
from vitcg_backend.attention.measured import MeasuredChoice
from vitcg_backend.attention.op import VARLEN_ATTENTION

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "8x256": [256] * 8,
    "8x784": [784] * 8,
    "1x4096": [4096],
    "64x64": [64] * 64,
    "mixed": [1, 700, 63, 0, 64, 65, 1500, 0, 127, 3, 129, 300, 2],
}
HEADS = 4


def prefix_sums(lengths):
    return list(itertools.accumulate(lengths, initial=0))


def packed(lengths, *, heads=HEADS, kv_heads=None, dim=72, dtype=torch.bfloat16, seed=0):
    """q, k and v as views of one fused buffer on the GPU."""
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator("cuda").manual_seed(seed)
    buffer = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator, device="cuda").to(dtype)
    return buffer.split([heads, kv_heads, kv_heads], dim=1)


def reference(q, k, v, lengths):
    """float64, written out, one segment and head at a time."""
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for start, end in itertools.pairwise(prefix_sums(lengths)):
        for head in range(q.shape[1]):
            q_, k_, v_ = (x[start:end].double() for x in (q[:, head], k[:, head // groups], v[:, head // groups]))
            out[start:end, head] = (q_ @ k_.T * q.shape[2] ** -0.5).softmax(-1) @ v_
    return out


def within_budget(out, q, k, v, lengths):
    """The error against float64 is at most twice that of per-segment SDPA in the same dtype."""
    exact = reference(q, k, v, lengths)
    eager = segments.attention_by_segment(q, k, v, torch.tensor(prefix_sums(lengths)), None)
    assert out.isfinite().all()
    assert (out - exact).norm() <= 2 * (eager - exact).norm()
    assert (out - exact).abs().max() <= 4 * (eager - exact).abs().max()


def usable(name, dtype, dim, *, capturable=False):
    kernel = KERNELS[name]
    if capturable and not kernel.capturable:
        pytest.skip(f"{name} cannot be captured")
    reason = kernel.unusable(torch.device("cuda"), dtype, dim)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return kernel


def bounds_of(lengths, *, spare=0, longest=None):
    return SegmentBounds(sum(lengths), len(lengths) + spare, max(lengths) if longest is None else longest)


def run(kernel, q, k, v, lengths, bounds):
    metadata = kernel.metadata(prefix_sums(lengths), bounds).cuda()
    return kernel.forward(q, k, v, metadata, bounds, q.shape[2] ** -0.5)


@contextlib.contextmanager
def no_wait():
    """Waiting for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["triton", "triton, full launch", "torch", "flash_attn", "flashinfer", "mem_efficient", "sdpa"])
def name(request, monkeypatch):
    """Each kernel; ours also in the configuration for a launch that fills the GPU, in spite of a test's few heads."""
    kernel, _, full = request.param.partition(", ")
    if full:
        monkeypatch.setattr(tile_scheduled, "_PROGRAMS", 0)
    return kernel


@pytest.fixture(params=["few programs", "full launch"])
def full_launch(request, monkeypatch):
    """The two configurations of our kernel alone."""
    if request.param == "full launch":
        monkeypatch.setattr(tile_scheduled, "_PROGRAMS", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [64, 72, 80, 88, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_is_at_most_twice_that_of_eager(name, dtype, dim, layout):
    """Each kernel is as exact as eager attention, with tight bounds and with room for 1,000 more segments."""
    kernel = usable(name, dtype, dim)
    lengths = LAYOUTS[layout]
    q, k, v = packed(lengths, dim=dim, dtype=dtype)
    for bounds in (bounds_of(lengths), bounds_of(lengths, spare=1000)):
        within_budget(run(kernel, q, k, v, lengths, bounds), q, k, v, lengths)


@pytest.mark.parametrize("dim", [16, 24, 40, 56, 104, 112, 120])
def test_other_head_sizes_in_triton(dim, full_launch):
    """Head sizes off the usual ones are as exact."""
    kernel = usable("triton", torch.bfloat16, dim)
    q, k, v = packed([300, 64, 17], dim=dim)
    within_budget(run(kernel, q, k, v, [300, 64, 17], bounds_of([300, 64, 17])), q, k, v, [300, 64, 17])


def test_float32(name):
    """In float32 the kernels that take it are as exact as eager attention; "auto" finds one that can be captured."""
    assert choose("auto", "cuda", torch.float32, 72).name == "mem_efficient"
    kernel = usable(name, torch.float32, 72)
    lengths = LAYOUTS["mixed"]
    q, k, v = packed(lengths, dtype=torch.float32)
    within_budget(run(kernel, q, k, v, lengths, bounds_of(lengths)), q, k, v, lengths)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(name, kv_heads):
    """Query heads share key and value heads in order, also where every segment is one row."""
    kernel = usable(name, torch.bfloat16, 72)
    for lengths in (LAYOUTS["mixed"], [1] * 40):
        q, k, v = packed(lengths, kv_heads=kv_heads)
        within_budget(run(kernel, q, k, v, lengths, bounds_of(lengths, spare=50)), q, k, v, lengths)


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_nan_stays_in_its_segment(name, which):
    """A NaN anywhere in one segment changes no bit of the rows of another."""
    kernel = usable(name, torch.bfloat16, 72)
    lengths = [300, 40, 64, 1, 200]
    inputs = packed(lengths)
    bounds = bounds_of(lengths)
    clean = run(kernel, *inputs, lengths, bounds)
    for start, end in ((300, 340), (404, 405)):
        bad = [x.clone() for x in inputs]
        bad[which][start:end] = float("nan")
        out = run(kernel, *bad, lengths, bounds)
        out[start:end] = clean[start:end]
        assert torch.equal(out, clean)


def test_padded_tail_is_zero(full_launch):
    """Rows after the last segment are zero, also when they hold NaN."""
    kernel = usable("triton", torch.bfloat16, 72)
    inputs = packed([300, 212])
    for x in inputs:
        x[300:] = float("nan")
    out = run(kernel, *inputs, [300], SegmentBounds(512, 5, 400))
    assert not out[300:].any()
    within_budget(out[:300], *(x[:300] for x in inputs), [300])


def test_views_that_no_bulk_load_takes(full_launch):
    """Views off the 16-byte grid, and expanded heads, go through plain loads and are as exact."""
    kernel = usable("triton", torch.bfloat16, 72)
    lengths = [300, 64, 17]
    buffer = torch.randn(381, 3 * HEADS * 72 + 1, device="cuda").bfloat16()[:, 1:]
    shifted = buffer.unflatten(1, (3, HEADS, 72)).unbind(1)
    q, k, v = packed(lengths, kv_heads=1)
    for inputs in (shifted, (q, k.expand(-1, HEADS, -1), v.expand(-1, HEADS, -1))):
        within_budget(run(kernel, *inputs, lengths, bounds_of(lengths)), *inputs, lengths)


def test_replay_with_other_segments(name):
    """One capture serves every layout within its bounds, through the content of the metadata alone."""
    kernel = usable(name, torch.bfloat16, 72, capturable=True)
    layouts = ([1024] * 2, [64] * 32, [1000, 3, 0, 45, 1000], [1] * 24 + [1000, 1024])
    bounds = SegmentBounds(2048, 1000, 1024)
    q, k, v = (x.clone() for x in packed([2048]))
    metadata = kernel.metadata(prefix_sums(layouts[0]), bounds).cuda()
    kernel.forward(q, k, v, metadata, bounds, 72**-0.5)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = kernel.forward(q, k, v, metadata, bounds, 72**-0.5)
    for seed, lengths in enumerate(layouts):
        fresh = packed(lengths, seed=seed)
        for static, value in zip((q, k, v), fresh, strict=True):
            static.copy_(value)
        metadata.copy_(kernel.metadata(prefix_sums(lengths), bounds))
        out.fill_(float("nan"))
        graph.replay()
        within_budget(out, *fresh, lengths)


def test_what_is_loaded_early_is_not_compiled_again(monkeypatch):
    """After `load` a launch for such bounds, from another fused buffer, compiles nothing."""
    usable("triton", torch.bfloat16, 72)
    from triton.runtime.jit import JITFunction

    kernel, compiled, compile_ = KERNELS["triton"], [], JITFunction._do_compile
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, *args: compiled.append(args[0]) or compile_(self, *args))
    some = [SegmentBounds(rows, 64, rows) for rows in (1024, 4096, 12288)]
    kernel.load(*packed([512]), some, 72**-0.5)
    compiled.clear()
    for bounds in some:
        q, k, v = packed([bounds.rows])
        out = kernel.forward(q, k, v, kernel.metadata([0, bounds.rows], bounds).cuda(), bounds, 72**-0.5)
        assert out.isfinite().all()
    assert not compiled


HOPPER = [tile_scheduled._HOPPER_SMALL, tile_scheduled._HOPPER_TALL, tile_scheduled._HOPPER_THREE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("config", HOPPER, ids=lambda config: f"{config.consumers}x{config.rows}")
def test_hopper_configurations(monkeypatch, config, dim, dtype):
    """Each configuration is exact, stays in its segments whatever lies beside them, and zeroes the padded tail."""
    usable("triton", dtype, dim)
    if not tile_scheduled._is_hopper(torch.empty(0, device="cuda")):
        pytest.skip("not a Hopper GPU with the triton that the kernel is written for")
    monkeypatch.setattr(tile_scheduled, "hopper_config", lambda *_: config)
    lengths, rows = LAYOUTS["mixed"] + [192, 193, 191, 384], 100
    for kv_heads in (HEADS, 2):
        q, k, v = (x.clone() for x in packed([*lengths, rows], kv_heads=kv_heads, dim=dim, dtype=dtype))
        cu = prefix_sums(lengths)
        spoilt = [(cu[i], cu[i + 1]) for i in (2, 9, 13)] + [(cu[-1], cu[-1] + rows)]
        for start, end in spoilt:
            for x in (q, k, v):
                x[start:end] = float("nan")
        bounds = SegmentBounds(cu[-1] + rows, len(lengths) + 1000, 2000)
        kernel = KERNELS["triton"]
        metadata = kernel.metadata(cu, bounds).cuda()
        out = kernel.forward(q, k, v, metadata, bounds, dim**-0.5)
        for start, end in spoilt[:-1]:
            assert out[start:end].isnan().all()
            out[start:end] = 0
            for x in (q, k, v):
                x[start:end] = 0
        assert (out[cu[-1] :] == 0).all()
        within_budget(out[: cu[-1]], q[: cu[-1]], k[: cu[-1]], v[: cu[-1]], lengths)


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("layout", ["1x256", "20x400", "8x784", "1x4096", "1x9000"])
def test_hopper_as_chosen(layout, dim):
    """What is chosen for segments of each length, sixteen heads, replayed, is exact."""
    kernel = usable("triton", torch.bfloat16, dim)
    count, length = map(int, layout.split("x"))
    lengths = [length] * count
    q, k, v = packed(lengths, heads=16, dim=dim)
    bounds = SegmentBounds(sum(lengths), count, length)
    metadata = kernel.metadata(prefix_sums(lengths), bounds).cuda()
    out = kernel.forward(q, k, v, metadata, bounds, dim**-0.5)
    exact = segments.attention_by_segment(q.float(), k.float(), v.float(), torch.tensor(prefix_sums(lengths)), None)
    eager = segments.attention_by_segment(q, k, v, torch.tensor(prefix_sums(lengths)), None)
    assert (out - exact).norm() <= 2 * (eager - exact).norm()
    for _ in range(20):  # a missing barrier shows now and then
        assert torch.equal(out, kernel.forward(q, k, v, metadata, bounds, dim**-0.5))


def test_forward_does_not_wait_for_the_device(name):
    """`forward` never synchronises, captured or not."""
    kernel = usable(name, torch.bfloat16, 72, capturable=True)
    lengths = LAYOUTS["mixed"]
    q, k, v = packed(lengths)
    bounds = bounds_of(lengths)
    metadata = kernel.metadata(prefix_sums(lengths), bounds).cuda()
    kernel.forward(q, k, v, metadata, bounds, 72**-0.5)
    with no_wait():
        out = kernel.forward(q, k, v, metadata, bounds, 72**-0.5)
    within_budget(out, q, k, v, lengths)


@pytest.mark.parametrize("name", ["triton", "torch", "flash_attn", "flashinfer"])
def test_no_copy_of_the_inputs(name):
    """Reading views of a fused buffer allocates the output and nothing else of its size, but for cuDNN's workspace."""
    kernel = usable(name, torch.bfloat16, 72)
    q, k, v = packed([4096], heads=16)
    bounds = bounds_of([4096])
    metadata = kernel.metadata([0, 4096], bounds).cuda()
    kernel.forward(q, k, v, metadata, bounds, 72**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = kernel.forward(q, k, v, metadata, bounds, 72**-0.5)
    workspace = flashinfer_cudnn._WORKSPACE if name == "flashinfer" else 0
    assert torch.cuda.max_memory_allocated() - before < 2 * out.nbytes + workspace


SEGMENTS = {
    "padded rows are a segment": [300, 64, 148],
    "empty segments": [0, 40, 0, 0, 65, 0],
    "one long beside many short": [3] * 60 + [2000] + [2] * 80,
    "last rows": [1, 63, 64, 65, 127, 128, 129, 191, 193],
}


@pytest.mark.parametrize("layout", SEGMENTS)
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_every_row_is_written_by_its_own_segment(name, layout, dim):
    """Whatever unwritten memory holds, each row is attention over its own segment, the last of each segment by itself too."""
    kernel = usable(name, torch.bfloat16, dim)
    lengths = SEGMENTS[layout]
    q, k, v = packed(lengths, dim=dim)
    exact, last = reference(q, k, v, lengths), [end - 1 for end in prefix_sums(lengths)[1:]]
    eager = segments.attention_by_segment(q, k, v, torch.tensor(prefix_sums(lengths)), None)
    for spare in (0, 100):
        for _ in range(2):  # the first run may allocate other memory, for what it compiles or plans
            torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
            out = run(kernel, q, k, v, lengths, bounds_of(lengths, spare=spare))
        within_budget(out, q, k, v, lengths)
        worst = (eager - exact).norm(dim=-1).max()
        assert ((out - exact)[last].norm(dim=-1) <= 4 * worst).all()


def test_auto_prefers_the_tile_scheduled_kernel():
    """Our kernel is taken in half precision, and torch's where the head size is too large for it."""
    usable("triton", torch.bfloat16, 72)
    assert choose("auto", "cuda", torch.bfloat16, 72).name == "triton"
    assert choose("auto", "cuda", torch.bfloat16, 160).name == "torch"
    assert choose("auto", "cuda", torch.float64, 72).name == "sdpa"


class TestMeasured:
    """`auto` by measurement."""

    SHAPES: ClassVar = {0: [AttentionShape(torch.device("cuda"), torch.bfloat16, 16, 16, 72, 72)]}
    BOUNDS: ClassVar = [(256, 1, 256), (2048, 8, 256), (4096, 64, 64), (6272, 8, 784), (16384, 1, 16384)]

    def test_every_usable_kernel_is_right_and_timed(self, tmp_path):
        """Each usable kernel passes the comparison in each class, the fastest is chosen, and kept for the next process."""
        auto = choose_for("auto", self.SHAPES)
        assert isinstance(auto, MeasuredChoice)
        names = [n for n, kernel in auto.kernels.items() if kernel.unusable(torch.device("cuda"), torch.bfloat16, 72) is None]
        chosen = MeasuredChoice(list(auto.kernels.values()), self.SHAPES, tmp_path)
        found = {bounds: chosen.at(0, SegmentBounds(*bounds), measure=True).name for bounds in self.BOUNDS}
        (file,) = tmp_path.iterdir()
        kept = json.loads(file.read_text())["choices"]
        assert [sorted(choice["us"]) for choice in kept.values()] == [sorted(names)] * len(self.BOUNDS)
        for choice in kept.values():
            best = min(choice["us"].values())
            assert choice["us"][choice["kernel"]] <= best + max(measured.CLOSE_MARGIN * best, measured.CLOSE_GAIN * 1e6) + 0.01
        again = MeasuredChoice(list(auto.kernels.values()), self.SHAPES, tmp_path)
        assert {bounds: again.at(0, SegmentBounds(*bounds), measure=False).name for bounds in self.BOUNDS} == found

    def test_times_are_those_of_the_device(self):
        """A launch that the device has done long before the host is ready for the next is not timed as the host."""
        shape = self.SHAPES[0][0]
        seconds = measured._times([KERNELS["torch"]], shape, SegmentBounds(256, 1, 256))["torch"]
        assert seconds < 50e-6

    def test_nothing_is_measured_during_a_capture(self, tmp_path):
        """While the stream is captured the first kernel serves."""
        auto = choose_for("auto", self.SHAPES)
        chosen = MeasuredChoice(list(auto.kernels.values()), self.SHAPES, tmp_path)
        x = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x += 1
            assert chosen.at(0, SegmentBounds(256, 1, 256), measure=True) is chosen.default
        assert not list(tmp_path.iterdir())


class TestOperator:
    """``vitcg::varlen_attention`` on the GPU."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize("longest", [None, 1500])
    def test_error_is_at_most_twice_that_of_eager(self, dtype, kv_heads, longest):
        """It is as exact as eager attention in every dtype."""
        lengths = LAYOUTS["mixed"]
        q, k, v = packed(lengths, kv_heads=kv_heads, dtype=dtype)
        cu = torch.tensor(prefix_sums(lengths), device="cuda")
        out = VARLEN_ATTENTION(q, k, v, cu, None, longest)
        assert out.is_contiguous()
        if dtype == torch.float64:
            torch.testing.assert_close(out, reference(q, k, v, lengths))
        else:
            within_budget(out, q, k, v, lengths)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("index", [torch.int32, torch.int64])
    def test_it_does_not_wait_for_the_device(self, dtype, index):
        """Who knows the longest segment knows the lengths: nothing is read back."""
        q, k, v = packed([300, 64], dtype=dtype)
        cu = torch.tensor([0, 300, 364], device="cuda", dtype=index)
        expected = VARLEN_ATTENTION(q, k, v, cu, None)
        with no_wait():
            out = VARLEN_ATTENTION(q, k, v, cu, None, 300)
        within_budget(out, q, k, v, [300, 64])
        within_budget(expected, q, k, v, [300, 64])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_gradients_are_as_exact_as_eager(self, dtype, kv_heads):
        """Gradients are at most twice as far from float64 as those of eager attention."""
        lengths = [300, 0, 64, 17]
        cu = torch.tensor(prefix_sums(lengths), device="cuda")
        weights = torch.randn(381, HEADS, 72, device="cuda").bfloat16()

        def gradients(function, dtype):
            inputs = packed(lengths, kv_heads=kv_heads, dtype=torch.bfloat16)
            leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
            return torch.autograd.grad(function(*leaves, cu, None), leaves, weights.to(dtype))

        exact = gradients(segments.attention_by_segment, torch.float64)
        ours, theirs = gradients(VARLEN_ATTENTION, dtype), gradients(segments.attention_by_segment, dtype)
        for x, y, z in zip(ours, theirs, exact, strict=True):
            assert x.dtype == dtype
            assert (x - z).norm() <= 2 * (y - z).norm()

    def test_autocast(self):
        """Under autocast float32 inputs run in its dtype, float64 ones stay."""
        q, k, v = packed([300, 64], dtype=torch.float32)
        cu = torch.tensor([0, 300, 364], device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = VARLEN_ATTENTION(q, k, v, cu, None)
            assert VARLEN_ATTENTION(q.double(), k.double(), v.double(), cu, None).dtype == torch.float64
        assert torch.equal(out, VARLEN_ATTENTION(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu, None))

    def test_opcheck(self):
        """Torch's own checks of the registration pass."""
        q, k, v = (x.detach().clone().requires_grad_() for x in packed([30, 64], dtype=torch.bfloat16))
        torch.library.opcheck(VARLEN_ATTENTION, (q, k, v, torch.tensor([0, 30, 94], device="cuda"), None))
