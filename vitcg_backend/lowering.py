"""Trace-time lowering: while Dynamo traces a tower *for this backend*, metadata and attention become operators.

Eager code is never touched: `torch.compiler.substitute_in_graph` replaces a Python function only while Dynamo inlines it, and
each substitute here acts as the original unless our backend is the one being compiled for. What is lowered is found by
convention, not by a list of models:

* a metadata function becomes one `vitcg::metadata` node: what that is, `metadata_lowering.py` says. Values that the caller
  supplies through ``kwargs`` win, as in eager. `register_lowering` adds functions that the convention does not find.
* an attention function that is called with ``cu_seq_lens_q`` (packed, not causal, no mask) becomes
  `vitcg::varlen_attention`. To reach that branch `is_flash_attention_requested` answers True where its caller holds
  ``cu_seqlens`` and the configured attention is one of those lowered here.

Which sizes are dynamic, and what happens when a trace fails because of all this, is in `marking.py`. Where a call cannot be
lowered after all (dropout in training, say), too, the trace starts again with lowering off for this compile.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _torch
from ._dynamo_blocks import copy_equal_blocks
from .attention import op as _attention_op  # noqa: F401  registers vitcg::varlen_attention
from .crops import image_boundaries, image_positions
from .image_lowering import has_batch, make_check
from .marking import is_refused, refuse
from .metadata_lowering import GRID_NAMES, grid_parameter, is_metadata, make_metadata, untouched
from .packed_forwards import FORMS, forward_of, make_packed

__all__ = ["import_metadata_functions", "install", "lowered_functions", "register_lowering"]

log = _torch.log
_lock = threading.Lock()
_lowered: dict[int, Callable[..., Any]] = {}  # id of an original -> the original, kept alive so that the id stays its own
_scanned = 0


def lowered_functions() -> list[str]:
    """Qualified names of the functions that are lowered in this process."""
    return sorted(f"{f.__module__}.{f.__qualname__}" for f in _lowered.values())


def install() -> bool:
    """Register substitutes for what is imported by now; cheap when nothing is new.

    Returns:
        Whether a function was newly registered.
    """
    global _scanned
    if len(sys.modules) == _scanned:
        return False
    with _lock:
        before = len(_lowered)
        for name, module in list(sys.modules.items()):
            if name == "transformers.vision_utils" or (name.startswith("transformers.models.") and ".modeling_" in name):
                _install_module(module)
        utilities = sys.modules.get("transformers.utils.generic")
        if utilities is not None:
            _substitute(getattr(utilities, "get_max_seqlen", None), _make_max_seqlen)
            _substitute(getattr(utilities, "is_flash_attention_requested", None), _make_flash_requested)
        imports = sys.modules.get("transformers.utils.import_utils")
        _substitute(getattr(imports, "torch_compilable_check", None), functools.partial(make_check, active=_active))
        _substitute(getattr(imports, "is_torchdynamo_compiling", None), _make_entry)
        for function in _attention_functions().values():
            _substitute(function, _make_attention)
        for function in (image_boundaries, image_positions):
            _substitute(function, _metadata)
        _scanned = len(sys.modules)
        return len(_lowered) > before


def import_metadata_functions() -> None:
    """Import what every tower's trace meets first, so that it is lowered however late the tower's own file is imported."""
    for name in ("transformers.vision_utils", "transformers.modeling_utils"):
        try:
            importlib.import_module(name)
        except ImportError as error:  # no transformers, or one without this module: nothing of it can be traced
            log.info("vitcg lowers nothing of transformers: %s", error)


def _install_module(module: types.ModuleType) -> None:
    for name, function in _functions(module):
        if not isinstance(function, types.FunctionType) or function.__module__ != module.__name__:
            continue
        if is_metadata(function):
            _substitute(function, _metadata)
        elif name == "eager_attention_forward":
            _substitute(function, _make_attention)
    form = FORMS.get(module.__name__)
    if form is not None:
        make = functools.partial(make_packed, active=_active, module=module, form=form)
        _substitute(forward_of(module, form.tower), make)


def _functions(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions of a module and static methods of its classes."""
    for name, value in list(vars(module).items()):
        yield name, value
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from ((n, method.__func__) for n, method in list(vars(value).items()) if isinstance(method, staticmethod))


