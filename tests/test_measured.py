"""``attention="auto"`` by measurement, with kernels and clocks of the tests' own: what is chosen, when, and what is kept."""

import concurrent.futures
import inspect
import json
import math
import threading
from collections import Counter

import pytest
import torch
from common import DEVICE, assert_same, compile_tower, run, stats, tiny_tower

import vitcg_backend
from vitcg_backend import backend
from vitcg_backend.attention import AttentionShape, SegmentBounds, choose_for, measured
from vitcg_backend.attention.measured import MeasuredChoice, agrees, even_segments, size_class
from vitcg_backend.attention.segments import SdpaKernel
from vitcg_backend.kept_choices import KeptChoices, environment

CPU = torch.device("cpu")
SHAPES = {0: [AttentionShape(CPU, torch.float32, 2, 1, 16, 16)]}
BOUNDS = SegmentBounds(100, 5, 40)


class Named(SdpaKernel):
    """The reference kernel under another name, with its launches counted, and `wrong` applied to its results."""

    def __init__(self, name, *, wrong=None, reason=None, needs_longest=False):
        self.name, self.wrong, self.reason, self.needs_longest, self.launches = name, wrong, reason, needs_longest, 0

    def unusable(self, device, dtype, head_dim):
        """What the test says."""
        return self.reason

    def forward(self, q, k, v, metadata, bounds, scale):
        """As the reference, then `wrong`."""
        self.launches += 1
        out = super().forward(q, k, v, metadata, bounds, scale)
        return out if self.wrong is None else self.wrong(out)


@pytest.fixture
def clock(monkeypatch):
    """Seconds by the name of a kernel, instead of a clock; `clock.asked` counts the measurements."""

    class Clock(dict):
        asked = 0

        def seconds(self, runs, device):
            self.asked += 1
            return [self[inspect.getclosurevars(run).nonlocals["kernel"].name] for run in runs]

    made = Clock(a=3.0, b=2.0, c=1.0)
    monkeypatch.setattr(measured, "seconds", made.seconds)
    return made


def choice(tmp_path, *kernels):
    return MeasuredChoice(kernels or (Named("a"), Named("b")), SHAPES, tmp_path)


def at(chosen, bounds=BOUNDS, *, measure=True, segments=0):
    return chosen.at(segments, bounds, measure=measure).name


