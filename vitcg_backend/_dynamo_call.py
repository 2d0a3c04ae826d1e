"""What Dynamo does in each call of a compiled tower: the guards that it looks at, the arguments that it gathers.

Private names of torch are in this module, too (see `_torch.py`). Each function works inside a compile, on that compile alone.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch import current_trace, root_of

__all__ = ["guard_on_equal_rows", "guard_on_hooks", "guard_on_other_sizes", "leave_out", "merge_guards"]

_STEP = re.compile(r"^root|\.\w+|\[(?:\d+|'[^']*'|\"[^\"]*\")\]")


def guard_on_hooks() -> None:
    """Inside a compile: a hook or a ``forward`` that is put in later, for one module or for all, makes Dynamo trace again.

    Dynamo notes each dict of hooks that it found empty, and then checks none of them unless
    ``config.skip_nnmodule_hook_guards`` is off for the whole process (torch/_dynamo/guards.py, the same in 2.11 and 2.13,
    `GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT`). Of the dicts of hooks for all modules (torch/nn/modules/module.py) and of a
    module's class it checks the type alone. Here this compile alone gets the guards that are missing. Hooks with keyword
    arguments are in the plain dicts, too, and hooks of the backward pass matter where there is one.
    """
    from torch._dynamo.guards import GuardBuilder

    names = ["_forward_hooks", "_forward_pre_hooks"]
    if torch.is_grad_enabled():
        names += ["_backward_hooks", "_backward_pre_hooks"]
    context = torch._guards.TracingContext.try_get()
    trace = current_trace()
    if context is None or trace is None:  # called by hand, not by Dynamo
        return
    guards = context.guards_context.dynamo_guards
    classes: dict[type, Any] = {}
    for guard in list(guards):
        source, kind = guard.originating_source, guard.create_fn_name()
        member = getattr(source, "member", None)
        if (kind, member) in {("EMPTY_NN_MODULE_HOOKS_DICT", name) for name in names} | {
            ("TYPE_MATCH", f"_global{name}") for name in names
        }:
            guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH), collect_debug_stack=False)
        elif kind == "TYPE_MATCH":
            module = _module_of(source, trace)
            if isinstance(module, torch.nn.Module):
                classes.setdefault(type(module), source)
    for cls, source in classes.items():
        for guarded in _forward_of(cls, source):
            guards.add(guarded, collect_debug_stack=False)


def _forward_of(cls: type, source: Any) -> Iterator[Any]:
    """Guards on what a module's class calls ``forward``, by way of the dictionaries of its classes.

    A guard on the attribute itself would keep Dynamo from passing over the module (`merge_guards`).
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import DictGetItemSource, GetItemSource, TypeDictSource, TypeMROSource, TypeSource

    for place, base in enumerate(cls.__mro__):
        own = TypeSource(source) if place == 0 else GetItemSource(TypeMROSource(TypeSource(source)), place)
        if "forward" in vars(base):
            yield DictGetItemSource(TypeDictSource(own), "forward").make_guard(GuardBuilder.ID_MATCH)
            return
        if hasattr(GuardBuilder, "DICT_NOT_CONTAINS"):  # 2.13
            lacks = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key="forward")
        else:
            lacks = functools.partial(GuardBuilder.DICT_CONTAINS, key="forward", invert=True)
        yield TypeDictSource(own).make_guard(lacks)


