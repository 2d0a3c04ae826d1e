"""The life of a compile: options and their errors, dumps, logs, what is shared, compiled pieces, training through Inductor."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from common import IMAGE, LAYOUTS, MIXED, VIDEO, assert_same, compile_tower, run, stats, tiny_tower

import vitcg_backend
from vitcg_backend import backend, testing
from vitcg_backend.counters import BucketStats, Stats
from vitcg_backend.debug import Dump
from vitcg_backend.errors import AttentionUnavailable, OptionError, Refused, VitcgError
from vitcg_backend.options import Options
from vitcg_backend.owners import Owners
from vitcg_backend.runtime import CompiledTower

BAD_OPTIONS = {
    "unknown": (
        {"tokens": 3},
        r"unknown option 'tokens' for backend 'vitcg'; known options: token_budgets, max_tokens",
    ),
    "empty budgets": ({"token_budgets": []}, r"token_budgets=\[\] is empty: expected output tokens per bucket"),
    "negative budget": (
        {"token_budgets": [64, -4]},
        r"the budget -4 \(int\) is not allowed: expected a whole number of at",
    ),
    "zero budget": ({"token_budgets": [0]}, r"the budget 0 \(int\) is not allowed"),
    "budget of text": ({"token_budgets": "64"}, r"token_budgets='64': expected a list of output-token counts"),
    "max_tokens": ({"max_tokens": 0}, r"max_tokens=0: expected a whole number of at least 1"),
    "max_items": ({"max_items": 1.5}, r"max_items=1.5: expected a whole number of at least 1"),
    "min_tokens": ({"min_tokens": True}, r"min_tokens=True: expected a whole number"),
    "min_tokens of text": ({"min_tokens": "measured"}, r"min_tokens='measured': expected 'auto' or a whole number"),
    "min_tokens zero": ({"min_tokens": 0}, r"min_tokens=0: expected a whole number of at least 1"),
    "budgets of another word": ({"token_budgets": "seen"}, r"such as \[256, 1024\], 'observed' or None"),
    "attention": (
        {"attention": "fa9"},
        r"attention='fa9': expected one of 'auto', 'triton', 'torch', 'flash_attn', 'flashinfer', 'mem_efficient', 'sdpa'",
    ),
    "capture": ({"capture": "always"}, r"capture='always': expected one of 'lazy', 'warmup', 'never'"),
    "outputs": ({"outputs": None}, r"outputs=None: expected one of 'copy', 'borrow'"),
    "inner": ({"inner": "aot"}, r"inner='aot': expected one of 'inductor', 'eager'"),
    "self_check": ({"self_check": 1}, r"self_check=1: expected True or False"),
    "strict": ({"strict": "yes"}, r"strict='yes': expected True or False"),
    "dump_dir": ({"dump_dir": 3}, r"dump_dir=3: expected the path of a folder, or None"),
    "memory": ({"memory_limit_mib": -1}, r"memory_limit_mib=-1: expected a whole number"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_fail_when_given(case: str) -> None:
    """Every bad option is named with what was seen and what is allowed."""
    options, text = BAD_OPTIONS[case]
    with pytest.raises(OptionError, match=text):
        Options.parse(options)


def test_bad_options_reach_the_user_through_torch_compile() -> None:
    """Dynamo shows the text; the type is a VitcgError and a ValueError."""
    tower = tiny_tower("qwen2_vl")
    compiled = torch.compile(tower, backend="vitcg", options={"token_budgets": [-1]})
    with pytest.raises(Exception, match="the budget -1"):
        run(compiled, IMAGE)
    assert issubclass(OptionError, VitcgError)
    assert issubclass(OptionError, ValueError)


def test_mode_is_refused_with_the_remedy() -> None:
    """`mode=` has no meaning here and says what to use."""
    with pytest.raises(OptionError, match=r"mode='max-autotune' is not supported by backend 'vitcg'; leave mode out"):
        Options.parse(None, mode="max-autotune")


def test_unusable_attention_is_an_error_by_name_only() -> None:
    """An attention asked for by name that cannot run says why; `auto` finds one that can."""
    tower = tiny_tower("qwen2_vl")
    if next(tower.parameters()).device.type == "cpu":
        with pytest.raises(Exception, match="attention='triton' cannot run on cpu") as error:
            run(compile_tower(tower, attention="triton"), IMAGE)
        assert isinstance(error.value, AttentionUnavailable) or "AttentionUnavailable" in str(error.value)
    assert_same(compile_tower(tiny_tower("qwen2_vl", seed=1)), tiny_tower("qwen2_vl", seed=1), IMAGE)


def test_public_names() -> None:
    """Every name of `__all__` is there; an unknown one lists them."""
    for name in vitcg_backend.__all__:
        assert getattr(vitcg_backend, name) is not None
    with pytest.raises(AttributeError, match=r"public names: .*stats"):
        vitcg_backend.nothing  # noqa: B018


def test_b57_name_and_callable_are_one_backend() -> None:
    """The string finds the same function as the import, and both lower."""
    tower = tiny_tower("qwen2_vl")
    compiled = torch.compile(tower, backend=vitcg_backend.vitcg, options={"inner": "eager"})
    assert_same(compiled, tower, MIXED)
    assert stats(tower).graphs == 1
    assert torch._dynamo.backends.registry.lookup_backend("vitcg") is vitcg_backend.vitcg


@pytest.mark.usefixtures("own_pieces")
def test_dump_dir_shows_each_pass(tmp_path: Path) -> None:
    """Numbered files for every stage, no pixel data, in a folder whose path has a space."""
    folder = tmp_path / "a dump"
    tower = tiny_tower("qwen2_vl")
    assert_same(compile_tower(tower, dump_dir=str(folder)), tower, IMAGE)
    names = sorted(p.name for p in folder.iterdir())
    text = " ".join(names)
    for stage in ("dynamo", "bind_tokens", "hoist_metadata_prologue", "piece0", "proof", "aten"):
        assert stage in text
    assert names == sorted(names, key=lambda n: n.split("_")[:3])
    assert "vitcg.metadata" in (folder / next(n for n in names if "bind_tokens" in n)).read_text()


def test_b58_towers_share_a_dump_dir_and_overwrite_nothing(tmp_path: Path) -> None:
    """Two towers of one class: the files of the second stand beside those of the first, and all name the process."""
    first, second = tiny_tower("qwen2_vl", depth=1), tiny_tower("qwen2_vl", depth=1, seed=1)
    assert_same(compile_tower(first, dump_dir=str(tmp_path)), first, IMAGE)
    written = {path: path.read_text() for path in tmp_path.iterdir()}
    torch._dynamo.reset()
    assert_same(compile_tower(second, dump_dir=str(tmp_path), token_budgets=[8]), second, IMAGE)
    assert all(path.read_text() == text for path, text in written.items())
    assert len(list(tmp_path.iterdir())) > len(written)
    assert all(path.name.startswith(f"{os.getpid()}_") for path in tmp_path.iterdir())


def test_a_dump_dir_that_cannot_be_one_fails_when_given(tmp_path: Path) -> None:
    """The path is a file: an error that says so, before anything is compiled."""
    path = tmp_path / "file"
    path.write_text("")
    for wrong in (path, path / "inside"):
        with pytest.raises(OptionError, match=r"dump_dir='.*file.*': cannot make this folder .*; give one that can be written"):
            Options.parse({"dump_dir": str(wrong)})


@pytest.mark.usefixtures("own_pieces")
def test_b58_a_dump_that_cannot_be_written_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: one warning, and the call is right."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    tower = tiny_tower("qwen2_vl")
    with caplog.at_level(logging.WARNING, logger="vitcg_backend"):
        assert_same(compile_tower(tower, dump_dir=str(tmp_path)), tower, IMAGE)
    assert sum("cannot write its dump" in record.message for record in caplog.records) == 1


def test_torch_logs_torch_trace_and_import_order(tmp_path: Path) -> None:
    """In a process of its own: TORCH_LOGS=+vitcg_backend and TORCH_TRACE work and do not break `import torch`; the backend
    loaded before transformers' files, and Dynamo reset in between, still lowers the first compile.
    """
    script = textwrap.dedent(
        """
        import torch, vitcg_backend.backend
        torch._dynamo.reset()
        from vitcg_backend import testing
        tower = testing.tiny_tower("qwen3_vl", depth=1, attn_implementation="eager")
        compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager"}, fullgraph=True)
        with torch.no_grad():
            pixels, grid = testing.make_inputs(tower, ((1, 4, 4),))
            compiled(pixels, grid_thw=grid)
        assert vitcg_backend.stats(tower).hits == 1
        """
    )
    env = {**os.environ, "TORCH_LOGS": "+vitcg_backend", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bind_tokens" in done.stderr
    traces = "".join(p.read_text() for p in tmp_path.rglob("*.log"))
    assert "vitcg_bind_tokens" in traces


def test_a_graph_that_nobody_reads_is_not_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a dump, a log or a trace no stage becomes text: for deep towers that takes a second. With a folder it does."""
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    printed = []
    monkeypatch.setattr(torch._logging, "trace_structured", lambda *_, **__: None)
    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", lambda *_, **__: printed.append("") or "text")
    Dump(None)("stage", gm)
    assert not printed
    Dump(str(tmp_path))("stage", gm)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # depyf asks for several runs
