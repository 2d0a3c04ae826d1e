"""The life of a compile: what happens between Dynamo handing over a graph and a call of it.

::

    graph ─▶ gradients wanted?            ─▶ ordinary compile (right gradients, no capture)
          ─▶ crops of padded images?      ─▶ they run in front of what follows (passes/take_out_crops.py)
          ─▶ passes (passes/__init__.py)  ─▶ CompiledTower (runtime.py)
          └▶ cannot be taken apart        ─▶ ordinary compile, with a reason that is counted
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import _dynamo_call, _torch, batching, lowering
from .attention import KernelChoice, choose_for
from .attention.measured import MeasuredChoice
from .counters import CallRecord, Stats, combine
from .crops import CROPS
from .debug import Dump
from .early_start import start_attention
from .errors import Refused, VitcgError
from .marking import refuse_in_backend, steps_taken
from .options import Options
from .owners import NO_GRAPH, Owners, ids_of, not_traced, why_in_parts
from .parts import tokens_of_image
from .passes import CompiledBody, Ineligible, PieceCache, compile_body, give_tokens
from .passes.outer_no_grad import enters_inference_mode, outer_no_grad, turns_gradients_on, without_grad_modes
from .passes.take_out_crops import Crops, take_out_crops
from .planning import Planner
from .runtime import CompiledTower

__all__ = ["live_towers", "replay_of", "reset", "stats", "vitcg"]

log = _torch.log
_cache = PieceCache()
_live: weakref.WeakSet[Any] = weakref.WeakSet()
_live_lock = threading.Lock()  # a thread may compile while another looks through them


def vitcg(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: ``torch.compile(tower, backend="vitcg", options={...})``.

    Args:
        gm: the graph that Dynamo traced; parameters are inputs of it.
        example_inputs: its first real inputs.
        options: see `vitcg_backend.Options`.
        mode: must be left out.

    Returns:
        What Dynamo calls with the inputs of the graph.

    Raises:
        OptionError: an unknown option or a value that is not allowed.
        AttentionUnavailable: the attention asked for by name cannot run here.
        Refused: under ``strict=True``, the graph is not bucketed.
    """
    parsed = Options.parse(options, mode)
    lowering.install()
    _dynamo_call.guard_on_hooks()
    _dynamo_call.merge_guards()
    counters = Stats(graphs=1, refusals={**why_in_parts(), **steps_taken()})
    dump = Dump(parsed.dump_dir)
    _note_recompiles(counters)
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    special = next((t for t in tensors if _torch.is_traceable_wrapper_subclass(t)), None)
    if special is not None:  # a tensor of several storages, such as a quantised weight, has no one address to watch
        return _ordinary(gm, example_inputs, parsed, counters, "tensor_subclass", f"an input is a {type(special).__name__}")
    quiet = outer_no_grad(gm)
    wanted = torch.is_grad_enabled() or (turns_gradients_on(gm) and not torch.is_inference_mode_enabled())
    if quiet is gm and wanted and any(t.requires_grad for t in tensors):
        return _ordinary(gm, example_inputs, parsed, counters, "gradients", "gradients are wanted")
    batching.mark_batch(traced=True)
    batching.watch_batch(gm)
    refused = batching.batch_refusal()
    if refused is not None:
        return _ordinary(gm, example_inputs, parsed, counters, *refused)
    compiled = _cache.compiled
    choice: KernelChoice | None = None

    def begun(body: CompiledBody) -> None:
        nonlocal choice
        calls = body.program.attention
        choice = choose_for(parsed.attention, calls) if calls else None
        if isinstance(choice, MeasuredChoice) and parsed.capture != "never":
            start_attention(
                choice, body, given, Planner(parsed, body.bound.symbols.unit, True, tokens_of_image(body)).ladder.budgets
            )

    plain, operators = _copy(without_grad_modes(quiet)), _copy(gm)
    try:
        crops, _ = take_out_crops(plain), take_out_crops(operators)
        given = example_inputs if crops is None else crops(example_inputs)
        with torch.inference_mode(False):
            body = compile_body(plain, given, options=parsed, cache=_cache, dump=dump, begun=begun)
    except Ineligible as error:
        batching.refuse_batch(error.reason, error.detail)
        _refuse_unproved_form(gm, error.reason, error.detail)
        return _ordinary(gm, example_inputs, parsed, counters, error.reason, error.detail)
    except VitcgError:
        raise
    except Exception as error:  # a fault of ours must not cost the caller more than speed
        log.warning("vitcg could not compile a graph and takes the ordinary path", exc_info=True)
        batching.refuse_batch("internal_error", f"{type(error).__name__}: {error}")
        _refuse_unproved_form(gm, "internal_error", f"{type(error).__name__}: {error}")
        return _ordinary(gm, example_inputs, parsed, counters, "internal_error", f"{type(error).__name__}: {error}")
    counters.pieces, counters.unique_pieces = sum(p.uses for p in body.program.pieces), _cache.compiled - compiled
    if body.refusal is not None:
        batching.refuse_batch(body.refusal.reason, body.refusal.detail)
        _refuse_unproved_form(gm, body.refusal.reason, body.refusal.detail)
        counters.refusals[body.refusal.reason] = body.refusal.detail
        if parsed.strict:
            raise Refused(body.refusal.reason, body.refusal.detail)
    batching.note_size()
    give_tokens(operators)
    _torch.generate_code(operators)
    tower = CompiledTower(body, choice, parsed, counters, operators, given)
    tower.leave_out_parameters()
    return _served_by(tower, in_inference_mode=quiet is not gm and enters_inference_mode(gm), crops=crops)


