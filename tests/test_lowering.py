"""Lowering: one graph for every layout, in every mode of torch.compile, with nothing changed outside our own compiles."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from common import (
    IMAGE,
    LAYOUTS,
    MIXED,
    TOWERS,
    TWO_IMAGES,
    VIDEO,
    assert_same,
    assert_sequence,
    compile_tower,
    run,
    stats,
    tensor,
    tiny_tower,
)
from transformers import vision_utils

from vitcg_backend import testing

# What `dynamic` marks and what `fullgraph` forbids are two things: one tower sees all four pairs of them.
MODES = [(name, *both) for name in TOWERS for both in ((None, False), (True, True))]


@pytest.mark.parametrize(("name", "dynamic", "fullgraph"), [*MODES, ("qwen3_vl", None, True), ("qwen3_vl", True, False)])
def test_b52_b54_one_graph_for_every_layout(name: str, dynamic: bool | None, fullgraph: bool) -> None:
    """One image, several, videos and mixtures share one graph, whatever `dynamic` and `fullgraph` say."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower, dynamic=dynamic, fullgraph=fullgraph)
    for layout in (IMAGE, TWO_IMAGES, VIDEO, MIXED):
        assert_same(compiled, tower, layout)
    assert stats(tower).graphs == 1
    assert stats(tower).fallbacks == {}


@pytest.mark.parametrize("name", TOWERS)
def test_b54_one_graph_when_the_first_call_is_mixed(name: str) -> None:
    """The first layout seen decides nothing: many items first, then one."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    for layout in (MIXED, VIDEO, IMAGE, TWO_IMAGES):
        assert_same(compiled, tower, layout)
    assert stats(tower).graphs == 1


@pytest.mark.parametrize("name", TOWERS)
def test_b53_a_second_pass_over_many_grids_recompiles_nothing(name: str) -> None:
    """Thirty varied grids, twice: all hits, no new backend call."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    grids = [tuple((t, 4 * h, 4 * w) for _ in range(n)) for n in (1, 2, 4) for t in (1, 2, 3) for h in (1, 2) for w in (1, 3)]
    for layout in grids[:30] * 2:
        assert_same(compiled, tower, layout)
    counted = stats(tower)
    assert (counted.graphs, counted.hits, counted.calls) == (1, 60, 60)


@pytest.mark.towers
@pytest.mark.parametrize("name", TOWERS)
def test_attention_implementation_eager_within_budget(name: str) -> None:
    """A tower configured for eager attention is lowered too, and is as exact as it was."""
    tower = tiny_tower(name, depth=None, attn_implementation="eager")
    compiled = compile_tower(tower)
    for layout in (IMAGE, MIXED, VIDEO):
        pixels, grid = testing.make_inputs(tower, layout)
        reference = testing.reference_float64(tower, pixels, grid_thw=grid)
        testing.assert_within_budget(run(compiled, layout), run(tower, layout), reference)
    assert stats(tower).graphs == 1
    assert stats(tower).hits == 3


def test_dynamic_false_is_right() -> None:
    """`dynamic=False` is the user's wish for static graphs; results stay eager's."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, dynamic=False)
    for layout in (IMAGE, TWO_IMAGES, IMAGE, VIDEO):
        assert_same(compiled, tower, layout)


def test_eager_functions_are_untouched() -> None:
    """Eager runs the original functions after a compile."""
    tower = tiny_tower("qwen2_vl")
    before = vars(vision_utils)["get_vision_cu_seqlens"]
    run(compile_tower(tower), IMAGE)
    assert vars(vision_utils)["get_vision_cu_seqlens"] is before
    assert before(tensor([[2, 4, 4]])).tolist() == [0, 16, 32]


def test_no_global_flag_changes() -> None:
    """A compile and its calls leave the configuration of Dynamo and functorch as it was."""

    def flags() -> list[dict[str, object]]:
        import torch._functorch.config
        import torch._inductor.config

        configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
        return [config.get_config_copy() for config in configs]

    before = flags()
    tower = tiny_tower("qwen3_vl")
    assert_same(compile_tower(tower), tower, MIXED)
    assert flags() == before


def test_other_backends_see_the_original_functions() -> None:
    """A text model and a vision tower traced for another backend give the same graphs with and without us."""
    script = textwrap.dedent(
        """
        import sys, torch
        from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
        from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        torch.manual_seed(0)
        text = Qwen2Model(Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=2, vocab_size=64)).eval()
        tower = Qwen2VisionTransformerPretrainedModel(
            Qwen2VLVisionConfig(depth=1, embed_dim=32, num_heads=2, hidden_size=16, patch_size=4, mlp_ratio=2)).eval()

        def graphs():
            torch._dynamo.reset()
            seen = []
            def backend(gm, inputs):
                seen.append(gm.code)
                return gm.forward
            with torch.no_grad():
                a = torch.compile(text, backend=backend)(torch.arange(8)[None]).last_hidden_state
                pixels = torch.linspace(-1, 1, 32 * 96).reshape(32, 96)
                b = torch.compile(tower, backend=backend)(pixels, grid_thw=torch.tensor([[1, 4, 8]])).pooler_output
            return seen, a, b

        before = graphs()
        import vitcg_backend.backend
        from vitcg_backend.lowering import install, lowered_functions
        install()
        assert any("sdpa_attention_forward" in name for name in lowered_functions()), lowered_functions()
        after = graphs()
        assert before[0] == after[0], "graphs of another backend changed"
        assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])
        print("same", len(after[0]))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("same")