class TestChoice:
    """Which kernel serves."""

    def test_the_fastest(self, clock, tmp_path):
        """The kernel with the least time is chosen."""
        assert at(choice(tmp_path, Named("a"), Named("b"), Named("c"))) == "c"

    def test_once_for_a_size_class(self, clock, tmp_path):
        """Bounds that round up to the same powers of two are measured once, others by themselves."""
        chosen = choice(tmp_path)
        for bounds in (BOUNDS, SegmentBounds(128, 8, 64), SegmentBounds(65, 5, 33)):
            assert at(chosen, bounds) == "b"
        assert clock.asked == 1
        for number, bounds in enumerate([SegmentBounds(129, 5, 40), SegmentBounds(100, 4, 40), SegmentBounds(100, 5, 65)]):
            at(chosen, bounds)
            assert clock.asked == number + 2

    def test_first_one_wins_close_ones(self, clock, tmp_path):
        """Another kernel than the first has to be faster by more than the margin."""
        clock["b"] = clock["a"] / (1 + 0.99 * measured.MARGIN)
        assert at(choice(tmp_path / "close")) == "a"
        clock["b"] = clock["a"] / (1 + 1.01 * measured.MARGIN)
        assert at(choice(tmp_path / "clear")) == "b"
        clock.update(a=5e-6, b=5e-6 - 0.9 * measured.LEAST_GAIN)
        assert at(choice(tmp_path / "short")) == "a"

    def test_close_bounds_have_to_be_worth_it(self, clock, tmp_path):
        """A kernel that wants close bounds has to be faster by more where the first does not; not where the first does, too."""
        for name, first, worth in (("wide", False, 1 + measured.CLOSE_MARGIN), ("close", True, 1 + measured.MARGIN)):
            for factor, expected in ((0.99, "a"), (1.01, "b")):
                chosen = choice(tmp_path / f"{name}{factor}")
                chosen.kernels["a"].needs_longest, chosen.kernels["b"].needs_longest = first, True
                clock["b"] = clock["a"] / (worth * factor)
                assert at(chosen) == expected

    def test_shared_captures_take_the_first(self, clock, tmp_path):
        """What other layouts are to use is captured in a kernel for wide bounds, whatever is faster, unmeasured."""
        clock["b"] = clock["a"] / 10
        chosen = choice(tmp_path)
        assert chosen.at(0, BOUNDS, measure=True, shared=True).name == "a"
        assert clock.asked == 0
        assert at(chosen) == "b"
        assert chosen.at(0, BOUNDS, measure=True, shared=True).name == "a"
        chosen.default.needs_longest = True
        assert chosen.at(0, BOUNDS, measure=True, shared=True).name == "b"

    def test_nothing_is_measured_where_it_must_not_be(self, clock, tmp_path):
        """Without leave to measure the first kernel serves, what was measured before excepted; nothing is kept."""
        chosen = choice(tmp_path)
        assert at(chosen, measure=False) == "a"
        assert clock.asked == 0
        assert at(chosen) == "b"
        assert at(chosen, measure=False) == "b"

    def test_nothing_is_measured_during_a_capture(self, clock, tmp_path, monkeypatch):
        """While the stream is being captured the first kernel serves."""
        shapes = {0: [AttentionShape(torch.device("cuda"), torch.float16, 2, 1, 16, 16)]}
        monkeypatch.setattr(measured, "environment", lambda device: {})
        monkeypatch.setattr(MeasuredChoice, "_measured", lambda *_: {"a": 2.0, "b": 1.0})
        chosen = MeasuredChoice([Named("a"), Named("b")], shapes, tmp_path)
        for capturing, name in ((True, "a"), (False, "b"), (True, "b")):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
            assert at(chosen) == name

    def test_one_usable_kernel_needs_no_clock(self, clock, tmp_path):
        """Where no other kernel can run, nothing is run and no file is written."""
        one = Named("a")
        assert at(choice(tmp_path, one, Named("b", reason="not here"))) == "a"
        assert (clock.asked, one.launches, list(tmp_path.iterdir())) == (0, 0, [])

    def test_times_of_all_calls_count(self, clock, tmp_path):
        """Calls of several kinds over the same segments are served by one kernel, the fastest in sum."""
        shapes = {0: [*SHAPES[0], AttentionShape(CPU, torch.float32, 4, 4, 8, 8)]}
        assert at(MeasuredChoice([Named("a"), Named("b")], shapes, tmp_path)) == "b"
        assert clock.asked == 2

    def test_a_named_kernel_is_never_measured(self, clock):
        """By name, and without a GPU, a kernel serves whatever the bounds, without a measurement."""
        for name in ("sdpa", "auto"):
            chosen = choose_for(name, SHAPES)
            assert at(chosen) == "sdpa"
            assert isinstance(chosen, SdpaKernel)
        assert clock.asked == 0

    def test_out_of_memory(self, clock, tmp_path, monkeypatch):
        """A device without room for a measurement costs nothing: the first kernel serves, and nothing is kept."""

        def full(*_):
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(measured, "_inputs", full)
        chosen = choice(tmp_path)
        assert at(chosen) == at(chosen) == "a"
        assert not list(tmp_path.iterdir())

    def test_random_numbers_are_left_alone(self, tmp_path):
        """A measurement draws nothing from the caller's generator."""
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        at(choice(tmp_path))
        assert torch.equal(torch.rand(3), expected)


