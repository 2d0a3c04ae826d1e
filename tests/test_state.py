"""State: whatever changes about a tower or around a call, the next call is eager's, and the counters say how it was served."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import DEVICE, IMAGE, MIXED, assert_equal, assert_same, compile_tower, run, stats, tensor, tiny_tower
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import vitcg_backend
from vitcg_backend import _torch, testing
from vitcg_backend.backend import live_towers

Edit = Callable[[nn.Module], Any]
REPLAYED, CAPTURED, TRACED = "the same capture", "a new capture", "a new graph"


def small(name: str = "qwen2_vl", depth: int = 2, **kwargs: Any) -> nn.Module:
    return tiny_tower(name, depth=depth, **kwargs)


def differs(tower: nn.Module, before: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(before, testing.flatten(run(tower, IMAGE)), strict=True))


def served(tower: nn.Module, before: vitcg_backend.Stats) -> str:
    """How the calls since `before` were served."""
    now = stats(tower)
    assert now.hits > before.hits, now
    if now.graphs > before.graphs:
        return TRACED
    return CAPTURED if now.captures > before.captures else REPLAYED


# --- weights and buffers ----------------------------------------------------------------------------------------------


def _in_place(tower: nn.Module) -> None:
    for p in tower.parameters():
        p.mul_(1.5)


def _one_in_place(tower: nn.Module) -> None:
    tower.merger.mlp[0].bias.add_(1)


def _data(tower: nn.Module) -> None:
    for p in tower.parameters():
        p.data = p.data.clone() * 0.5


def _one_data(tower: nn.Module) -> None:
    tower.merger.mlp[0].bias.data = tower.merger.mlp[0].bias.data + 1


def _new_parameters(tower: nn.Module) -> None:
    for module in tower.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach() * 1.25))


def _new_module(tower: nn.Module) -> None:
    old = tower.blocks[0].attn.proj
    tower.blocks[0].attn.proj = nn.Linear(old.in_features, old.out_features, device=DEVICE)


def _load(tower: nn.Module) -> None:
    tower.load_state_dict({k: v * 1.1 for k, v in tower.state_dict().items()})


def _assign(tower: nn.Module) -> None:
    tower.load_state_dict({k: v * 0.75 for k, v in tower.state_dict().items()}, assign=True)


def _buffers(tower: nn.Module) -> None:
    for b in tower.buffers():
        b.mul_(0.5)


def _buffer_data(tower: nn.Module) -> None:
    for b in tower.buffers():
        b.data = b.data * 1.5


def _there_and_back(tower: nn.Module) -> None:
    tower.merger.mlp[0].bias.add_(1)
    tower.double().float()


def _swapped(tower: nn.Module) -> None:
    a, b = tower.blocks[0].norm1, tower.blocks[0].norm2
    a.weight.data, b.weight.data = b.weight.data, a.weight.data


def _dtype(tower: nn.Module) -> None:
    tower.to(torch.float64 if DEVICE == "cpu" else torch.bfloat16)  # what the attention of the device can be captured in


def _epsilon(tower: nn.Module) -> None:
    for block in tower.blocks:
        block.norm1.eps = 0.5


def _parametrised(tower: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(tower.blocks[0].attn.proj)
    tower.blocks[0].attn.proj.parametrizations.weight.original0.mul_(2)


EDITS: dict[str, tuple[Edit, str]] = {
    "in place": (_in_place, REPLAYED),
    "one parameter in place": (_one_in_place, REPLAYED),
    "data": (_data, CAPTURED),
    "data of one parameter": (_one_data, CAPTURED),
    "new parameters": (_new_parameters, CAPTURED),
    "new module": (_new_module, CAPTURED),
    "load_state_dict": (_load, REPLAYED),
    "load_state_dict, assign": (_assign, CAPTURED),
    "buffers in place": (_buffers, REPLAYED),
    "data of buffers": (_buffer_data, CAPTURED),
    "to another dtype and back": (_there_and_back, CAPTURED),
    "two parameters swapped": (_swapped, CAPTURED),
    "to another dtype": (_dtype, TRACED),
    "a number of a module": (_epsilon, TRACED),
    "parametrised": (_parametrised, TRACED),
}


# What needs no new graph goes one after the other on one tower; what does has a tower of its own.
GROUPS = {
    "weights": [name for name, (_, expected) in EDITS.items() if expected != TRACED],
    **{name: [name] for name, (_, expected) in EDITS.items() if expected == TRACED},
}


@pytest.mark.parametrize("group", GROUPS)
def test_b62_an_edit_shows_in_the_very_next_call(group: str) -> None:
    """Each edit changes eager's result, the next call has it, and the counters tell replay, capture and trace apart."""
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    for name in GROUPS[group]:
        edit, expected = EDITS[name]
        before, old = stats(tower), testing.flatten(run(tower, IMAGE))
        with torch.no_grad():
            edit(tower)
        gc.collect()
        assert name == "to another dtype" or differs(tower, old), name
        assert_same(compiled, tower, IMAGE)
        assert served(tower, before) == expected, name
        before = stats(tower)
        assert_same(compiled, tower, IMAGE)
        assert served(tower, before) == REPLAYED, name