def test_depyf_shows_our_stages(tmp_path: Path) -> None:
    """Depyf's dump of a compile has a file for our stages."""
    depyf = pytest.importorskip("depyf")
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower)
    with depyf.prepare_debug(str(tmp_path)):
        assert_same(compiled, tower, IMAGE)
    assert any("vitcg" in p.name for p in tmp_path.rglob("*"))


@pytest.mark.usefixtures("own_pieces")
def test_unique_pieces_are_shared_by_graphs_and_towers() -> None:
    """A second tower of the class, and a second graph of it, compile no piece again."""
    from vitcg_backend import backend

    before = backend._cache.compiled
    first, second = tiny_tower("qwen2_vl", depth=None, seed=1), tiny_tower("qwen2_vl", depth=None, seed=2)
    assert_same(compile_tower(first), first, MIXED)
    assert stats(first).unique_pieces == 3
    compiled = compile_tower(second)
    assert_same(compiled, second, MIXED)
    assert_same(compiled, second, MIXED, output_hidden_states=False)
    assert stats(first).graphs + stats(second).graphs >= 1
    assert backend._cache.compiled - before == 3


def test_strict_names_an_ineligible_graph() -> None:
    """`strict=True` at compile time: the reason and its detail."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, strict=True)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with pytest.raises(Exception, match=r"vitcg refused \[gradients\]: gradients are wanted") as error:
        compiled(pixels, grid_thw=grid)
    assert "Refused" in type(error.value).__name__ or "Refused" in str(error.value) or isinstance(error.value, Refused)


def test_stats_text() -> None:
    """The text of the counters names buckets and reasons."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[8])
    assert_same(compiled, tower, IMAGE)
    assert_same(compiled, tower, VIDEO)
    text = str(stats(tower))
    assert "calls 2, hits 1, captures 1" in text
    assert "bucket      8 tokens: 1 replays" in text
    assert "fallback over_largest_budget: 1" in text


