"""Every private name of torch that this package uses, here, in `_dynamo_call.py` and in `_dynamo_blocks.py`.

Nothing else imports an underscored module of torch. A function here says which file it leans on, so that what a new torch
changes is mended in one place. 2.11 and 2.13 have run the tests; 2.14 was read, but for `_dynamo_blocks.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._inductor.config
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import exc
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _constrain_range_for_size,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "Ambient",
    "BackendRestart",
    "FakeTensorMode",
    "RandomWatch",
    "ShapeEnv",
    "TraceRestart",
    "UnwrittenIsNan",
    "ambient_state",
    "aot_trace",
    "backend_of",
    "cache_folder",
    "capture_stream",
    "clear_dynamic_marks",
    "compile_ordinary",
    "compile_piece",
    "current_trace",
    "divisions",
    "dynamo_goes_on",
    "eager_error",
    "enable_python_dispatcher",
    "end_failed_capture",
    "failed_compiles",
    "fresh_size",
    "generate_code",
    "graph_break",
    "graphs_left",
    "has_global_hooks",
    "has_values",
    "in_forward_ad",
    "is_data_dependent",
    "is_marked",
    "is_resumed",
    "is_traceable_wrapper_subclass",
    "keep_busy",
    "keep_graphs",
    "known_value",
    "layout_check",
    "lazy_module",
    "leaves_traces",
    "mark_batch",
    "mark_padded_images",
    "mark_rows",
    "new_size",
    "numeric_state",
    "on_failed_trace",
    "poison_pool",
    "pool_held",
    "raw_stream",
    "real_tensors",
    "release_workspaces",
    "root_of",
    "second_fake",
    "size_guards",
    "size_key",
    "start_compile_workers",
    "trace_artifact",
    "traced_code",
    "uncached_fakes",
    "unowned",
    "user_line",
    "watched_by_modes",
]

_MARKS = ("_dynamo_unbacked_indices", "_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices")


# --- Dynamo: the trace that is going on -----------------------------------------------------------------------------


class RandomWatch(TorchDispatchMode):
    """While it is on: whether an operator drew random numbers (torch/utils/_python_dispatch.py, `torch.Tag`)."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the tags of an operator and run it; attention that drops nothing draws nothing, whatever its tag says."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.random |= "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0
        return func(*args, **(kwargs or {}))


class UnwrittenIsNan(TorchDispatchMode):
    """While it is on: memory that an operator asks for and has not written holds NaN (torch/utils/_python_dispatch.py)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and fill what it has only allocated."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and result.dtype.is_floating_point:
            result.fill_(float("nan"))
        return result


_ALLOCATIONS = {getattr(torch.ops.aten, n) for n in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class TraceRestart(exc.RestartAnalysis):
    """Raised while Dynamo traces: start the same trace again (torch/_dynamo/convert_frame.py catches it)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, restart_reason=reason)


class BackendRestart(exc.TensorifyScalarRestartAnalysis):
    """The same, also from inside the backend: the one restart that its caller hands on as it is.

    Source: `OutputGraph._call_user_compiler` (torch/_dynamo/output_graph.py) wraps every other exception.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(restart_reason=reason)


def current_trace() -> Any:
    """The innermost `InstructionTranslator` of this thread (torch/_dynamo/symbolic_convert.py), or None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # outside a trace the thread-local has no `current_tx`
        return None


def on_failed_trace(trace: Any, failed: Callable[[BaseException], None]) -> None:
    """Call `failed` with what ends this trace, unless that is Dynamo's own way of going on (a restart, a graph break) or an
    error of a backend. It may raise `TraceRestart` in its place.

    `OutputGraph.call_cleanup_hooks` (torch/_dynamo/output_graph.py) runs in the ``finally`` of the trace
    (torch/_dynamo/convert_frame.py), where the exception is still the current one.
    """
    expected = (exc.RestartAnalysis, exc.SkipFrame, exc.BackendCompilerFailed)

    def hook() -> None:
        error = sys.exc_info()[1]
        ours = isinstance(error, Exception) and not isinstance(error, expected)
        if ours and (is_data_dependent(error) or not isinstance(error, exc.Unsupported)):  # type: ignore[arg-type]
            failed(error)  # type: ignore[arg-type]  # an Exception, says the line above

    trace.output.add_cleanup_hook(hook)