def test_b62_freed_addresses_are_given_to_others() -> None:
    """Old weights are freed and their memory filled by somebody else before the next call."""
    tower = small()
    compiled = compile_tower(tower)
    for step in range(5):
        assert_same(compiled, tower, IMAGE, seed=step)
        with torch.no_grad():
            _data(tower)
        junk = [torch.full_like(p, float("nan")) for p in tower.parameters()]
        assert_same(compiled, tower, IMAGE, seed=step)
        del junk


def _transposed(tower: nn.Module) -> None:
    tower.blocks[0].attn.proj.weight.data = tower.blocks[0].attn.proj.weight.data.t()


def _tied(tower: nn.Module) -> None:
    tower.blocks[1].attn.proj.weight = tower.blocks[0].attn.proj.weight


def _tied_by_data(tower: nn.Module) -> None:
    tower.blocks[1].mlp.fc1.weight.data = tower.blocks[0].mlp.fc1.weight.data


def _without_bias(tower: nn.Module) -> None:
    tower.blocks[0].attn.proj.bias = None


def _plain_tensor(tower: nn.Module) -> None:
    weight = tower.blocks[0].attn.qkv.weight.detach() * 2
    del tower.blocks[0].attn.qkv.weight
    tower.blocks[0].attn.qkv.weight = weight


def _blocks_swapped(tower: nn.Module) -> None:
    tower.blocks[0], tower.blocks[1] = tower.blocks[1], tower.blocks[0]


def _block_gone(tower: nn.Module) -> None:
    del tower.blocks[1]


def test_edits_that_nobody_thinks_of_one_after_another() -> None:
    """A weight transposed in place, tied, a bias taken away, a plain tensor for a weight, blocks swapped and taken out."""
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    for edit in (_transposed, _tied, _tied_by_data, _in_place, _without_bias, _plain_tensor, _blocks_swapped, _block_gone):
        old = testing.flatten(run(tower, IMAGE))
        with torch.no_grad():
            edit(tower)
        assert differs(tower, old), edit.__name__
        assert_same(compiled, tower, IMAGE, exact=edit is not _transposed)


def test_weights_tied_and_untied_after_the_compile() -> None:
    """One parameter for two layers in a graph of two: served from a capture each time. So is a tower tied from the start."""
    tower, tied = small(seed=1), small(seed=2)
    _tied(tied)
    own = tower.blocks[1].attn.proj.weight
    compiled, other = compile_tower(tower), compile_tower(tied)
    assert_same(compiled, tower, IMAGE)
    for step in range(3):
        _tied(tower)
        assert_same(compiled, tower, IMAGE, seed=step)
        assert_same(other, tied, IMAGE, seed=step)
        tower.blocks[1].attn.proj.weight = own
        assert_same(compiled, tower, IMAGE, seed=step)
    counted = stats(tower)
    assert (counted.graphs, counted.captures, counted.hits) == (1, 3, counted.calls)


