"""Trace-time lowering: while Dynamo traces a tower *for this backend*, metadata and attention become operators.

Eager code is never touched: `torch.compiler.substitute_in_graph` replaces a Python function only while Dynamo inlines it, and
each substitute here acts as the original unless our backend is the one being compiled for. What is lowered is found by
convention, not by a list of models:

* a metadata function is named ``get_vision_*``, takes ``grid_thw`` or ``target_sizes`` first and ``kwargs`` last, and lives in
  `transformers.vision_utils` or in a modelling file. It becomes one `vitcg::metadata` node. Values that the caller supplies
  through ``kwargs`` win, as in eager.
* an attention function that is called with ``cu_seq_lens_q`` (packed, not causal, no mask) becomes
  `vitcg::varlen_attention`. To reach that branch `is_flash_attention_requested` answers True where its caller holds
  ``cu_seqlens`` and the configured attention is one of those lowered here.

Which sizes are dynamic, and what happens when a trace fails because of all this, is in `marking.py`. Where a call cannot be
lowered after all (dropout in training, say), too, the trace starts again with lowering off for this compile.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _torch, ops
from .attention import op as _attention_op  # noqa: F401  registers vitcg::varlen_attention
from .marking import is_refused, mark_inputs, refuse

__all__ = ["import_metadata_functions", "install", "lowered_functions"]

log = _torch.log
_GRID_NAMES = ("grid_thw", "target_sizes")
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
        for function in _attention_functions().values():
            _substitute(function, _make_attention)
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
    for name, function in list(vars(module).items()):
        if not isinstance(function, types.FunctionType) or function.__module__ != module.__name__:
            continue
        if name.startswith("get_vision_") and _is_metadata(function):
            _substitute(function, _make_metadata)
        elif name == "eager_attention_forward":
            _substitute(function, _make_attention)


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


def _untouched(function: types.FunctionType) -> Callable[..., Any]:
    """A copy that Dynamo inlines as it is: the substitution goes by the identity of the original."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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
    return not is_refused(trace)


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
    return _attends_here(implementation)


@torch._dynamo.assume_constant_result
def _attends_here_constant(implementation: str | None) -> bool:
    return _attends_here(implementation)


def _attends_here(implementation: str | None) -> bool:
    if implementation in (None, "eager"):
        return True
    function = _attention_functions().get(implementation)
    return function is not None and id(function) in _lowered


@torch._dynamo.assume_constant_result
def _mark_inputs() -> None:
    mark_inputs()


@torch._dynamo.assume_constant_result
def _constants(*items: tuple[str, Any]) -> str:
    return ops.encode_constants(items)


@torch._dynamo.assume_constant_result
def _arity(key: str, columns: int, dtypes: tuple[torch.dtype, ...], constants: str) -> Any:
    try:
        return ops.arity(key, columns, dtypes, constants)
    except RuntimeError as error:
        refuse(str(error))
        raise


# --- the substitutes, inlined by Dynamo -----------------------------------------------------------------------------


def _is_metadata(function: types.FunctionType) -> bool:
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) < 2 or parameters[0] not in _GRID_NAMES or parameters[-1] != "kwargs":
        return False
    return not _delegates(function)


def _delegates(function: types.FunctionType) -> bool:
    """Whether `function` hands its kwargs to another metadata function: then it is inlined, and that one is lowered."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("get_vision_")
        and any(keyword.arg == "kwargs" for keyword in node.keywords)
        for node in ast.walk(tree)
    )


def _popped_keys(function: types.FunctionType) -> tuple[str, ...]:
    """Keys that `function` pops from ``kwargs``, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return tuple(
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pop"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "kwargs"
        and isinstance(node.args[0], ast.Constant)
    )


def _make_metadata(original: types.FunctionType) -> Callable[..., Any]:
    parameters = list(inspect.signature(original).parameters.values())
    names = tuple(p.name for p in parameters)
    defaults = tuple((p.name, p.default) for p in parameters if p.default is not p.empty)
    popped = _popped_keys(original)
    key = f"{original.__module__.rpartition('.')[2]}.{original.__name__}"
    ops.register_function(key, original)
    copy = _untouched(original)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        if not _active():
            return copy(*args, **kwargs)
        bound = dict(defaults)
        for name, value in zip(names, args):  # noqa: B905  fewer arguments than names is the rule
            bound[name] = value
        bound.update(kwargs)
        caller = bound.pop("kwargs")
        grid = bound.pop(names[0])
        _mark_inputs()
        if caller is not None and popped and all(caller.get(k) is not None for k in popped):
            return copy(grid, kwargs=caller, **bound)
        if caller is not None:
            for k in popped:
                caller.pop(k, None)
        tensors: list[Tensor] = []
        items: list[tuple[str, Any]] = []
        for name, value in bound.items():
            if isinstance(value, Tensor):
                items.append((name, {"tensor": len(tensors)}))
                tensors.append(value)
            else:
                items.append((name, value))
        constants = _constants(*items)
        count, numbers = _arity(key, grid.shape[1], tuple(t.dtype for t in tensors), constants)
        tensors_out = torch.ops.vitcg.metadata(key, grid, tensors, constants)
        outputs = tuple(t.shape[0] if i in numbers else t for i, t in enumerate(tensors_out))
        return outputs[0] if count is None else outputs

    return lowered


def _make_max_seqlen(original: types.FunctionType) -> Callable[..., Any]:
    copy = _untouched(original)

    def lowered(cu_seqlens: Any, config: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen") -> Any:
        if not _active() or not _attends_here_constant(config._attn_implementation):
            return copy(cu_seqlens, config, kwargs=kwargs, kwarg_name=kwarg_name)
        # The kernels take their bound from the bucket, so nothing is read back from the device here.
        return kwargs.pop(kwarg_name, None) if kwargs is not None else None

    return lowered


def _make_flash_requested(original: types.FunctionType) -> Callable[..., Any]:
    copy = _untouched(original)

    def lowered(config: Any = None, requested_attention_implementation: Any = None, version: Any = None) -> Any:
        if config is not None and version is None and _active() and _is_packed(config._attn_implementation):
            return True
        return copy(config, requested_attention_implementation, version)

    return lowered


def _make_attention(original: types.FunctionType) -> Callable[..., Any]:
    copy = _untouched(original)
    has_own_packed_branch = "flash" in original.__name__

    def lowered(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None or not _active():
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