def keep_graphs(trace: Any) -> None:
    """Where this trace ends in a graph break that Dynamo cannot go on from, its function keeps the graphs that it has.

    Else Dynamo leaves the function to eager mode for good, and with it those graphs: of good calls, and, as all functions that
    one decorator wraps share their code, of other towers. Now the function runs in eager mode for calls without a graph alone;
    what it calls is traced, as ever. Such calls are traced each time, in case the next one is good, up to `_GIVE_UPS` times;
    from then on no further graph is made for the function.

    Source: `TorchDynamoException.frame_exec_strategy` (torch/_dynamo/exc.py), which convert_frame.py hands on; with
    ``RUN_ONLY`` it does so where the limit of recompiles is met. The same in 2.11 and 2.13.
    """
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    code = traced_code(trace)
    place = code.co_filename, code.co_firstlineno

    def hook() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, exc.Unsupported):
            before = sum(frame == place for frame, _, _ in failed_compiles())
            action = FrameAction.DEFAULT if before < _GIVE_UPS else FrameAction.RUN_ONLY
            error.frame_exec_strategy = FrameExecStrategy(action, FrameAction.DEFAULT)

    trace.output.add_cleanup_hook(hook)


_GIVE_UPS = 8


def eager_error(root: Any) -> Exception | None:
    """What the frame that `root` translates raises without any tracer, run with the arguments that it was called with.

    Source: an `InstructionTranslator` keeps code, globals, arguments and closure of its frame
    (torch/_dynamo/symbolic_convert.py); what it calls is not traced, as nothing is during a compile.
    """
    code, values = root.f_code, root.f_locals
    function = types.FunctionType(code, root.f_globals, code.co_name, None, root.closure or ())
    last = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames
    positional = [values[name] for name in names[: code.co_argcount]]
    keywords = {name: values[name] for name in names[code.co_argcount : last]}
    if code.co_flags & inspect.CO_VARARGS:
        positional += values[names[last]]
        last += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keywords |= values[names[last]]
    try:
        with real_tensors(), torch.random.fork_rng(), torch.no_grad():
            function(*positional, **keywords)
    except Exception as error:
        log.debug("eager rejects the call: %s: %s", type(error).__name__, error)
        return error
    return None


def dynamo_goes_on(trace: Any, error: BaseException) -> bool:
    """Whether what ends a trace only makes Dynamo leave its function to eager mode and trace what that calls: without
    ``fullgraph=True`` (`one_graph`, torch/_dynamo/symbolic_convert.py) it does so for `Unsupported` (convert_frame.py).
    """
    return isinstance(error, exc.Unsupported) and not trace.one_graph


def is_data_dependent(error: BaseException) -> bool:
    """Whether a trace failed because it needed a size that nobody knows."""
    while error is not None and not isinstance(error, GuardOnDataDependentSymNode):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return error is not None


def user_line(error: BaseException) -> str:
    """The innermost line of a model's code in the text of an error of Dynamo: ``file.py:12 code``, or an empty text."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.+)', str(error))
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame[0]]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]} {own[-1][2].strip()}" if own else ""


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Inside a trace: compute with real tensors, none of the tracer's modes on."""
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        yield


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds values that may be read: not a fake one of somebody's own tracing, none on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def is_marked(tensor: Tensor) -> bool:
    """Whether any axis of `tensor` is already marked dynamic or unbacked, by a user or by us."""
    return any(getattr(tensor, mark, None) for mark in _MARKS)


def is_resumed(trace: Any) -> bool:
    """Whether a trace is of what follows a graph break: its inputs are whatever was alive there.

    Source: `TORCH_DYNAMO_RESUME_IN_PREFIX` (torch/_dynamo/resume_execution.py).
    """
    return traced_code(trace).co_name.startswith("torch_dynamo_resume_in")


def graph_break(trace: Any) -> str | None:
    """Inside the backend: why the graph is a part of its function, or None (`GraphCompileReason`, output_graph.py)."""
    reason = trace.output.compile_subgraph_reason
    if reason is None or not reason.graph_break:
        return None
    at = reason.user_stack[-1] if reason.user_stack else None
    line = f"`{at.line}` ({os.path.basename(at.filename)}:{at.lineno})" if at is not None else "a line"
    text = str(reason.reason).splitlines()[0]
    if "data-dependent" in text or "Tensor.item()" in text:  # what follows is advice to the author of the line
        example = "such as that of the images or the height of one"
        text = f"Python code there needs a number of which each call has its own, {example}"
    return f"Dynamo breaks the tower at {line}: {text}"


