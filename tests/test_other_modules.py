"""Modules that are no packed vision tower: text and audio work or are refused, equal to eager and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitcg_backend
from vitcg_backend.testing import assert_bitwise

pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def text_decoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen2Model(transformers.Qwen2Config(**SIZES, num_key_value_heads=2))


def text_encoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def audio_encoder() -> nn.Module:
    modeling = pytest.importorskip("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    return modeling.Qwen2_5OmniAudioEncoder(
        modeling.Qwen2_5OmniAudioEncoder.config_class(
            num_mel_bins=8,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            d_model=32,
            max_source_positions=64,
            n_window=10,
            output_dim=32,
        )
    )


def ids(*shape: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 99, shape)}


def sounds(*lengths: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, sum(lengths)), "feature_lens": torch.tensor(lengths)}


# Token ids of two or three columns look like a grid of sizes: they are not.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Any]]]]] = {
    "text decoder": (text_decoder, lambda: [ids(1, 8), ids(2, 3), ids(1, 3), ids(3, 5), ids(2, 2), ids(1, 8)]),
    "text encoder": (text_encoder, lambda: [ids(1, 8), ids(2, 3), ids(1, 3), ids(3, 5), ids(1, 8)]),
    "audio encoder": (audio_encoder, lambda: [sounds(40), sounds(40, 60), sounds(20, 20, 30), sounds(40)]),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each module compiles by itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_and_says_why(name: str) -> None:
    """Eager's bits in every call; each call is a hit or has a reason with a text."""
    make, inputs = CASES[name]
    options = {"use_cache": False} if name == "text decoder" else {}
    torch.manual_seed(0)
    module = make().eval()
    compiled = torch.compile(module, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    with torch.no_grad():
        for given in inputs():
            assert_bitwise(compiled(**given, **options), module(**given, **options))
    seen = vitcg_backend.stats(module)
    assert seen.calls > 0
    assert seen.hits + sum(seen.fallbacks.values()) == seen.calls
    assert set(seen.fallbacks) <= set(seen.refusals)