def test_tied_weights_of_another_layout_are_told_apart() -> None:
    """At the address of a tied weight another view of it: `layout_check` looks at it, too."""
    w = torch.randn(4, 4)
    check = _torch.layout_check([w, w])
    assert check(w, w)
    assert not check(w, w.t())
    assert not check(w.t(), w)
    assert not check(w, w.detach())


def test_b56_towers_of_one_class_share_a_graph_and_never_a_result() -> None:
    """A, B, A, B; a copy of A; A deleted and C built at its addresses: each is its own eager, and its counters are there."""
    a, b = small(seed=1), small(seed=2)
    compiled_a, compiled_b = compile_tower(a), compile_tower(b)
    for _ in range(2):
        assert_same(compiled_a, a, MIXED)
        assert_same(compiled_b, b, MIXED)
    assert stats(a).hits == stats(b).hits == 4  # of the graph that they share
    twin = copy.deepcopy(a)
    with torch.no_grad():
        _in_place(twin)
    assert_same(compile_tower(twin), twin, MIXED)
    assert_same(compiled_a, a, MIXED)
    del a, compiled_a
    gc.collect()
    for seed in range(3, 6):
        c = small(seed=seed)
        assert_same(compile_tower(c), c, MIXED)
        assert stats(c).hits > 0
        assert_same(compiled_b, b, MIXED)
        del c


def test_another_tower_at_the_same_addresses_is_counted_as_itself() -> None:
    """C owns other parameters in the very storage of A's: the capture is A's, the result C's, and the counters find C."""
    a, c = small(seed=1), small(seed=2)
    compiled_a, compiled_c = compile_tower(a), compile_tower(c)
    assert_same(compiled_a, a, IMAGE)
    with torch.no_grad():
        for p, q in zip(a.parameters(), c.parameters(), strict=True):
            p.copy_(q)
            q.data = p.data
        for p, q in zip(a.buffers(), c.buffers(), strict=True):
            q.data = p.data
    del a, compiled_a
    assert_same(compiled_c, c, IMAGE)
    assert (stats(c).hits, stats(c).captures) == (2, 1)