def failed_compiles() -> list[tuple[tuple[str, int], tuple[str, int], str]]:
    """Frames that Dynamo gave up, to run them in eager mode or to raise under ``fullgraph=True``, among the latest 64 compiles
    of the process, whatever their backend: (file, first line) of the frame, (file, line) where it failed, and a text.

    Source: `get_compilation_metrics` and `CompilationMetrics` (torch/_dynamo/utils.py), written by `_compile`
    (torch/_dynamo/convert_frame.py), the same in 2.11 and 2.13.
    """
    from torch._dynamo.utils import get_compilation_metrics

    failed = []
    for one in get_compilation_metrics():
        if one.fail_type != "Unsupported" or one.co_filename is None:  # other failures are errors that the caller sees
            continue
        at = (one.fail_user_frame_filename or one.co_filename, one.fail_user_frame_lineno or one.co_firstlineno or 0)
        why = (one.fail_reason or "").strip().split("\n")[0]
        text = f"Dynamo gives {one.co_name} up at {os.path.basename(at[0])}:{at[1]}: {why}"
        failed.append(((one.co_filename, one.co_firstlineno or 0), at, text))
    return failed


class _WatchedAxes(set[int]):
    """Axes of an unknown size that tell when Dynamo looks one up: the first that a trace begun again hears of them.

    Source: `_automatic_dynamic` (torch/_dynamo/variables/builder.py) asks ``axis in tensor._dynamo_unbacked_indices`` when the
    traced code first touches the tensor; 2.11 and 2.13 alike.
    """

    def __init__(self, axes: Iterable[int], met: Callable[[], None]) -> None:
        super().__init__(axes)
        self._met = met

    def __contains__(self, axis: object) -> bool:
        self._met()
        return super().__contains__(axis)

    def __repr__(self) -> str:
        return repr(set(self))


def mark_batch(tensor: Tensor, met: Callable[[], None], *, any_size: bool = False) -> None:
    """Make the first axis of a real input one unknown size in the next trace, the same for every tensor that is so marked.

    The other axes of images (four axes and more) are constants. Without a hint 1 is not special; from torch 2.13 on the mark
    says that the size is at least 1, before that an operation of the graph does (torch/_dynamo/decorators.py).

    With `any_size` instead: every axis but that of the channels is dynamic, as far as the traced code lets it.

    Args:
        tensor: a real input of the frame that is traced.
        met: called in each trace, as soon as it meets the unknown size.
        any_size: see above.
    """
    _note_marked(tensor)
    if any_size:
        torch._dynamo.maybe_mark_dynamic(tensor, [axis for axis in range(tensor.dim()) if axis != 1 or tensor.dim() < 4])
        return
    mark: Any = torch._dynamo.decorators.mark_unbacked
    bounds = {"min": 1} if "min" in inspect.signature(mark).parameters else {}
    mark(tensor, 0, shape_id="vitcg_batch", **bounds)
    tensor._dynamo_unbacked_indices = _WatchedAxes(tensor._dynamo_unbacked_indices, met)  # type: ignore[attr-defined]
    if tensor.dim() > 3:
        tensor._dynamo_static_indices = set(range(1, tensor.dim()))  # type: ignore[attr-defined]


def mark_rows(tensor: Tensor, axis: int, *, unbacked: bool) -> None:
    """Make `axis` symbolic in the next trace, and every other axis a constant (also under ``dynamic=True``).

    Args:
        tensor: a real input of the frame that is traced.
        axis: its axis of rows.
        unbacked: give the axis a size with no hint, so that 1 is not special (torch/_dynamo/decorators.py).
    """
    mark = torch._dynamo.decorators.mark_unbacked if unbacked else torch._dynamo.maybe_mark_dynamic
    mark(tensor, axis)
    _note_marked(tensor)
    # `torch._dynamo.mark_static` would act on the running trace instead: this is the attribute that it sets outside one.
    tensor._dynamo_static_indices = set(range(tensor.dim())) - {axis}  # type: ignore[attr-defined]