def register_lowering(function: Callable[..., Any], *, grid: str | None = None) -> None:
    """Teach the backend a function that computes metadata with Python loops over a grid.

    While Dynamo traces for this backend the function becomes one operator, and the tower around it one graph. Everywhere
    else it is what it was. Call it before the tower is compiled.

    Args:
        function: a function or static method that gets the grid, numbers, texts and None, per-item tensors of integers, and
            weights, and returns a tensor or a tuple of tensors and whole numbers. It must depend on these arguments alone,
            and what it returns for the rows of an item must not depend on the items after it: that is checked for each
            layout. (A method that takes `self` cannot be registered: move its loop into a function.)
        grid: name of the parameter that is the grid: ``[items, 3]`` (frames, height, width) or ``[items, 2]`` (height,
            width), in patches. Default: the parameter with one of the usual names.

    Raises:
        TypeError: `function` is not a plain Python function.
        ValueError: it has no such parameter.
    """
    function = function.__func__ if isinstance(function, staticmethod) else function
    if not isinstance(function, types.FunctionType):
        name = f"{type(function).__name__} {getattr(function, '__qualname__', function)}"
        what = f"register_lowering takes a plain Python function, not {name}"
        raise TypeError(f"{what}. Move the loop of a method into a function that gets the grid.")
    parameter = grid or grid_parameter(function)
    parameters = list(inspect.signature(function).parameters)
    if parameter not in parameters:
        raise ValueError(
            f"{function.__qualname__}({', '.join(parameters)}) has no parameter {parameter or 'of a usual name'} for the grid; "
            f"usual names are {', '.join(GRID_NAMES)}; name another with grid=..."
        )
    with _lock:
        _substitute(function, functools.partial(make_metadata, active=_active, grid_name=parameter))


def _metadata(function: types.FunctionType) -> Callable[..., Any]:
    return make_metadata(function, active=_active, grid_name=grid_parameter(function) or "")


def _substitute(function: Any, make: Callable[[Any], Callable[..., Any] | None]) -> None:
    if not isinstance(function, types.FunctionType) or id(function) in _lowered:
        return
    try:
        substitute = make(function)
        if substitute is None:
            return
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(substitute)
    except (OSError, TypeError, ValueError) as error:  # no source, or somebody else substituted it already
        log.warning("vitcg cannot lower %s.%s: %s", function.__module__, function.__qualname__, error)
        return
    _lowered[id(function)] = function


def _attention_functions() -> dict[str, Callable[..., Any]]:
    """Name -> function of the attention implementations that transformers registers and that take ``cu_seq_lens_q``."""
    names = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
    modeling = sys.modules.get("transformers.modeling_utils")
    registry = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {})
    return {name: registry[name] for name in names if name in registry}


# --- what runs on real values while Dynamo traces -------------------------------------------------------------------


def _is_vitcg(compiler: Any) -> bool:
    """Follow Dynamo's and `torch.compile`'s wrappers down to the backend function."""
    from .backend import vitcg

    for _ in range(8):
        if compiler is vitcg:
            return True
        for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
            inner = getattr(compiler, name, None)
            if inner is not None and inner is not compiler:
                compiler = inner
                break
        else:
            return False
    return False


@torch._dynamo.assume_constant_result
def _active() -> bool:
    trace = _torch.current_trace()
    if trace is None or not _is_vitcg(trace.output.compiler_fn):
        return False
    if install():  # a modelling file imported since: its own functions were looked up before they were lowered
        trace.speculation_log.clear()
        raise _torch.TraceRestart("vitcg: new functions are lowered")
    if is_refused(trace):
        return False
    copy_equal_blocks(trace)
    return True


@torch._dynamo.assume_constant_result
def _refuse_constant(reason: str) -> None:
    refuse(reason)