# --- adapters ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with low-rank adapters by name, as adapter libraries write them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.active, self.scale = base, "", 1.0
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()

    def add(self, name: str, seed: int) -> None:
        """A new adapter, not active."""
        chance = torch.Generator().manual_seed(seed)
        for where, outputs, inputs in ((self.down, 4, self.base.in_features), (self.up, self.base.out_features, 4)):
            where[name] = nn.Linear(inputs, outputs, bias=False, device=DEVICE)
            where[name].weight.data.copy_(torch.randn(outputs, inputs, generator=chance) * 0.2)

    def merge(self, sign: int) -> None:
        """Add the active adapter to the base weight, or take it out again."""
        self.base.weight.add_(self.up[self.active].weight @ self.down[self.active].weight, alpha=sign * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """The base layer and the active adapter."""
        y = self.base(x)
        return y + self.up[self.active](self.down[self.active](x)) * self.scale if self.active else y


@torch.no_grad()
def test_b63_adapters_by_hand() -> None:
    """Added, switched, scaled, disabled, merged, unmerged, removed, added again: each state is the next call's."""
    tower = small(depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    layers = [block.attn for block in tower.blocks]
    for layer in layers:
        layer.qkv = Adapted(layer.qkv)
    seen = [testing.flatten(run(tower, IMAGE))[0]]

    def check(change: Callable[[Adapted], Any], new: bool = True) -> None:
        for layer in layers:
            change(layer.qkv)
        seen.append(assert_same(compiled, tower, IMAGE)[0])
        assert not new or not torch.equal(seen[-1], seen[-2])

    for name, seed in (("a", 1), ("b", 2)):
        check(lambda m, name=name, seed=seed: m.add(name, seed), new=False)
    for name in ("a", "b", "a"):
        check(lambda m, name=name: setattr(m, "active", name))
    for scale in (2.0, 0.5, 1.0):
        check(lambda m, scale=scale: setattr(m, "scale", scale))
    check(lambda m: setattr(m, "active", ""))
    check(lambda m: (setattr(m, "active", "b"), m.merge(1), setattr(m, "active", "")))
    check(lambda m: (setattr(m, "active", "b"), m.merge(-1), setattr(m, "active", "")))
    for layer in layers:
        layer.qkv = layer.qkv.base
    assert_same(compiled, tower, IMAGE)
    assert "recompile_limit" not in stats(tower).refusals


@torch.no_grad()
def test_b63_fifty_switches_between_two_adapters_capture_nothing_again() -> None:
    """Two adapters in turns are two graphs with one capture each."""
    tower = small()
    layer = tower.blocks[0].attn.qkv = Adapted(tower.blocks[0].attn.qkv)
    layer.add("a", 1)
    layer.add("b", 2)
    compiled = compile_tower(tower)
    for step in range(50):
        layer.active = "ab"[step % 2]
        assert_same(compiled, tower, IMAGE)
    assert (stats(tower).hits, stats(tower).captures, stats(tower).graphs) == (50, 2, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning:peft.*")
@torch.no_grad()
def test_b63_adapters_of_peft() -> None:
    """PEFT's LoRA added, switched, scaled, disabled, merged, unmerged, deleted."""
    peft = pytest.importorskip("peft")
    from peft.tuners.lora import LoraLayer

    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    torch.manual_seed(0)  # of the adapters' weights
    config = peft.LoraConfig(r=4, target_modules=["qkv"], init_lora_weights=False)
    model = peft.PeftModel(tower, config, adapter_name="a")
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False))
    model.eval()
    layers = [m for m in tower.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 2
    seen = [testing.flatten(run(tower, IMAGE))[0]]
    steps: list[Callable[[], Any]] = [
        lambda: model.set_adapter("b"),
        lambda: model.set_adapter("a"),
        lambda: [layer.scale_layer(3.0) for layer in layers],
        lambda: [layer.unscale_layer() for layer in layers],
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
        lambda: model.base_model.merge_adapter(),
        lambda: model.base_model.unmerge_adapter(),
        lambda: model.set_adapter("b"),
        lambda: model.delete_adapter("a"),
    ]
    with torch._dynamo.config.patch(recompile_limit=32):
        for step in steps:
            step()
            seen.append(assert_same(compiled, tower, IMAGE, exact=False)[0])
        base = model.unload()
        assert_same(compiled, base, IMAGE, exact=False)
    assert not torch.equal(seen[1], seen[2])


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hook(tower: nn.Module) -> Any:
    return tower.blocks[0].attn.proj.register_forward_hook(lambda module, args, output: output * 2)


def _hook_of_the_tower(tower: nn.Module) -> Any:
    return tower.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def _pre_hook(tower: nn.Module) -> Any:
    return tower.blocks[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _hook_with_kwargs(tower: nn.Module) -> Any:
    return tower.blocks[1].norm1.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)


HOOKS = {"forward": _hook, "the tower's own": _hook_of_the_tower, "pre": _pre_hook, "with kwargs": _hook_with_kwargs}


def test_b64_hooks_added_and_removed_after_the_compile() -> None:
    """Dynamo by itself does not look for hooks that were added: here the next call has them, and loses them again. Each kind
    by itself, the last beside a second one.
    """
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    plain = testing.flatten(run(tower, IMAGE))
    for name, hook in HOOKS.items():
        handle = hook(tower)
        assert_same(compiled, tower, IMAGE)
        assert differs(tower, plain), name
        if name == list(HOOKS)[-1]:
            second = _hook(tower)
            assert_same(compiled, tower, IMAGE)
            second.remove()
        handle.remove()
        assert_same(compiled, tower, IMAGE)
        assert not differs(tower, plain), name
    assert "recompile_limit" not in stats(tower).refusals


def test_b64_a_hook_of_another_tower_stays_there() -> None:
    """Two towers share a graph; one gets a hook."""
    a, b = small(seed=1), small(seed=2)
    compiled_a, compiled_b = compile_tower(a), compile_tower(b)
    assert_same(compiled_a, a, IMAGE)
    assert_same(compiled_b, b, IMAGE)
    handle = _hook(b)
    for _ in range(2):
        assert_same(compiled_a, a, IMAGE)
        assert_same(compiled_b, b, IMAGE)
    handle.remove()
    assert_same(compiled_b, b, IMAGE)


def _double_linear(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Linear) else None


def _double_into_linear(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,) if isinstance(module, nn.Linear) else None


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks:UserWarning")
@pytest.mark.parametrize("name", ["forward", "pre"])
def test_b64_hooks_for_all_modules_added_and_removed(name: str) -> None:
    """Hooks of the process, too: the next call has them, and loses them again."""
    tower = small()
    compiled = compile_tower(tower)
    plain = assert_same(compiled, tower, IMAGE)
    modules = torch.nn.modules.module
    register = {
        "forward": lambda: modules.register_module_forward_hook(_double_linear),
        "pre": lambda: modules.register_module_forward_pre_hook(_double_into_linear),
    }
    handle = register[name]()
    try:
        assert_same(compiled, tower, IMAGE)
        assert differs(tower, plain)
    finally:
        handle.remove()
    assert_same(compiled, tower, IMAGE)
    assert (stats(tower).hits, stats(tower).graphs) == (3, 2)


def test_a_forward_put_in_later_is_seen() -> None:
    """`forward` of one module, and of a class, replaced after the compile and put back: each call is eager's."""
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    plain = testing.flatten(run(tower, IMAGE))
    mlp = tower.blocks[0].mlp
    original = type(mlp).forward

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return original(self, x) * 2

    for owner, double in ((mlp, types.MethodType(doubled, mlp)), (type(mlp), doubled)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "forward", double)
            assert_same(compiled, tower, IMAGE)
            assert differs(tower, plain)
        vars(mlp).pop("forward", None)
        assert_same(compiled, tower, IMAGE)
        assert not differs(tower, plain)


def test_what_hooks_keep_is_eagers_and_stays() -> None:
    """Features that a hook collects are those of each call, and no later call changes them."""
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    kept: list[Tensor] = []
    tower.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output))
    held = []
    for seed, layout in enumerate((IMAGE, MIXED, IMAGE)):
        kept.clear()
        assert_same(compiled, tower, layout, seed=seed)
        ours, eagers = kept[:2]  # a third is the reference's, where there is one
        if DEVICE == "cpu":
            assert torch.equal(ours, eagers)
        held.append((ours, ours.clone()))
    assert all(torch.equal(now, then) for now, then in held)