def mark_padded_images(tensor: Tensor) -> None:
    """Make every axis of a real batch of images but that of the channels unknown in the next trace.

    Without hints two sizes that are equal in the first call are not taken for one (``duck_shape``, symbolic_shapes.py).
    """
    torch._dynamo.decorators.mark_unbacked(tensor, [axis for axis in range(tensor.dim()) if axis != 1])
    _note_marked(tensor)
    tensor._dynamo_static_indices = {1}  # type: ignore[attr-defined]  # as in `mark_rows`


_marked: list[Tensor] = []  # by the running compile: Dynamo compiles one frame at a time (`compile_lock`, convert_frame.py)


def _note_marked(tensor: Tensor) -> None:
    """Marks end with the compile that set them, however many traces it takes and whatever ends it.

    A trace may be given up and begun again without coming to the call that marked, and Dynamo goes on with the tower's own
    functions, each a compile of its own on the same tensors. `reset()` empties the handler (torch/_dynamo/callback.py).
    """
    tensor._vitcg_marked = True  # type: ignore[attr-defined]  # see clear_dynamic_marks
    _marked.append(tensor)
    handler = torch._dynamo.callback_handler
    if _end_marks not in handler.end_callbacks:
        handler.register_end_callback(_end_marks)


def _end_marks(*_: Any) -> None:
    while _marked:
        clear_dynamic_marks(_marked.pop())


def clear_dynamic_marks(tensor: Tensor) -> None:
    """Take the marks of `mark_rows` off a tensor that belongs to a caller; a caller's own marks stay."""
    if tensor.__dict__.pop("_vitcg_marked", False):
        for name in [name for name in tensor.__dict__ if name.startswith(("_dynamo_", "_has_dynamo_"))]:
            delattr(tensor, name)


def size_key(tensor: Tensor) -> tuple[Any, ...]:
    """What tells the graphs of one function apart: every size but the first, and the dtype."""
    return (*tensor.shape[1:], str(tensor.dtype))


def leaves_traces(trace: Any) -> bool:
    """Inside a compile: whether the traced code changes an object that was there before: an attribute of a module, a dict.

    An attribute that has its old value again is not changed: transformers sets and resets one in each call. Source:
    `SideEffects.store_attr_mutations` (torch/_dynamo/side_effects.py), and the kinds of `MutationType`
    (torch/_dynamo/variables/base.py).
    """
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = trace.output.side_effects
    for variable in effects.id_to_variable.values():
        if isinstance(variable.mutation_type, ValueMutationExisting) and effects.is_modified(variable):
            return True
        if isinstance(variable.mutation_type, AttributeMutationExisting):
            owner = getattr(variable, "value", None)
            for name, written in effects.store_attr_mutations.get(variable, {}).items():
                before = getattr(owner, name, _NOTHING)
                if not (written.is_python_constant() and written.as_python_constant() is before):
                    return True
    return False


_NOTHING = object()


def root_of(trace: Any) -> Any:
    """The translator of the frame that is compiled, which inlined the others; once that trace has ended, `trace` itself."""
    return getattr(trace.output, "root_tx", None) or trace


def traced_code(trace: Any) -> types.CodeType:
    """The code object that is compiled: Dynamo keeps its graphs there."""
    code: types.CodeType = root_of(trace).f_code
    return code