def merge_guards() -> None:
    """Inside a compile: guards that say the same become one, so that Dynamo can pass over whole modules.

    Where nothing beneath a module is reached through a class or through a `functools.partial`, Dynamo looks at the module's
    dictionaries in place of all guards beneath it, on Python 3.12 (torch/_dynamo/guards.py, `find_tag_safe_roots`). Layers of
    transformers have both, and thousands of guards are then looked at one by one, most of what Dynamo does in a call:

    - the same guard on the same class, reached through several modules: the first stays, for each module's class is guarded;
    - guards on what is in a partial of a builtin function (an activation): one on the module that holds it, which is looked at
      when the module's dictionary has changed; of a change within the partial's own dictionary Dynamo then knows nothing;
    - that every layer holds the same object (its config): that one does, and one guard on what holds the layers for the others;
    - whether a config has some attributes, each of which runs its ``__getattribute__`` in Python: one that looks past that.
    """
    context, trace = torch._guards.TracingContext.try_get(), current_trace()
    if context is None or trace is None:  # called by hand, not by Dynamo
        return
    guards = context.guards_context.dynamo_guards
    typed: set[Any] = {guard.originating_source for guard in guards if guard.create_fn_name() == "TYPE_MATCH"}
    partials = {source: value for source in typed if (value := _plain_partial(source, trace)) is not None}
    seen: set[Any] = set()
    dropped = []
    for guard in guards:
        chain = _chain(guard.originating_source)
        if any(source in partials for source in chain) or _is_repeated(guard, chain, typed, trace, seen):
            dropped.append(guard)
    added = [
        _lambda_guard(source.base, _holds_partial(source.member, value), f"{source.member} is {value}")
        for source, value in partials.items()
    ]
    for replaced, guard in (*_same_in_layers(guards, trace), *_attributes_of_configs(guards, trace)):
        dropped += replaced
        added.append(guard)
    guards.inner -= torch.utils._ordered_set.OrderedSet(dropped)
    index = getattr(guards, "source_to_guards", {})  # torch 2.13 has it, 2.11 does not
    for guard in dropped:
        if guard in index.get(guard.originating_source, ()):
            index[guard.originating_source].remove(guard)
    for guard in added:
        guards.add(guard, collect_debug_stack=False)


def _lambda_guard(source: Any, holds: Callable[[Any], bool], text: str) -> Any:
    """A guard that a function of a source's value holds (`GuardManager.add_lambda_guard`, torch/csrc/dynamo/guards.cpp)."""
    return source.make_guard(lambda builder, guard: builder.get_guard_manager(guard).add_lambda_guard(holds, [text], None))


def _same_in_layers(guards: Any, trace: Any) -> Iterator[tuple[list[Any], Any]]:
    """(guards, one in their place): several places beneath one module of the tower hold the same object.

    Left alone are places in modules whose dictionary Dynamo does not look at for another reason: it would not notice a change.
    """
    watched = {guard.originating_source for guard in guards if guard.create_fn_name() == "NOT_PRESENT_IN_GENERIC_DICT"}
    groups: dict[tuple[Any, Any], list[tuple[Any, Any]]] = {}
    for guard in guards:
        if guard.create_fn_name() != "DUPLICATE_INPUT":
            continue
        place, first = guard.originating_source, guard.create_fn.keywords.get("source_b")
        modules = [s for s in _chain(place)[::-1] if isinstance(_module_of(s, trace), torch.nn.Module)]
        if len(modules) > 1 and modules[-1] is getattr(place, "base", None) and modules[-1] in watched:
            groups.setdefault((first, modules[1]), []).append((guard, place))
    for (_, holder), found in groups.items():
        paths = ["module" + _source_name(place).removeprefix(_source_name(holder)) for _, place in found]
        if len(found) > 1 and all(path.startswith(("module.", "module[")) for path in paths):
            text = " is ".join(paths)
            yield [guard for guard, _ in found[1:]], _lambda_guard(holder, eval(f"lambda module: {text}"), text)


def _attributes_of_configs(guards: Any, trace: Any) -> Iterator[tuple[list[Any], Any]]:
    """(guards, one in their place): which attributes an object has whose ``__getattribute__`` is a Python function.

    Only where Dynamo has traced that function, and guards on it, down to `object.__getattribute__` (`GenericAttrSource`).
    """
    traced = {
        guard.originating_source.base for guard in guards if type(guard.originating_source).__name__ == "GenericAttrSource"
    }
    groups: dict[Any, list[tuple[Any, str]]] = {}
    for guard in guards:
        if guard.create_fn_name() == "HASATTR":
            source, name = _attribute(guard)
            if source in traced:
                groups.setdefault(source, []).append((guard, name))
    for source, found in groups.items():
        value = _value_of(source, trace)
        has, cls = {name: hasattr(value, name) for _, name in found}, type(value)
        plain = isinstance(cls.__getattribute__, types.FunctionType) and not hasattr(cls, "__getattr__")
        if plain and _has(has, value):
            yield (
                [guard for guard, _ in found],
                _lambda_guard(source, functools.partial(_has, has), f"it has, or has not: {has}"),
            )