def test_b64_a_hook_that_switches_gradients() -> None:
    """Parts of a tower with gradients off, then on again: eager's gradients, and eager's mode after a call without any."""
    tower = small()
    tower.blocks[0].attn.register_forward_pre_hook(lambda module, args: torch.set_grad_enabled(False) and None)
    tower.blocks[0].attn.register_forward_hook(lambda module, args, output: torch.set_grad_enabled(True) and None)
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for call in (compiled, twin):
        call(pixels, grid_thw=grid).pooler_output.square().sum().backward()
    for p, q in zip(tower.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    after = []
    for call in (compiled, twin):
        with torch.no_grad():
            output = call(pixels, grid_thw=grid).pooler_output
            after.append((torch.is_grad_enabled(), output.requires_grad))
    assert after == [(True, True)] * 2


def test_b64_backward_hooks_and_hooks_on_tensors() -> None:
    """A hook that stops or scales gradients, added after a compiled backward pass, acts in the next."""
    tower = small()
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE)

    def compare() -> None:
        for t, call in ((tower, compiled), (twin, twin)):
            t.zero_grad()
            call(pixels, grid_thw=grid).pooler_output.square().sum().backward()
        for p, q in zip(tower.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)

    compare()
    for t in (tower, twin):
        t.blocks[1].norm1.weight.register_hook(lambda grad: grad * 3)
    compare()


# --- modes ------------------------------------------------------------------------------------------------------------


def test_set_attn_implementation_between_calls() -> None:
    """sdpa, eager, sdpa: eager's result each time, all from buckets."""
    tower = small("qwen3_vl")
    compiled = compile_tower(tower)
    for implementation in ("sdpa", "eager", "sdpa", "eager"):
        tower.set_attn_implementation(implementation)
        assert_same(compiled, tower, IMAGE, exact=False)
    assert stats(tower).hits == 4