def graphs_left() -> tuple[int, int]:
    """Inside a compile: how many more graphs Dynamo will make for the code that it traces, and its limit.

    Source: `_debug_get_cache_entry_list` (torch/_dynamo/eval_frame.py) and `config.recompile_limit`.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    limit = int(torch._dynamo.config.recompile_limit)
    trace = current_trace()
    if trace is None:
        return limit, limit
    return limit - len(_debug_get_cache_entry_list(traced_code(trace))) - 1, limit


def backend_of(module: torch.nn.Module) -> tuple[str, Any, dict[str, Any]] | None:
    """(name, function, its keywords) of the backend that a module is compiled with, None where it is not compiled.

    `OptimizedModule.dynamo_ctx` and, of a module that is compiled in place, what `nn.Module._compiled_call_impl` closes over
    (torch/_dynamo/eval_frame.py) lead to the backend as `torch.compile` wraps it (torch/__init__.py, `_TorchCompileWrapper`;
    Inductor has a wrapper without these two attributes). The same in 2.11 and 2.13.
    """
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    callback: Any
    if isinstance(module, OptimizedModule):
        callback = module.dynamo_ctx.callback
    elif module._compiled_call_impl is not None:
        callback = inspect.getclosurevars(module._compiled_call_impl).nonlocals["callback"]
    else:
        return None
    wrapper: Any = innermost_backend(callback)
    return wrapper.compiler_name, getattr(wrapper, "compiler_fn", wrapper), getattr(wrapper, "kwargs", {})


def layout_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the dtype, device, sizes and strides that these have now.

    Dynamo's own check of tensors, which torch 2.11 skips for the parameters of modules whose dictionaries have not changed:
    ``weight.data = weight.data.t()`` goes unseen there. Source: `TensorGuards` (torch/csrc/dynamo/guards.cpp). It never holds
    where one tensor is given twice: of tied weights the first is checked, the others must be that object.
    """
    from torch._C._dynamo.guards import TensorGuards

    first: dict[int, int] = {}
    same = [(i, first[id(t)]) for i, t in enumerate(tensors) if first.setdefault(id(t), i) != i]
    places = list(first.values())
    unique = [tensors[i] for i in places]
    sizes, strides = [list(t.shape) for t in unique], [list(t.stride()) for t in unique]
    check = TensorGuards(*unique, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    if not same:
        return check

    def function(*given: Tensor) -> bool:
        return all(given[i] is given[j] for i, j in same) and check(*[given[i] for i in places])

    return function


# --- sizes ----------------------------------------------------------------------------------------------------------


def fresh_size() -> Any:
    """In a fake implementation: a size nobody knows yet (`get_ctx().new_dynamic_size()` without its global flag)."""
    shape_env = torch.library.get_ctx()._shape_env
    size = shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def new_size(shape_env: ShapeEnv, name: str, hint: int) -> tuple[Any, Any]:
    """A backed size in a private `ShapeEnv`: (its sympy symbol, its SymInt)."""
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return symbol, shape_env.create_symintnode(symbol, hint=hint, source=source)


def divisions(expression: Any) -> list[tuple[Any, Any]]:
    """(dividend, divisor) of the whole divisions and remainders in a size or guard (torch/utils/_sympy/functions.py)."""
    found = expression.atoms(FloorDiv, CleanDiv, Mod, PythonMod) if hasattr(expression, "atoms") else ()
    return [(division.args[0].expand(), division.args[1]) for division in found]


def size_guards(shape_env: ShapeEnv, symbols: Sequence[Any]) -> Callable[..., bool]:
    """What a trace has decided by sizes, as a function of their values in the order of `symbols`.

    Source: `ShapeEnv.guards` and `var_to_range` (torch/fx/experimental/symbolic_shapes.py), of which Dynamo makes its guards,
    and their form in Python (`PythonPrinter`, torch/utils/_sympy/printers.py). Sizes without a hint have neither.

    Raises:
        ValueError: a guard is about another size.
    """
    names = {symbol: sympy.Symbol(f"size{number}", integer=True) for number, symbol in enumerate(symbols)}
    texts = []
    for guard in shape_env.guards:
        expression = shape_env.simplify(guard.expr)
        if not expression.free_symbols <= names.keys():
            raise ValueError(f"the trace has decided by {guard.expr}")
        texts.append(f"({PythonPrinter().doprint(expression.xreplace(names))})")
    for symbol, name in names.items():
        known = shape_env.var_to_range.get(symbol)
        if known is not None and symbol in shape_env.backed_var_to_val:
            texts += [f"{name} >= {int(known.lower)}"] + ([f"{name} <= {int(known.upper)}"] if known.upper < 2**62 else [])
    holds = eval(f"lambda {', '.join(map(str, names.values()))}: {' and '.join(texts) or 'True'}", {"math": math})

    def function(*sizes: int) -> bool:
        try:
            return bool(holds(*sizes))
        except ZeroDivisionError:  # sizes too small for a quotient that the trace went on with
            return False

    return function


def second_fake(fake: Tensor) -> Tensor:
    """Another fake tensor with the same sizes over the same storage, without a trip through the dispatcher.

    Source: `snapshot_fake` (torch/fx/experimental/proxy_tensor.py).
    """
    from torch.fx.experimental.proxy_tensor import snapshot_fake

    return snapshot_fake(fake)  # type: ignore[return-value]  # a tensor for a tensor


def uncached_fakes(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Operations on fakes of this mode are worked out anew: to fill torch's cache of them takes as long again.

    Source: `disable_fake_tensor_cache` (torch/_subclasses/fake_tensor.py).
    """
    from torch._subclasses.fake_tensor import disable_fake_tensor_cache

    return disable_fake_tensor_cache(mode)


def known_value(fake: Tensor) -> Any:
    """What a fake tensor knows of the values that it stands for, such as those of ``torch.tensor(2)``, or None.

    Source: `FakeTensor.constant` (torch/_subclasses/fake_tensor.py).
    """
    return getattr(fake, "constant", None)


# --- AOTAutograd and Inductor ---------------------------------------------------------------------------------------


def lazy_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module that makes its code when it is first called, not after each pass: that of a tower is 1500 lines.

    Source: `_LazyGraphModule` (torch/fx/_lazy_graph_module.py), as Inductor uses it.
    """
    return _LazyGraphModule(root, graph)


def generate_code(gm: fx.GraphModule) -> None:
    """Make the code of a lazy module now: its own first call goes by way of ``__call__``, which prints beside errors."""
    _LazyGraphModule.force_recompile(gm)


class _Traced(Exception):
    """Carries the ATen graph out of AOTAutograd before anything is compiled."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        super().__init__("traced")


def aot_trace(gm: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The ATen graph of `gm` for inference: functional, decomposed for Inductor, `meta["val"]` on every node.

    AOTAutograd runs a graph twice, once to see what it mutates and once to trace it without, each time on tensors in two
    wrappers. Most pieces mutate nothing, neither their inputs nor what they have made themselves: for them one trace with
    `make_fx` is the same graph in half of the time. Whatever mutates goes through AOTAutograd.

    Args:
        gm: a module on torch level whose placeholders take `fakes`.
        fakes: fake tensors and SymInts of `mode`.
        mode: the fake mode, with its private `ShapeEnv`.

    Raises:
        whatever torch raises for a graph that it cannot trace.

    Source: `aot_dispatch_base_graph` (torch/_functorch/_aot_autograd/graph_capture.py, 2.13; before that
    dispatch_and_compile_graph.py) calls `make_fx` (torch/fx/experimental/proxy_tensor.py) in the same way.
    """
    with torch._guards.tracing(torch._guards.TracingContext(mode)), torch.no_grad(), uncached_fakes(mode):
        aten = _trace_pure(gm, fakes, mode) or _trace_functional(gm, fakes)
    for node in aten.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = getattr(aten, node.target)
    return aten


def _trace_pure(gm: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule | None:
    """The ATen graph, None if an operation of it mutates something."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return fx.Interpreter(gm).run(*args)

    with mode, enable_python_dispatcher():
        aten = make_fx(run, decomposition_table=_decompositions())(*fakes)
    calls = [node for node in aten.graph.nodes if node.op == "call_function"]
    if any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in calls):
        return None
    aten.graph.eliminate_dead_code()
    aten.recompile()
    return aten


def _trace_functional(gm: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """The ATen graph with every mutation taken out.

    Source: `aot_module_simplified` (torch/_functorch/aot_autograd.py); 2.11 and 2.13 differ in the keywords left out here.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    def stop(aten: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise _Traced(aten)

    try:
        aot_module_simplified(
            gm,
            list(fakes),
            fw_compiler=stop,
            inference_compiler=stop,
            decompositions=_decompositions(),
            keep_inference_input_mutations=True,
        )
    except _Traced as traced:
        return traced.gm
    raise RuntimeError("AOTAutograd handed no graph to its compiler")


def _decompositions() -> dict[Any, Any]:
    """Inductor's, except for the matmul with an activation in its epilogue, which `gelu_epilogue` puts there on purpose, and
    for `add`, which of complex numbers (the others it leaves alone) makes views of another dtype: see `complex_to_real`.
    """
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for operator in (torch.ops.aten._addmm_activation.default, torch.ops.aten.add.Tensor):
        table.pop(operator, None)
    return table


def compile_piece(gm: fx.GraphModule, mode: FakeTensorMode) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Compile an ATen graph with Inductor: a function of one list (``[n, tensor, ...]``) that returns the outputs.

    Source: `compile_fx_inner` and `_recursive_joint_graph_passes` (torch/_inductor/compile_fx.py). Output strides follow the
    traced ones, because the next piece was traced with them.
    """
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext(mode)
    # shape_padding decides by a comparison with the size hint and so guards on n: one compile would serve few buckets.
    config = torch._inductor.config.patch(shape_padding=False)
    with (
        config,
        V.set_fake_mode(mode),
        torch._guards.tracing(context),
        V.set_choices_handler(_choices()),
        torch.no_grad(),
    ):
        _recursive_joint_graph_passes(gm)
        return compile_fx_inner(gm, inputs, is_inference=True, cudagraphs=BoxedBool(False))


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels; it returns at once.

    They take seconds to start, in which Inductor would compile in this process, one kernel after the other. Source:
    `AsyncCompile.use_process_pool` (torch/_inductor/async_compile.py), which starts them when it is first asked.
    """
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def compile_ordinary(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor on a whole Dynamo graph, with its backward where gradients are wanted (torch/_inductor/compile_fx.py)."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs))


def _choices() -> Any:
    """Inductor's heuristics, except that a row of up to 8192 elements is reduced in one pass.

    The stock threshold for an inner reduction is 1024 elements; layer norms of vision towers are 1152 to 5632 wide and
    run about twice as long in a loop (torch/_inductor/choices.py, `should_use_persistent_reduction`).
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class VisionChoices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            if cooperative_reduction or features.get_reduction_hint() != ReductionHint.INNER:
                return False
            return V.graph.sizevars.statically_known_leq(features.reduction_numel, 8192)

    return VisionChoices()


def ambient_state() -> tuple[Any, ...]:
    """Modes that change what a trace records or a compiler makes of it: autocast, the default dtype, `numeric_state`."""
    casts = tuple((kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda"))
    return casts, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), numeric_state()


class Ambient:
    """Grad mode and `ambient_state` without `numeric_state`, asked for one by one only where one of them has changed.

    Source: `GlobalStateGuard` (torch/csrc/dynamo/guards.cpp), which Dynamo looks at in each call for the same reason.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Any] | None = None

    def now(self) -> tuple[Any, ...]:
        """(whether grad mode is on, autocast, default dtype, deterministic algorithms) of the current thread."""
        last = self._last
        if last is None or not last[0].check():
            guard = torch._C._dynamo.guards.GlobalStateGuard()
            last = self._last = guard, (torch.is_grad_enabled(), *ambient_state()[:-1])
        return last[1]  # type: ignore[no-any-return]


def numeric_state() -> tuple[Any, ...]:
    """Switches of the process that choose kernels while a graph is captured and that Dynamo does not guard.

    It guards deterministic algorithms and TF32 on or off (torch/csrc/dynamo/guards.cpp, `GlobalStateGuard`). These are read as
    `torch.backends` reads them (torch/backends/__init__.py, torch/backends/cudnn/__init__.py), without its properties.
    """
    return tuple([switch() for switch in _SWITCHES])


_SWITCHES = (
    torch._C._get_float32_matmul_precision,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_enabled,
)


def in_forward_ad() -> bool:
    """Whether a level of forward-mode differentiation is open (torch/autograd/forward_ad.py, `_current_level`)."""
    return forward_ad._current_level >= 0


def watched_by_modes() -> bool:
    """Whether somebody looks at every operation (modes, transforms of torch.func), or has told Dynamo to stay out.

    Sources: torch/utils/_python_dispatch.py, torch/overrides.py, torch/_functorch/pyfunctorch.py, and the stance of
    `torch.compiler.set_stance` (torch/_dynamo/eval_frame.py).
    """
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return bool(modes) or transformed or torch._dynamo.eval_frame._stance.stance != "default"


def has_global_hooks() -> bool:
    """Whether hooks for all modules are registered (torch/nn/modules/module.py)."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def cache_folder() -> Path:
    """Where torch keeps what it compiles, made if it is not there (torch/_inductor/runtime/cache_dir_utils.py, `cache_dir`)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


# --- CUDA graphs ----------------------------------------------------------------------------------------------------


def unowned(tensor: Tensor) -> Tensor:
    """A tensor over the same CUDA memory that does not own it, so that the graph pool may hand it out again.

    Source: what torch/_inductor/cudagraph_trees.py does with the outputs of a captured graph.
    """
    storage = tensor.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(weak, tensor.storage_offset(), tensor.shape, tensor.stride())


def poison_pool(pool: Any, device: torch.device) -> None:
    """Fill the memory of a graph pool with bytes that are NaN in every floating-point dtype, in stream order.

    Between two replays nothing of a graph in it is alive; what a library has allocated there and keeps is left alone.
    Source: the segments and blocks of `torch.cuda.memory_snapshot` (torch/cuda/memory.py).
    """
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) != tuple(pool) or segment["device"] != device.index:
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            size = block["size"]
            storage = torch._C._construct_storage_from_data_pointer(block["address"], device, size)
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,)).fill_(255)


@contextlib.contextmanager
def pool_held(pool: Any, device_index: int, warm_up: Callable[[], Any]) -> Iterator[None]:
    """Call `warm_up` with the memory of a graph pool, then keep that pool for what is captured inside.

    What a run needs outside the pool would stay with the allocator, unused: the stream of captures has no other work. Source:
    `_use_cuda_memory_pool_manager` (torch/_inductor/cudagraph_trees.py); a pool that nobody holds cannot be taken again
    (`create_or_incref_pool`, c10/cuda/CUDACachingAllocator.cpp).
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
    try:
        try:
            warm_up()
        finally:
            torch._C._cuda_endAllocateToPool(device_index, pool)
        yield
    finally:
        torch._C._cuda_releasePool(device_index, pool)


@functools.cache
def capture_stream(device_index: int) -> Any:
    """The one side stream of a device that everything is captured on: each stream that multiplies keeps a workspace."""
    return torch.cuda.Stream(device_index)


@functools.cache
def second_capture_stream(device_index: int) -> Any:
    """The stream for what a capture runs beside the rest."""
    return torch.cuda.Stream(device_index)


def keep_busy(seconds: float) -> None:
    """Let the current stream do nothing for at least so many seconds (torch/cuda/__init__.py, `_sleep`, which counts cycles).

    Clocks of GPUs are below 2.5 GHz.
    """
    torch.cuda._sleep(int(seconds * 2.5e9))


def release_workspaces() -> None:
    """Let cuBLAS take new workspaces: a graph's own comes from its pool, so that no other stream writes into it.

    Source: what torch/_inductor/cudagraph_trees.py does around a capture (`clear_cublas_manager`).
    """
    torch._C._cuda_clearCublasWorkspaces()


_broken_graphs: list[Any] = []


def end_failed_capture(graph: Any, pool: Any, stream: Any) -> None:
    """Take stream, device allocator and random generator out of a capture that an error has broken.

    `CUDAGraph.capture_end` (aten/src/ATen/cuda/CUDAGraph.cpp) throws before it has told the allocators and the generator that
    the capture is over. The device allocator is told here, the generator by a capture of one operation that succeeds. Nothing
    in Python tells the allocator of pinned memory: to it the pool stays in use, so that no other capture can begin in it, and
    it keeps a pointer to the graph, which therefore stays alive.
    """
    try:
        graph.capture_end()
        return
    except RuntimeError as error:
        log.debug("capture_end after a failed capture: %s", error)
    _broken_graphs.append(graph)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    with torch.cuda.stream(stream):
        scratch = torch.zeros(1, device=stream.device)
        stream.synchronize()
        healthy = torch.cuda.CUDAGraph()
        healthy.capture_begin(capture_error_mode="thread_local")
        scratch.add_(1)
        healthy.capture_end()


def raw_stream(device: torch.device) -> int:
    """The handle of the device's current stream; a tenth of the time of `torch.cuda.current_stream`."""
    return torch._C._cuda_getCurrentRawStream(device.index)


# --- dumps ----------------------------------------------------------------------------------------------------------


def trace_artifact(name: str, gm: fx.GraphModule) -> None:
    """Show a graph to ``TORCH_TRACE`` and to depyf; where neither is on, it is not even printed.

    depyf puts code of its own, which prints the graph at once, into `torch._dynamo.utils.lazy_format_graph_code`; tlparse shows
    what `trace_structured` is given.
    """
    from torch._dynamo import utils
    from torch._logging import trace_structured

    utils.lazy_format_graph_code(name, gm)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
        expect_trace_id=False,
    )


log = logging.getLogger("vitcg_backend")