def test_inductor_pieces_within_budget() -> None:
    """Compiled pieces, fused, with the patch convolution as a matmul, on a shuffled sequence of layouts."""
    for name, depth in (("qwen2_5_vl", 2), ("qwen3_vl", None)):
        tower = tiny_tower(name, depth=depth)
        compiled = compile_tower(tower, inner="inductor")
        for layout in (*LAYOUTS, *LAYOUTS[::-1]):
            pixels, grid = testing.make_inputs(tower, layout)
            reference = testing.reference_float64(tower, pixels, grid_thw=grid)
            testing.assert_within_budget(run(compiled, layout), run(tower, layout), reference)
        assert stats(tower).hits == stats(tower).calls == 2 * len(LAYOUTS)
        assert stats(tower).graphs == 1


def test_training_through_inductor() -> None:
    """Gradients of the whole graph compiled by Inductor, for two layouts, and inference in between."""
    tower = tiny_tower("qwen2_vl", depth=1)
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower, inner="inductor")
    for layout in (MIXED, VIDEO):
        pixels, grid = testing.make_inputs(tower, layout)
        for t, call in ((tower, compiled), (twin, twin)):
            t.zero_grad()
            call(pixels, grid_thw=grid).pooler_output.square().mean().backward()
        for p, q in zip(tower.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    assert stats(tower).fallbacks == {"gradients": 2}
    assert "inductor" not in stats(tower).refusals


class _Compiling(CompiledTower):
    """A tower; while somebody asks whose it is, another thread compiles."""

    def __init__(self) -> None:
        self.stats, self.owners, self.others = Stats(), Owners([]), []

    def belongs_to(self, ids: set[int]) -> bool:
        """No tower's, after the other thread has compiled something."""
        other: Any = backend._Ordinary(len, Stats(), "", Owners([]))
        thread = threading.Thread(target=backend._served_by, args=(other,))
        thread.start()
        thread.join()
        self.others.append(other)
        return False


class _Growing(BucketStats):
    """Counters of a bucket; while they are read, another is made."""

    def __getattribute__(self, name: str) -> Any:
        if name == "hits":
            counted.buckets[len(counted.buckets)] = BucketStats()
        return super().__getattribute__(name)


counted = Stats()


def test_another_thread_compiles_or_counts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """While towers are looked through, and while counters are summed."""
    monkeypatch.setattr(backend, "_live", type(backend._live)())
    busy = _Compiling()
    backend._live.add(busy)
    assert backend.live_towers(torch.nn.Linear(2, 2)) == []
    assert len(busy.others) == 1
    counted.buckets[8] = _Growing()
    busy.stats = counted
    assert vitcg_backend.stats().calls == 0
    assert len(counted.buckets) > 1