def _attribute(guard: Any) -> tuple[Any, str]:
    """(source of the object, name) of a guard `HASATTR`: since torch 2.13 a keyword of it, before the source's member."""
    given = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
    source = guard.originating_source
    return (source, given["attr"]) if "attr" in given else (getattr(source, "base", None), getattr(source, "member", ""))


def _has(wanted: dict[str, bool], value: Any) -> bool:
    """Whether an object has the attributes that are marked True and lacks the others."""
    members, cls = object.__getattribute__(value, "__dict__"), type(value)
    return all((name in members or hasattr(cls, name)) == has for name, has in wanted.items())


def _holds_partial(name: str, value: functools.partial[Any]) -> Callable[[Any], bool]:
    """Of a module: whether its attribute `name` is such a partial."""
    function, keywords = value.func, dict(value.keywords)

    def holds(module: Any) -> bool:
        now = vars(module).get(name)
        return type(now) is functools.partial and now.func is function and now.args == () and now.keywords == keywords

    return holds


def _chain(source: Any) -> list[Any]:
    """A source and what it is reached through, outwards."""
    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return chain


def _is_repeated(guard: Any, chain: Sequence[Any], typed: set[Any], trace: Any, seen: set[Any]) -> bool:
    """Whether a guard on a module's class has been seen before, through another module of that class."""
    from torch._dynamo.source import TypeSource

    through = next((source for source in chain if isinstance(source, TypeSource)), None)
    if through is None or through.base not in typed:
        return False
    module = _module_of(through.base, trace)
    if not isinstance(module, torch.nn.Module):
        return False
    create = guard.create_fn
    more = (str(create.args), str(create.keywords)) if isinstance(create, functools.partial) else ()
    path = _source_name(guard.originating_source).replace(_source_name(through), "")
    key = type(module), path, guard.create_fn_name(), more
    repeated = key in seen
    seen.add(key)
    return repeated


def _plain_partial(source: Any, trace: Any) -> functools.partial[Any] | None:
    """The partial that a source names, if a module holds it and three comparisons tell it from any other."""
    module = _module_of(getattr(source, "base", None), trace)
    value: Any = vars(module).get(getattr(source, "member", "")) if isinstance(module, torch.nn.Module) else None
    if type(value) is not functools.partial or not isinstance(value.func, types.BuiltinFunctionType) or value.args:
        return None
    return value if all(isinstance(v, str) for v in value.keywords.values()) else None


def _module_of(source: Any, trace: Any) -> Any:
    """The module that a source of the running trace names, None for a source of anything else.

    `UnspecializedNNModuleSource` and its kin, whose name is an expression over the frame's locals and globals
    (torch/_dynamo/source.py).
    """
    return _value_of(source, trace) if "NNModule" in type(source).__name__ else None


def _value_of(source: Any, trace: Any) -> Any:
    root = root_of(trace)
    return eval(_source_name(source), {"L": root.f_locals, "G": root.f_globals})


def guard_on_equal_rows(trace: Any, tensors: Sequence[Tensor]) -> None:
    """Inside a compile: a call in which these inputs differ in their first axis makes Dynamo trace it again.

    Dynamo guards on no size that is unbacked.
    """
    sources = _sources(trace, tensors)
    names = [_source_name(source) for source in sources]
    if len(names) > 1:
        _add_guard(sources[0], [f"{name}.size()[0] == {names[0]}.size()[0]" for name in names[1:]])


def guard_on_other_sizes(trace: Any, tensor: Tensor | None, known: Iterable[Any]) -> None:
    """Inside a compile: a call in which this input has one of the known sizes (`size_key`) is for another graph."""
    for source in _sources(trace, [tensor] if tensor is not None else []):
        name = _source_name(source)
        _add_guard(source, [f"(*{name}.size()[1:], str({name}.dtype)) not in {sorted(known, key=str)!r}"])


def _sources(trace: Any, tensors: Sequence[Tensor]) -> list[Any]:
    """Where the traced frame has these inputs, for those that its graph reads (`GraphArg`, variables/builder.py)."""
    wanted = {id(tensor) for tensor in tensors}
    return [arg.source for arg in trace.output.graphargs if id(arg.example) in wanted]