class TestStart:
    """Candidates run once in a thread, before anything is measured."""

    def test_each_candidate_once(self, clock, tmp_path):
        """Those that can run there, whatever becomes of one; the measurement comes after them, nothing is kept before it."""
        kernels = Named("a"), Named("b", wrong=raises), Named("c"), Named("d", reason="not here")
        chosen = choice(tmp_path, *kernels)
        chosen.start({0: BOUNDS})
        chosen.start({0: BOUNDS})
        chosen._early.join()
        assert [kernel.launches for kernel in kernels] == [1, 1, 1, 0]
        assert not list(tmp_path.iterdir())
        assert at(chosen) == "c"

    def test_a_measurement_waits(self, clock, tmp_path, monkeypatch):
        """No kernel is timed while the thread runs another one."""
        began, go = threading.Event(), threading.Event()

        def slow(out):
            if threading.current_thread().name == "vitcg-attention":
                began.set()
                assert go.wait(60)
            return out

        chosen = choice(tmp_path, Named("a", wrong=slow), Named("b"))
        chosen.start({0: BOUNDS})
        assert began.wait(60)
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            found = other.submit(at, chosen)
            with pytest.raises(concurrent.futures.TimeoutError):
                found.result(0.2)
            assert clock.asked == 0
            go.set()
            assert found.result(60) == "b"

    def test_nothing_for_what_is_known(self, clock, tmp_path):
        """A choice that was kept needs no candidate."""
        at(choice(tmp_path))
        kernels = Named("a"), Named("b")
        chosen = choice(tmp_path, *kernels)
        chosen.start({0: BOUNDS})
        assert chosen._early is None
        assert at(chosen) == "b"

    def test_no_room(self, clock, tmp_path, monkeypatch):
        """Out of memory in the thread costs nothing."""

        def full(*_):
            raise torch.OutOfMemoryError("full")

        chosen = choice(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(measured, "_inputs", full)
            chosen.start({0: BOUNDS})
            chosen._early.join()
        assert at(chosen) == "b"

    def test_what_captures_to_come_need(self, clock, tmp_path, monkeypatch):
        """The first candidate is compiled for them after all have been run, and no measurement waits for that."""
        began, go, later = threading.Event(), threading.Event(), {0: [SegmentBounds(4096, 16, 4096)]}

        def load(self, q, k, v, bounds, scale):
            loaded.append((self.name, q.shape[0], bounds))
            began.set()
            assert go.wait(60)

        loaded = []
        kernels = Named("a"), Named("b")
        monkeypatch.setattr(Named, "load", load)
        chosen = choice(tmp_path, *kernels)
        chosen.start({0: BOUNDS}, later)
        assert began.wait(60)
        assert [kernel.launches for kernel in kernels] == [1, 1]
        assert at(chosen) == "b"
        go.set()
        chosen._early.join()
        assert loaded == [("a", measured._FEW_ROWS, later[0])]

    @pytest.mark.skipif(DEVICE != "cpu", reason="the kernels of this test run on the CPU")
    def test_segments_of_the_first_call(self, tmp_path, monkeypatch):
        """The thread gets the segments of the call that is compiled for, windows and frames, before a piece is compiled."""
        started, kernels = [], [Named("a"), Named("b")]
        monkeypatch.setattr(MeasuredChoice, "start", lambda self, *bounds: started.append((*bounds, backend._cache.compiled)))
        monkeypatch.setattr(backend, "choose_for", lambda name, shapes: MeasuredChoice(kernels, shapes, tmp_path))
        tower, compiled = tiny_tower("qwen2_5_vl"), backend._cache.compiled
        assert_same(compile_tower(tower, token_budgets=[64, 512]), tower, ((2, 8, 8), (1, 4, 8)))
        ((bounds, later, before),) = started
        assert sorted(bounds.values(), key=lambda b: b.segments) == [SegmentBounds(160, 3, 64), SegmentBounds(160, 10, 16)]
        assert before == compiled
        # One picture is one long segment for attention to whole frames; windows stay as long as they are.
        longest = {bounds[index].segments: [(b.rows, b.longest) for b in some] for index, some in later.items()}
        assert longest == {3: [(256, 256), (2048, 2048)], 10: [(256, 64), (2048, 64)]}

    @pytest.mark.skipif(DEVICE != "cpu", reason="the kernels of this test run on the CPU")
    @pytest.mark.parametrize("capture", ["lazy", "never"])
    def test_only_where_it_is_measured(self, capture, tmp_path, monkeypatch):
        """Without captures nothing is measured, so no candidate is compiled for it."""
        started = []
        monkeypatch.setattr(MeasuredChoice, "start", lambda self, *bounds: started.append(bounds))
        monkeypatch.setattr(
            backend, "choose_for", lambda name, shapes: MeasuredChoice([Named("a"), Named("b")], shapes, tmp_path)
        )
        run(compile_tower(tiny_tower("qwen2_vl", depth=1), capture=capture), ((1, 4, 4),))
        assert len(started) == (capture == "lazy")


def last_row_unwritten(out):
    out[-1] = math.nan
    return out


def last_row_stale(out):
    out[-1] = out[-2]
    return out


def one_head_of_another(out):
    out[7, 1] = out[8, 1]
    return out


def raises(out):
    raise RuntimeError("no kernel image")


class TestWrongResults:
    """A kernel whose results are wrong is never chosen, however fast."""

    @pytest.mark.parametrize(
        "wrong", [last_row_unwritten, last_row_stale, one_head_of_another, raises, lambda out: out[:-1], lambda out: out.half()]
    )
    def test_is_not_chosen(self, clock, tmp_path, wrong):
        """One row or head that is not SDPA's, another shape or dtype, or an error, and a slower kernel serves."""
        chosen = choice(tmp_path, Named("a"), Named("b"), Named("c", wrong=wrong))
        assert at(chosen) == "b"
        (file,) = tmp_path.iterdir()
        (kept,) = json.loads(file.read_text())["choices"].values()
        assert list(kept["us"]) == ["a", "b"]

    def test_nor_is_the_first(self, clock, tmp_path):
        """The first kernel has no privilege there."""
        clock["a"] = 0.1
        assert at(choice(tmp_path, Named("a", wrong=last_row_unwritten), Named("b"))) == "b"

    def test_unwritten_rows_are_not_what_was_there_before(self, tmp_path, clock):
        """Memory that a right result has just left is spoilt before the next candidate runs."""
        spoilt = []
        full_like = torch.full_like

        def watched(tensor, value):
            spoilt.append(value)
            return full_like(tensor, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "full_like", watched)
            at(choice(tmp_path))
        assert len(spoilt) == 2
        assert all(math.isnan(value) for value in spoilt)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rounding_agrees(self, dtype):
        """A result that is off by one step of its dtype agrees, one that is off by twelve does not."""
        torch.manual_seed(0)
        rounded = torch.randn(50, 4, 72).to(dtype)
        assert agrees(rounded * (1 + torch.finfo(dtype).eps), rounded)
        assert not agrees(rounded * (1 + 12 * torch.finfo(dtype).eps), rounded)

    def test_one_row_of_very_many(self):
        """A single head of a single row counts by itself, among however many right ones."""
        expected = torch.randn(20_000, 2, 8).bfloat16()
        wrong = expected.clone()
        wrong[-1, 1] = expected[-2, 1]
        assert agrees(expected, expected)
        assert not agrees(wrong, expected)


class TestSegments:
    """What is timed."""

    @pytest.mark.parametrize("bounds", [(100, 5, 40), (64, 1, 64), (100, 100, 1), (4096, 64, 64), (10, 4, 7), (9, 3, 5)])
    def test_have_the_bounds(self, bounds):
        """Even segments have the rows, the number and the longest that they are asked for."""
        rows, segments, longest = bounds
        lengths = even_segments(SegmentBounds(*bounds))
        assert (sum(lengths), len(lengths), max(lengths)) == (rows, segments, longest)
        assert min(lengths) >= 1

    def test_reference_is_sdpa_by_segment(self, tmp_path):
        """The result that candidates are compared with is that of the reference kernel, for grouped heads too."""
        shape = AttentionShape(CPU, torch.float32, 4, 2, 16, 16)
        q, k, v = measured._inputs(shape, 100)
        lengths = even_segments(BOUNDS)
        kernel = SdpaKernel()
        metadata = kernel.metadata([0, *torch.tensor(lengths).cumsum(0).tolist()], BOUNDS)
        expected = kernel.forward(q, k, v, metadata, BOUNDS, 0.25)
        torch.testing.assert_close(measured._by_sdpa(q, k, v, lengths, 0.25), expected)


class TestClock:
    """How candidates are timed."""

    def test_hopeless_ones_run_once(self, monkeypatch):
        """Three rounds in alternating order; a run that takes far more than the best is not repeated."""
        order = []

        def once(run, device):
            order.append(run)
            return {"fast": 1.0, "near": 1.4, "slow": 9.0}[run]

        monkeypatch.setattr(measured, "_once", once)
        assert measured.seconds(["fast", "near", "slow"], CPU) == [1.0, 1.4, 9.0]
        assert order == ["fast", "near", "slow", "near", "fast", "fast", "near"]
        assert Counter(order)["slow"] == 1


def add_many(folder, number):
    """One writer of several; whether each read in between found a whole file."""
    kept = KeptChoices({"device": "x"}, "attention", folder)
    whole = True
    for index in range(40):
        kept.add(f"{number} {index}", "a", {"a": 1e-6})
        whole = whole and bool(json.loads(kept.path.read_text())["choices"])
    return whole


class TestFile:
    """What is kept on disk."""

    def test_hit(self, clock, tmp_path):
        """Another process measures nothing: it takes what was kept, and asks no other kernel whether it could run."""
        assert at(choice(tmp_path)) == "b"
        clock["b"] = 9.0
        slow = Named("a")
        slow.unusable = None  # to ask it would be an error
        assert at(choice(tmp_path, slow, Named("b"))) == "b"
        assert clock.asked == 1

    def test_kept_kernel_that_cannot_run_any_more(self, clock, tmp_path):
        """A kept choice that is not usable, or unknown, is measured anew."""
        assert at(choice(tmp_path)) == "b"
        assert at(choice(tmp_path, Named("a"), Named("b", reason="gone"), Named("c"))) == "c"
        assert at(choice(tmp_path, Named("a"), Named("b"))) == "b"

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", '{"environment": 1}', "\x00\xff", '{"environment": ENV, "choices": [1]}',
         '{"environment": ENV, "choices": {"KEY": {"kernel": 3}}}', '{"environment": ENV, "choices": {"KEY": "c"}}',
         '{"environment": {}, "choices": {"KEY": {"kernel": "a"}}}'],
    )  # fmt: skip
    def test_unreadable_file(self, clock, tmp_path, text):
        """A file with anything else in it is as none: measured anew and replaced."""
        found = environment(CPU)
        path = KeptChoices(found, "attention", tmp_path).path
        key = size_class(SHAPES[0], BOUNDS)
        path.write_bytes(text.replace("ENV", json.dumps(found)).replace("KEY", key).encode("latin1"))
        assert at(choice(tmp_path)) == "b"
        assert clock.asked == 1
        assert KeptChoices(found, "attention", tmp_path).read() == {key: "b"}

    def test_another_version(self, clock, tmp_path, monkeypatch):
        """Another device or version of anything that brings a kernel has choices of its own."""
        at(choice(tmp_path))
        for name in environment(CPU):
            other = environment(CPU) | {name: "another"}
            monkeypatch.setattr(measured, "environment", lambda device, other=other: other)
            asked = clock.asked
            at(choice(tmp_path))
            assert clock.asked == asked + 1, name

    def test_environment_names_what_brings_kernels(self):
        """Every package with a kernel is in the key."""
        assert {"device", "torch", "cudnn", "triton", "flash-attn", "flash-attn-3", "flashinfer-python"} <= set(
            environment(CPU)
        )

    def test_no_folder(self, clock, tmp_path):
        """Where nothing can be written, choices last as long as the process."""
        (tmp_path / "file").write_text("not a folder")
        chosen = choice(tmp_path / "file" / "below")
        assert at(chosen) == at(chosen) == "b"
        assert clock.asked == 1

    def test_below_torchs_own_cache(self, tmp_path, monkeypatch):
        """The file lies where torch keeps what it compiles."""
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        assert KeptChoices({}, "attention").path.parent == tmp_path / "vitcg"

    def test_concurrent_writers(self, tmp_path):
        """Writers that know nothing of each other leave a whole file at each moment, and no other file."""
        kept = KeptChoices({"device": "x"}, "attention", tmp_path)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert all(pool.map(add_many, [tmp_path] * 3, range(3)))
        assert any(f"{number} 39" in kept.read() for number in range(3))
        assert list(tmp_path.iterdir()) == [kept.path]


