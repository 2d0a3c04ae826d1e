"""What every test shares: the gpu marker, one thread, no network, a fresh Dynamo, pieces that are compiled once."""

import gc
import logging
import os

# Before transformers is imported: no test may look for a file on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from vitcg_backend import backend
from vitcg_backend.capture import Capture

REQUIRE_GPU = "VITCG_REQUIRE_GPU"


def pytest_configure(config):
    """One thread per test process: results do not depend on the machine, and the workers do not compete."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 tests compare float32 arithmetic
    # Pytest listens to each logger that does not propagate; torch writes its structured trace, every graph of every compile,
    # where anybody listens.
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items):
    """The longest tests come first, so that no process is left alone with them at the end."""
    items.sort(key=lambda item: "test_sequence" not in item.nodeid)


def pytest_runtest_setup(item):
    """`gpu` tests are skipped without a CUDA device, and fail instead where one was promised."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def settled_heap():
    """What imports and earlier tests have made stays: no collection walks through it again. Else each would take a second, and
    a trace alone makes enough objects for a hundred of some kind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


class _Kept(dict):
    """Compiled pieces by their keys, which a reset leaves."""

    def clear(self):
        """Keep them: to a tower of the next test they are what those of one tower are to another in the same process."""


_KEPT = _Kept()

# Dynamo keeps what operations on fakes gave for layers to come. A tower of one or two blocks has few, and to fill that cache
# takes as long as the operations: only the tests that meet every family trace with it.
_AS_USERS_TRACE = {"test_families", "test_whole_models", "test_repeats"}


@pytest.fixture
def own_pieces(fresh_dynamo, monkeypatch):
    """For tests of what is compiled: no piece that another test compiled."""
    monkeypatch.setattr(backend._cache, "pieces", {})


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch, request):
    """No test sees what another traced or captured; `torch._dynamo.reset()` also calls the backend's own reset.

    Pieces are shared by all towers of a process that have equal ones, so the tests of a process share them, too.
    """
    monkeypatch.setattr(backend._cache, "pieces", _KEPT)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=request.module.__name__ in _AS_USERS_TRACE):
        yield
    torch._dynamo.reset()


@pytest.fixture
def as_a_graph(monkeypatch):
    """Replays on a CPU read parameters where and as they lay at the capture, as a CUDA graph does."""
    if os.environ.get("VITCG_TEST_DEVICE", "cpu") != "cpu":
        return

    def record(self, args, pool, warm=False):
        self.graph_args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]

    monkeypatch.setattr(Capture, "record", record)
    monkeypatch.setattr(Capture, "replay", lambda self, args: setattr(self, "_results", self.run(self.graph_args)))