def _source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method until torch 2.11, an attribute since


def _add_guard(source: Any, code: list[str]) -> None:
    """Guard on Python expressions over the frame's locals ``L``.

    `GuardBuilder.add_python_lambda_leaf_guard_to_root` (torch/_dynamo/guards.py) is what Dynamo installs guards on symbolic
    shapes with.
    """

    def create(builder: Any, guard: Any) -> None:
        builder.add_python_lambda_leaf_guard_to_root(code, code)

    guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
    guards.add(source.make_guard(create), collect_debug_stack=False)


def leave_out(positions: Sequence[int]) -> Callable[[Any], tuple[Any, ...]] | None:
    """Inside a compile: Dynamo's calls of the graph no longer bring the arguments at these positions, parameters and buffers.

    To gather the parameters of a tower is a third of what Dynamo does in a call, all of it before the backend is reached. In
    their place the first argument is what the traced frame reaches them through, its ``self``; the others are None.

    Source: `PyCodegen.make_call_generated_code` (torch/_dynamo/codegen.py, 2.11 and 2.13) loads what the ``grapharg`` of each
    placeholder of `OutputGraph` says, after the backend has returned. A name of a source is an expression over the frame's
    locals ``L``, which Dynamo's own guards evaluate.

    Args:
        positions: of the arguments.

    Returns:
        ``(first argument) -> all of them, in order``, found anew at each call; None where they stay as they are: outside of
        a compile, without any, or where one is reached otherwise than through one local of the frame.
    """
    trace = current_trace()
    if trace is None or not positions:
        return None
    placeholders = [trace.output.placeholders[position] for position in positions]
    sources = [node.meta["grapharg"].source for node in placeholders]
    roots = {_chain(source)[-1] for source in sources if source is not None}
    names = ["" if source is None else _source_name(source) for source in sources]
    root = next(iter(roots)) if len(roots) == 1 else None
    prefix = "" if root is None else _source_name(root)
    if not prefix.startswith("L[") or not all(name.startswith((f"{prefix}.", f"{prefix}[")) for name in names):
        return None
    paths = ["root" + name.removeprefix(prefix) for name in names]
    if any(re.search(r"\b[LG]\[|___", path) for path in paths):  # by way of something else in the frame
        return None
    gather = _gather(paths)
    for place, node in enumerate(placeholders):
        node.meta["grapharg"] = _replaced(node.meta["grapharg"], None if place else root)
    return gather


def _gather(paths: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """``(root) -> the values of all paths``, expressions over ``root``; what several of them begin with is evaluated once."""
    prefixes = [list(itertools.accumulate(_steps(path))) for path in paths]
    uses = Counter(itertools.chain(*prefixes))
    names: dict[str, str] = {}
    lines, results = ["def gather(root):"], []
    for path in prefixes:
        value, done = path[0], path[0]
        for prefix in path:
            value, done = names.get(prefix, value + prefix[len(done) :]), prefix
            if prefix not in names and prefix != path[-1] and uses[prefix] > 1:
                names[prefix] = f"v{len(names)}"
                lines.append(f"    {names[prefix]} = {value}")
                value = names[prefix]
        results.append(value)
    scope: dict[str, Any] = {}
    exec("\n".join([*lines, f"    return ({', '.join(results)},)"]), scope)
    return scope["gather"]  # type: ignore[no-any-return]


def _steps(path: str) -> list[str]:
    """A path cut before each attribute and each item; as one step where it is anything else."""
    steps = _STEP.findall(path)
    return steps if "".join(steps) == path else [path]


def _replaced(argument: Any, source: Any) -> Any:
    """A `GraphArg` (torch/_dynamo/variables/builder.py) that loads a source, or without one None."""
    from torch._dynamo.variables.builder import GraphArg

    class Replaced(GraphArg):
        def reconstruct(self, codegen: Any) -> None:
            if self.source is None:
                codegen.append_output(codegen.create_load_const(None))
            else:
                codegen(self.source)

        def reconstruct_pycode(self, codegen: Any) -> str:  # 2.13, under `config.generate_pycode`
            return "None" if self.source is None else super().reconstruct_pycode(codegen)

    return Replaced(source, argument._example, False, argument.fake_tensor)