class TestTower:
    """A tower whose kernels are chosen by measurement."""

    @pytest.fixture
    def chosen(self, monkeypatch, tmp_path):
        """Towers that are compiled take two kernels, one for buckets of many rows."""
        kernels = [Named("a"), Named("b", needs_longest=True)]
        made = []

        def choose_measured(name, shapes):
            made.append(MeasuredChoice(kernels, shapes, tmp_path))
            return made[-1]

        def times(kernels, shape, exact):
            return {"a": 1.0, "b": 0.5 if exact.rows > 64 else 2.0}

        monkeypatch.setattr(backend, "choose_for", choose_measured)
        monkeypatch.setattr(measured, "_times", times)
        return kernels

    @pytest.mark.skipif(DEVICE != "cpu", reason="the kernels of this test run on the CPU")
    def test_each_bucket_has_its_kernel(self, chosen):
        """Small and large buckets run with the kernel that is faster there, right, captured once, and again with the same."""
        tower = tiny_tower("qwen2_vl")
        compiled = compile_tower(tower)
        small, large = ((1, 4, 4),), ((1, 12, 12),)
        before = [kernel.launches for kernel in chosen]
        for layout, kernel, other in ((small, *chosen), (large, *reversed(chosen))):
            launches = kernel.launches, other.launches
            assert_same(compiled, tower, layout)
            assert kernel.launches > launches[0]
            # The other one may run the exact rows in the check of the first use, where nothing is measured.
            run(compiled, layout)
            launches = kernel.launches, other.launches
            run(compiled, layout)
            assert kernel.launches > launches[0]
            assert other.launches == launches[1]
        assert [kernel.launches for kernel in chosen] != before
        counted = stats(tower)
        assert counted.captures == 2
        assert counted.hits == counted.calls

    @pytest.mark.skipif(DEVICE != "cpu", reason="the kernels of this test run on the CPU")
    def test_equal_bounds_of_two_kernels_are_two_captures(self, chosen, monkeypatch):
        """Two layouts of one bucket whose static bounds are equal run with the kernel of each."""
        for kernel in chosen:
            kernel.needs_longest = False
        monkeypatch.setattr(
            measured, "_times", lambda kernels, shape, exact: {"a": 1.0, "b": 0.5 if exact.longest > 128 else 2.0}
        )
        tower = tiny_tower("qwen2_vl")
        compiled = compile_tower(tower, token_budgets=[64])
        for layout, kernel, other in ((((2, 8, 16),), *chosen), (((1, 16, 16),), *reversed(chosen))):
            assert_same(compiled, tower, layout)
            launches = kernel.launches, other.launches
            run(compiled, layout)
            assert kernel.launches > launches[0]
            assert other.launches == launches[1]
        assert stats(tower).captures == 2
        assert stats(tower).buckets[64].attention == {"a": 1, "b": 1}

    @pytest.mark.skipif(DEVICE != "cpu", reason="the kernels of this test run on the CPU")
    def test_what_was_warmed_up_serves_every_class(self, chosen):
        """A layout that fits the bounds of a warm-up's capture is served by it and its kernel, whatever its own class says."""
        first, second = chosen
        tower = tiny_tower("qwen2_vl")
        compiled = compile_tower(tower, token_budgets=[64], capture="warmup")
        times, measurements = {"a": 1.0, "b": 2.0}, []

        def measure(kernels, shape, exact):
            measurements.append(exact)
            return dict(times)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measured, "_times", measure)
            vitcg_backend.warmup(compiled)
            captures = stats(tower).captures
            times["b"] = 0.5  # from now on
            asked = measurements.copy()
            for layout in (((1, 16, 16),), ((4, 8, 8),), ((1, 4, 4),) * 10, ((1, 2, 4),) * 20):
                launches = second.launches
                assert_same(compiled, tower, layout)
                assert stats(tower).last.hit or len(layout) == 20  # more segments than the bounds have room for
                assert second.launches == launches
            assert measurements == asked  # a call that may not be captured is not measured for either
        assert stats(tower).captures == captures
        assert first.launches