@torch._dynamo.assume_constant_result
def _is_packed(implementation: str | None) -> bool:
    """Whether the code that asks holds packed segments and uses an attention that is lowered here."""
    trace = _torch.current_trace()
    caller = trace.output.current_tx
    while caller is not None and caller.f_code.co_filename == __file__:
        caller = caller.parent
    if caller is None or not any(name.startswith(("cu_seqlens", "cu_seq_lens")) for name in caller.symbolic_locals):
        return False
    answer = _attends_here(implementation)
    if answer:
        trace.output._vitcg_packed = {*getattr(trace.output, "_vitcg_packed", ()), caller.f_code}
    return answer


@torch._dynamo.assume_constant_result
def _in_packed_branch() -> bool:
    """Whether the code that calls attention is in the branch that `_is_packed` opened: elsewhere SDPA ignores cu_seqlens."""
    trace = _torch.current_trace()
    caller, opened = trace.output.current_tx, getattr(trace.output, "_vitcg_packed", ())
    while caller is not None:
        if caller.f_code in opened:
            return True
        caller = caller.parent
    return False


@torch._dynamo.assume_constant_result
def _in_form() -> bool:
    """Whether the code that calls attention is called by the packed form of a forward, whose rows are those of all images."""
    caller, forms = _torch.current_trace().output.current_tx, {form.packed.__code__ for form in FORMS.values()}
    while caller is not None and caller.f_code not in forms:
        caller = caller.parent
    return caller is not None


@torch._dynamo.assume_constant_result
def _attends_here_constant(implementation: str | None) -> bool:
    return _attends_here(implementation)


def _attends_here(implementation: str | None) -> bool:
    if implementation in (None, "eager"):
        return True
    function = _attention_functions().get(implementation)
    return function is not None and id(function) in _lowered


# --- the substitutes, inlined by Dynamo -----------------------------------------------------------------------------


def _make_entry(original: types.FunctionType) -> Callable[..., Any]:
    """The substitute of `is_torchdynamo_compiling`, which decorated forwards ask first of all (`capture_outputs`).

    So a forward that is lowered itself is found, however late its file was imported.
    """
    copy = untouched(original)

    def lowered() -> Any:
        _active()
        return copy()

    return lowered


def _make_max_seqlen(original: types.FunctionType) -> Callable[..., Any]:
    copy = untouched(original)

    def lowered(cu_seqlens: Any, config: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen") -> Any:
        if not _active() or not _attends_here_constant(config._attn_implementation):
            return copy(cu_seqlens, config, kwargs=kwargs, kwarg_name=kwarg_name)
        # The kernels take their bound from the bucket, so nothing is read back from the device here.
        return kwargs.pop(kwarg_name, None) if kwargs is not None else None

    return lowered


def _make_flash_requested(original: types.FunctionType) -> Callable[..., Any]:
    copy = untouched(original)

    def lowered(config: Any = None, requested_attention_implementation: Any = None, version: Any = None) -> Any:
        if config is not None and version is None and _active() and _is_packed(config._attn_implementation):
            return True
        return copy(config, requested_attention_implementation, version)

    return lowered


def _make_attention(original: types.FunctionType) -> Callable[..., Any]:
    copy = untouched(original)
    has_own_packed_branch = "flash" in original.__name__

    def lowered(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None and _active() and has_batch():
            torch._check(query.shape[0] >= 1)
        if cu_seqlens is None and _active() and _in_form():
            _refuse_constant("an attention without segments in the packed form of a forward")
        if cu_seqlens is None or not _active():
            return copy(module, query, key, value, attention_mask, *args, **kwargs)
        if not has_own_packed_branch and not _in_packed_branch():
            return copy(module, query, key, value, attention_mask, *args, **kwargs)
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        special = args or is_causal or attention_mask is not None or kwargs.get("dropout", 0.0) != 0.0
        for name in ("position_bias", "cache", "softcap", "s_aux", "sliding_window"):
            special = special or kwargs.get(name) is not None
        if special or query.shape[0] != 1:
            if not has_own_packed_branch:
                _refuse_constant("a packed attention with a mask, a bias, dropout, causality or a batch")
            return copy(module, query, key, value, attention_mask, *args, **kwargs)
        query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        device_type = query.device.type
        if torch.is_autocast_enabled(device_type) and query.dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scale = kwargs.get("scaling")
        return torch.ops.vitcg.varlen_attention(query, key, value, cu_seqlens, scale).unsqueeze(0), None

    return lowered