# Two orders, one the other backwards: each mode is traced first or last, and each transition is there in both directions.
DTYPES = (None, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("order", [DTYPES, DTYPES[::-1]])
def test_b67_autocast_of_any_dtype_in_any_order(order: tuple[Any, ...]) -> None:
    """No mode's graph serves another mode, and weights that are edited under autocast are new in all of them."""
    tower = small(depth=1)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for dtype in (*order, *order):
        with torch.no_grad(), torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            tower.blocks[0].mlp.fc1.weight.mul_(1.5)
            a, b = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
        assert a.pooler_output.dtype == b.pooler_output.dtype
        assert_equal(a, b, tower, pixels, grid_thw=grid)
    # A tower that enters a region without autocast of its own (transformers 5.17) runs as an ordinary graph under autocast.
    assert stats(tower).graphs == 3
    assert stats(tower).hits == 6 or set(stats(tower).fallbacks) == {"side_effect"}


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext}


@pytest.mark.parametrize("order", [tuple(MODES), tuple(MODES)[::-1]])
def test_b64_modes_in_any_order(order: tuple[str, ...]) -> None:
    """Pixels made in one mode, called in another, a backward pass where there are gradients: values, gradients, reasons."""
    tower = small(depth=1)
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower)
    for made, called in itertools.product(order, order):
        if (made, called) == ("inference", "grad"):
            continue  # eager itself cannot save inference tensors for a backward pass
        with MODES[made]():
            pixels, grid = testing.make_inputs(tower, IMAGE)
        with MODES[called]():
            a, b = compiled(pixels, grid_thw=grid), twin(pixels, grid_thw=grid)
        assert a.pooler_output.requires_grad is b.pooler_output.requires_grad
        assert a.pooler_output.is_inference() is b.pooler_output.is_inference()
        assert_equal(a, b, twin, pixels, grid_thw=grid, exact=called != "grad")
        if called == "grad":
            for t, output in ((tower, a), (twin, b)):
                t.zero_grad()
                output.pooler_output.square().sum().backward()
            for p, q in zip(tower.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert stats(tower).fallbacks == {"gradients": 2}
    assert stats(tower).hits == stats(tower).calls - 2


def test_b23_training_and_evaluation() -> None:
    """train() and eval() in turns; the zero image that trainers push through gives eager's gradients."""
    tower = small()
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower)
    grid = tensor([[1, 4, 4]])
    for step in range(2):
        assert_same(compiled, tower, IMAGE)
        real, _ = testing.make_inputs(tower, IMAGE, seed=step)
        for pixels, weight in ((torch.zeros_like(real), 0.0), (real, 1.0)):
            for t, call in ((tower, compiled), (twin, twin)):
                t.train()
                t.zero_grad()
                (call(pixels, grid_thw=grid).pooler_output.mean() * weight).backward()
            for p, q in zip(tower.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        assert_same(compiled, tower, IMAGE)
        tower.eval()
    assert stats(tower).fallbacks == {"gradients": 4}


def test_b64_a_frozen_tower_and_pixels_that_need_gradients() -> None:
    """A frozen tower is captured in grad mode; pixels that need gradients get them; and back."""
    tower = small().requires_grad_(False)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for _ in range(2):
        assert_equal(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)
        grads = []
        for call in (compiled, tower):
            leaf = pixels.clone().requires_grad_()
            call(leaf, grid_thw=grid).pooler_output.square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert (stats(tower).hits, stats(tower).fallbacks) == (2, {"gradients": 2})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_function_in_a_mode_without_gradients_is_captured(mode: Any) -> None:
    """A decorated function compiled as a whole wants no gradients, although it is called in grad mode; under inference mode its
    results are inference tensors, as eager's are.
    """
    tower = small()

    @mode()
    def function(pixels: Tensor, grid: Tensor) -> Tensor:
        return tower(pixels, grid_thw=grid).pooler_output

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    for layout in (IMAGE, MIXED, IMAGE):
        pixels, grid = testing.make_inputs(tower, layout)
        output = compiled(pixels, grid)
        assert not output.requires_grad
        assert output.is_inference() is (mode is torch.inference_mode)
        torch.testing.assert_close(output, function(pixels, grid))
    assert (stats(tower).hits, stats(tower).graphs) == (3, 1)


@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode_differentiation(frozen: bool) -> None:
    """A dual input gets eager's tangent, or an error that says so where weights require gradients, too; never a wrong one."""
    forward_ad = torch.autograd.forward_ad
    tower = small().requires_grad_(not frozen)
    tower.set_attn_implementation("eager")  # the kernels of the others have no formula for it
    compiled = compile_tower(tower)
    assert_same(compiled, tower, MIXED, exact=False)
    pixels, grid = testing.make_inputs(tower, MIXED)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(pixels, torch.ones_like(pixels))
        expected = forward_ad.unpack_dual(tower(dual, grid_thw=grid).pooler_output).tangent
        if not frozen:
            with pytest.raises(NotImplementedError, match="jvp"):
                compiled(dual, grid_thw=grid)
            return
        tangent = forward_ad.unpack_dual(compiled(dual, grid_thw=grid).pooler_output).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-3, atol=1e-4)
    assert stats(tower).fallbacks == {"forward_ad": 1}
    assert_same(compiled, tower, MIXED, exact=False)


