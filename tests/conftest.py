"""What every test shares: the gpu marker, one thread, no network, a fresh Dynamo."""

import logging
import os

# Before transformers is imported: no test may look for a file on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

REQUIRE_GPU = "VITCG_REQUIRE_GPU"


def pytest_configure(config):
    """One thread per test process: results do not depend on the machine, and the workers do not compete."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 tests compare float32 arithmetic
    # Otherwise the report of a failed test holds thousands of empty lines of torch's structured trace.
    logging.getLogger("torch.__trace").propagate = False


def pytest_runtest_setup(item):
    """`gpu` tests are skipped without a CUDA device, and fail instead where one was promised."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No test sees what another compiled; `torch._dynamo.reset()` also calls the backend's own reset."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