def _refuse_unproved_form(gm: fx.GraphModule, reason: str, detail: str) -> None:
    """The packed form of a forward is right where rows meet in attention over segments alone, which is what was not proved."""
    if any(node.target in CROPS for node in gm.graph.nodes):
        refuse_in_backend(f"{reason}: {detail}")


def _note_recompiles(counters: Stats) -> None:
    """Calls beyond Dynamo's limit of graphs reach no backend and no counter: say so while there is somebody to say it."""
    left, limit = _torch.graphs_left()
    if left <= 0:
        counters.refusals["recompile_limit"] = (
            f"this is the last of {limit} graphs that Dynamo makes for one function: further kinds of calls run in eager mode "
            "and are not counted here. Raise torch._dynamo.config.recompile_limit, or call the tower in fewer ways."
        )


def _served_by(
    callee: CompiledTower | _Ordinary, in_inference_mode: bool = False, crops: Crops | None = None
) -> Callable[..., Any]:
    """A plain function around a callee, which debuggers of Dynamo such as depyf expect; it keeps the callee alive."""
    with _live_lock:
        _live.add(callee)

    def vitcg_graph(*args: Any) -> Any:
        return callee(*args) if crops is None else callee(*crops(args))

    def vitcg_graph_in_inference_mode(*args: Any) -> Any:
        with torch.inference_mode():
            return vitcg_graph(*args)

    return vitcg_graph_in_inference_mode if in_inference_mode else vitcg_graph


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that the passes may change: Dynamo's own graph stays for the ordinary path."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    return _torch.lazy_module(gm, graph)


def _all_live() -> list[Any]:
    with _live_lock:
        return list(_live)


class _Ordinary:
    """A graph on the ordinary path, with its calls counted."""

    def __init__(self, function: Callable[..., Any], counters: Stats, reason: str, owners: Owners) -> None:
        self.function, self.stats, self.reason, self.owners = function, counters, reason, owners

    def __call__(self, *args: Any) -> Any:
        self.owners.note(args)
        self.stats.record(CallRecord(False, self.reason, 0, 0, 0, None, 0.0))
        return self.function(*args)

    def belongs_to(self, ids: set[int]) -> bool:
        """Whether a tower with a module or tensor of these ids uses it."""
        return self.owners.belongs_to(ids)

    def clear(self) -> None:
        """Nothing is kept."""


def _ordinary(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, counters: Stats, reason: str, detail: str
) -> Callable[..., Any]:
    """The same lowered graph through Inductor, or operator by operator with ``inner="eager"``."""
    log.info("vitcg takes the ordinary path [%s]: %s", reason, detail)
    gm = _copy(gm)
    give_tokens(gm)
    _torch.generate_code(gm)
    counters.refusals[reason] = detail
    if options.strict:
        raise Refused(reason, detail)
    function: Callable[..., Any] = gm.forward
    if options.inner == "inductor":
        try:
            function = _torch.compile_ordinary(gm, example_inputs)
        except Exception as error:  # whatever Inductor cannot do with this graph, its operators can
            log.warning("vitcg runs a graph operator by operator, Inductor failed: %s: %s", type(error).__name__, error)
            counters.refusals["inductor"] = f"{type(error).__name__}: {error}"
    return _served_by(_Ordinary(function, counters, reason, Owners(example_inputs)))


def stats(tower: torch.nn.Module | None = None) -> Stats:
    """Counters of a tower (compiled or not, the same parameters count), or of everything with ``tower=None``.

    A snapshot: take it again after more calls. Towers of one class that share a graph share its counters. Where Dynamo ran
    parts of the tower in eager mode, which reach no backend and no counter, or all of it, `refusals` says so.

    Raises:
        TypeError: `tower` is no module.
    """
    parts = _all_live()
    if tower is not None:
        if not isinstance(tower, torch.nn.Module):
            raise TypeError(f"stats() takes a tower, compiled or not, or nothing; got {type(tower).__name__} {tower!r:.60}.")
        owned = ids_of(tower)
        parts = [part for part in parts if part.belongs_to(owned) or part.owners.traced_in(tower)]
    total = combine([part.stats for part in parts])
    if tower is not None:
        total.refusals |= not_traced(tower)
        if not parts:
            total.refusals.setdefault("no_graph", NO_GRAPH)
    return total


def live_towers(tower: torch.nn.Module) -> list[CompiledTower]:
    """The compiled graphs of a tower that can use buckets."""
    owned = ids_of(tower)
    return [part for part in _all_live() if isinstance(part, CompiledTower) and part.belongs_to(owned)]


def replay_of(tower: torch.nn.Module) -> Callable[[], None]:
    """The CUDA graph that `tower` replayed last, as a function of nothing (no copies in or out): for benchmarks."""
    for part in live_towers(tower):
        return part.replay_last()
    raise RuntimeError("this tower has no capture: compile it with backend='vitcg' and call it once")


def reset() -> None:
    """Give back every capture, static buffer, layout and compiled piece; `torch._dynamo.reset()` calls it."""
    for part in _all_live():
        part.clear()
    _cache.pieces.clear()
    batching.forget_sizes()


vitcg.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() looks for it
lowering.import_metadata_functions()
lowering.install()