def test_switches_of_the_process() -> None:
    """Precision of products, deterministic algorithms, the default dtype: a capture of one setting serves no other."""
    tower = small()
    compiled = compile_tower(tower)
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    pixels, grid = testing.make_inputs(tower, IMAGE)

    def check(captures: int) -> None:
        with torch.no_grad():
            assert_equal(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)
        assert stats(tower).captures == captures

    check(1)
    try:
        torch.set_float32_matmul_precision("medium")
        check(2)
        torch.set_float32_matmul_precision("high")
        check(3)
        torch.set_float32_matmul_precision(precision)
        check(3)
        torch.use_deterministic_algorithms(True)
        check(4)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float64)
        check(5)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(dtype)
    check(5)


def test_a_call_on_tensors_without_values() -> None:
    """Somebody else's fake tensors: eager's own error, and the tower goes on."""
    tower = small()
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for call in (tower, compiled):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), pytest.raises(DataDependentOutputException):
            call(mode.from_tensor(pixels), grid_thw=mode.from_tensor(grid))
    assert_same(compiled, tower, IMAGE)


def test_a_function_partly_under_no_grad_keeps_its_gradients() -> None:
    """A frozen part under `no_grad` before a part that learns: the ordinary path, with eager's gradients."""
    tower = small()
    head = nn.Linear(32, 4, device=DEVICE)

    def function(pixels: Tensor, grid: Tensor) -> Tensor:
        with torch.no_grad():
            features = tower(pixels, grid_thw=grid).pooler_output
        return head(features)

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    pixels, grid = testing.make_inputs(tower, IMAGE)
    grads = []
    for call in (compiled, function):
        head.zero_grad()
        call(pixels, grid).square().sum().backward()
        grads.append(head.weight.grad.clone())
    torch.testing.assert_close(*grads)
    assert stats(tower).fallbacks == {"gradients": 1}


# --- weights that are no plain tensors --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchao warns about its own extensions
def test_b70_quantised_weights_of_torchao() -> None:
    """int8 weights of torchao have several storages: eager's result, on a path that watches none of them."""
    torchao = pytest.importorskip("torchao.quantization")
    tower = small()
    compiled = compile_tower(tower)
    plain = assert_same(compiled, tower, IMAGE)
    torchao.quantize_(tower, torchao.Int8WeightOnlyConfig())
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bitwise(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid))
    assert differs(tower, plain)
    assert stats(tower).fallbacks == {"tensor_subclass": 2}


class TwoStorages(Tensor):
    """A weight of two tensors, as quantisation libraries write them: its own address means nothing."""

    @staticmethod
    def __new__(cls, whole: Tensor, rest: Tensor) -> TwoStorages:  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)

    def __init__(self, whole: Tensor, rest: Tensor) -> None:
        self.whole, self.rest = whole, rest

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "rest"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> TwoStorages:
        return TwoStorages(tensors["whole"], tensors["rest"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].rest)
        plain = torch.utils._pytree.tree_map(lambda x: x.whole + x.rest if isinstance(x, TwoStorages) else x, args)
        return func(*plain, **(kwargs or {}))