def test_text_model_on_our_backend_equals_eager() -> None:
    """A text model given to this backend runs, on the ordinary path, with a reason."""
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    text = Qwen2Model(config).eval()
    compiled = compile_tower(text)
    with torch.no_grad():
        for length in (8, 5, 11):
            ids = torch.arange(length)[None]
            assert torch.equal(compiled(ids).last_hidden_state, text(ids).last_hidden_state)
    assert sum(stats(text).fallbacks.values()) == stats(text).calls > 0


def _given(tower: torch.nn.Module, grid: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, 2),
    }


@pytest.mark.parametrize("name", TOWERS)
def test_b16_values_of_the_caller_win(name: str) -> None:
    """Precomputed metadata is used as in eager, also when it is not what the grid would give."""
    tower = tiny_tower(name, depth=1)
    compiled = compile_tower(tower)
    grid = tensor([[1, 4, 4]])
    plain = run(tower, IMAGE)
    other = {"cu_seqlens": tensor([0, 8, 16], dtype=torch.int32)}
    positions = {"position_ids": torch.flip(vision_utils.get_vision_position_ids(grid, 2), [0])}
    for given in (_given(tower, grid), other, {}, positions, other, {"max_seqlen": 16}):
        assert_same(compiled, tower, IMAGE, **given)
    assert not torch.equal(testing.flatten(plain)[0], testing.flatten(run(tower, IMAGE, **other))[0])
    assert (stats(tower).hits, sum(stats(tower).fallbacks.values())) == (2, 4)


def test_b16_window_index_of_the_caller_wins() -> None:
    """Qwen2.5-VL with its window order given by the caller, alternating with plain calls."""
    tower = tiny_tower("qwen2_5_vl")
    compiled = compile_tower(tower)
    for layout in (((1, 8, 8),), ((1, 8, 4), (1, 4, 4))):
        grid = tensor(layout)
        index, cu = vision_utils.get_vision_window_index(grid, 2, tower.window_size, tower.patch_size)
        assert_same(compiled, tower, layout, window_index=index, cu_window_seqlens=cu)
        assert_same(compiled, tower, layout)
        assert_same(compiled, tower, layout, window_index=torch.arange(len(index)), cu_window_seqlens=cu)


@pytest.mark.parametrize("name", TOWERS)
def test_b15_b37_other_arguments_between_plain_calls(name: str) -> None:
    """`output_hidden_states`, first of all and then between plain calls, gives eager's tuple."""
    tower = tiny_tower(name, depth=1)
    compiled = compile_tower(tower)
    for kwargs in ({"output_hidden_states": True}, {}, {"output_hidden_states": True}, {"return_dict": False}, {}):
        for layout in (IMAGE, MIXED):
            assert_same(compiled, tower, layout, **kwargs)


@pytest.mark.parametrize("name", TOWERS)
def test_b37_attention_weights_are_eagers(name: str) -> None:
    """`output_attentions=True` with eager attention, first of all and between plain calls: eager's tuple, or none."""
    tower = tiny_tower(name, depth=2, attn_implementation="eager")
    compiled = compile_tower(tower)
    for kwargs in ({"output_attentions": True}, {}, {"output_attentions": True}, {}):
        for layout in (IMAGE, TWO_IMAGES):
            pixels, grid = testing.make_inputs(tower, layout)
            with torch.no_grad():
                output, expected = (call(pixels, grid_thw=grid, **kwargs) for call in (compiled, tower))
            assert (output.attentions is None) is (expected.attentions is None)
            for a, b in zip(testing.flatten(output), testing.flatten(expected), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_whole_sequence_with_fullgraph() -> None:
    """A shuffled, repeated sequence under `fullgraph=True`."""
    tower = tiny_tower("qwen2_5_vl")
    assert_sequence(compile_tower(tower, fullgraph=True), tower, LAYOUTS)