def test_b70_weights_of_several_storages() -> None:
    """A wrapper subclass takes the ordinary path with a reason, and edits of what it wraps are seen."""
    if DEVICE != "cpu":
        pytest.skip("compared bit for bit: the float64 reference would copy the tower, and torch 2.11 cannot copy the subclass")
    tower = small().requires_grad_(False)
    weight = tower.blocks[0].attn.proj.weight
    wrapped = TwoStorages(weight.detach().clone(), torch.zeros_like(weight))
    tower.blocks[0].attn.proj.weight = nn.Parameter(wrapped, requires_grad=False)
    compiled = compile_tower(tower)
    for step in range(3):
        tower.blocks[0].attn.proj.weight.rest.fill_(0.1 * step)
        assert_same(compiled, tower, IMAGE)
    assert stats(tower).fallbacks == {"tensor_subclass": 3}


@pytest.mark.slow
def test_b69_offloaded_weights_of_accelerate() -> None:
    """Weights that hooks bring in before each layer and take away after it: eager's result and a reason or a hit."""
    accelerate = pytest.importorskip("accelerate")
    tower = small()
    expected = testing.flatten(run(tower, IMAGE))
    accelerate.cpu_offload(tower, execution_device=torch.device(DEVICE))
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE, dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        for _ in range(2):
            for a, b in zip(testing.flatten(compiled(pixels, grid_thw=grid)), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _gelu_without_tanh(tower: nn.Module) -> None:
    tower.blocks[1].mlp.act_fn.act = functools.partial(nn.functional.gelu, approximate="none")


def _other_module(tower: nn.Module) -> None:
    tower.blocks[1].mlp.act_fn = type(tower.blocks[1].mlp.act_fn)()
    tower.blocks[1].mlp.act_fn.act = nn.functional.silu


def _as_it_was(tower: nn.Module) -> None:
    tower.blocks[1].mlp.act_fn.act = functools.partial(nn.functional.gelu, approximate="tanh")


def test_activations_replaced_after_the_compile() -> None:
    """A partial in a module, of which Dynamo's guards are put together, and a module that holds one: seen by the next call."""
    tower = small("qwen3_vl")
    tower.blocks[1].mlp.act_fn.act = functools.partial(nn.functional.gelu, approximate="tanh")  # as transformers before 5.20
    compiled = compile_tower(tower)
    before = assert_same(compiled, tower, IMAGE)
    for change in (_gelu_without_tanh, _as_it_was, _other_module, _as_it_was):
        change(tower)
        for seed in range(2):
            assert_same(compiled, tower, IMAGE, seed=seed)
        assert torch.equal(assert_same(compiled, tower, IMAGE)[0], before[0]) == (change is _as_it_was)


def test_parameters_of_another_dtype_than_the_graph_was_made_for() -> None:
    """Handed to a graph whose pieces read float32, as Dynamo of torch 2.11 does: run by operators, and never captured."""
    tower = small("qwen2_5_vl")
    compiled = compile_tower(tower, inner="inductor")
    assert_same(compiled, tower, IMAGE, exact=False)
    (part,) = live_towers(tower)
    seen: list[Any] = []
    part.watchers.append(lambda part, args, results: seen.append(list(args)))
    assert_same(compiled, tower, IMAGE, exact=False)
    args = seen[0]
    weight = tower.blocks[0].norm1.weight
    place = next(i for i, argument in enumerate(args) if argument is weight)
    captures = stats(tower).captures
    args[place] = weight.detach().bfloat16()
    weight.data = weight.data.bfloat16()
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with torch.no_grad():
        for _ in range(2):
            ours, eager = part.serve(args), testing.flatten(tower(pixels, grid_thw=grid))
            assert all(any(torch.allclose(o, e, rtol=1e-4, atol=1e-4) for o in ours if o.shape == e.shape) for e in eager)
    assert stats(tower).fallbacks == {"other_parameters": 2}
    assert stats(tower).captures == captures
