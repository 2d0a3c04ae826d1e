"""Blocks that are alike are traced twice, and copied after that: Dynamo takes a quarter of a second for each block of a tower.

::

    first call of a block ─▶ traced (what all blocks share is met here)
    second                ─▶ traced, and noted: its nodes, its guards, its parameters
    any further           ─▶ same arguments, an equal block?  ─▶ nodes and guards once more, of its own parameters
                          └▶ anything else                    ─▶ traced

What is copied is what the trace would be: the graph and the guards are those that Dynamo makes by itself. Only blocks of
transformers' modelling files are copied; others are traced. A trace depends on
what it is given, on the objects that it reads, and on what was changed before. So a block is copied only where

- its arguments are the same constants and tensors, or tensors of equal type, sizes and strides (`_Given`);
- the block equals the one that was noted: module by module the same attributes, each the same object, an equal number or text,
  or a tensor of equal type, sizes and strides (`_Equal`), and no hooks;
- the trace has met the blocks in one place only, and that of the noted one has read nothing new outside of it: a table of all
  blocks, or a comparison with one of them, would tell them apart;
- modes are the same, gradients are not wanted, and the trace has changed nothing in between that was there before it.

Private names of torch are in this module, too. Source: Dynamo itself does this for functions that are marked for it
(torch/_dynamo/variables/invoke_subgraph.py, Note [invoke_subgraph subgraph reuse], 2.13; not in 2.11).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import Guard, Source

from ._dynamo_call import _value_of
from ._torch import ambient_state, log

__all__ = ["copy_equal_blocks"]

_LIBRARIES: tuple[str, ...] = ("transformers.",)
_MOST_NOTED = 4  # of one class: towers have one or two kinds of blocks
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_LOOKED_INTO = (torch.nn.Module, Tensor, functools.partial, dict, list, tuple, set, frozenset)  # equal, though others
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_equal_blocks(trace: Any) -> None:
    """Inside a trace: copy blocks from now on.

    Dynamo keeps what it makes of each source in a dictionary of the running trace (`OutputGraph.variable_tracker_cache`,
    torch/_dynamo/output_graph.py, 2.11 and 2.13); the one put in its place sees each module as it is first met.
    """
    output = trace.output
    if not isinstance(output.variable_tracker_cache, _Met) and not torch._dynamo.config.reorderable_logging_functions:
        output.variable_tracker_cache = _Met(output.variable_tracker_cache)


class _Met(dict[Any, Any]):
    """What Dynamo has made of each source; modules that are one of several in a list or the like become `Block`."""

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__(known)
        self.seen: set[type] = set()  # classes of blocks that were called before
        self.noted: dict[type, list[_Noted]] = {}
        self.failed = False  # and from then on everything is traced

    def __setitem__(self, source: Any, variable: Any) -> None:
        block, plain = _block_class()
        in_list = str(getattr(source, "index", "")).isdecimal() and getattr(source.base, "member", "") == "_modules"
        if in_list and type(variable) is plain and _is_library_code(type(variable.value)):
            variable.__class__ = block
        super().__setitem__(source, variable)


def _is_library_code(cls: type) -> bool:
    """Whether a block is a modelling file's: those know no way to tell blocks apart that is not compared here."""
    code = getattr(cls, "forward", None)
    while code is not None:  # a decorator's function, and what it decorates
        if not str(getattr(code, "__globals__", {}).get("__name__")).startswith(_LIBRARIES):
            return False
        code = getattr(code, "__wrapped__", None)
    return True


@functools.cache
def _block_class() -> tuple[Any, Any]:
    """(the class of blocks, what it derives from): made when it is first needed, for it imports most of Dynamo."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    class Block(UnspecializedNNModuleVariable):
        """A module that may be called as another one was (`call_function`: torch/_dynamo/variables/nn_module.py)."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            trace = super().call_function
            return _called(self, tx, args, kwargs, lambda: trace(tx, args, kwargs))

    return Block, UnspecializedNNModuleVariable


def _called(block: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any], trace: Callable[[], Any]) -> Any:
    """The result of a call of `block`: copied, or that of `trace`."""
    met = tx.output.variable_tracker_cache
    if not isinstance(met, _Met) or met.failed:
        return trace()
    cls = type(block.value)
    known = cls in met.seen
    met.seen.add(cls)
    given = _tried(met, lambda: None if _is_known_otherwise(tx, block) else _Given.of(tx, args, kwargs)) if known else None
    if given is None:
        return trace()
    noted, met_before = met.noted.setdefault(cls, []), _tried(met, lambda: _known(tx, block.value))
    one = _tried(met, lambda: next((one for one in noted if one.fits(block, given, met_before)), None))
    copy = None if one is None else _tried(met, lambda: one.copy(tx, block, given))
    if copy is not None:
        return copy
    if len(noted) == _MOST_NOTED or met.failed:
        return trace()
    nodes, guards = set(tx.output.graph.nodes), set(map(_what, tx.output.guards))
    result = trace()
    added = [node for node in tx.output.graph.nodes if node not in nodes]
    more = [guard for guard in tx.output.guards if _what(guard) not in guards]
    new = _tried(met, lambda: _Noted.of(tx, block, given, met_before, result, added, more))
    if new is not None:
        noted.append(new)
    return result


def _tried(met: _Met, work: Callable[[], Any]) -> Any:
    """What `work` gives; None where it fails: a Dynamo that these lines do not know is no reason not to trace."""
    try:
        return work()
    except torch._dynamo.exc.TorchDynamoException:  # its own way of going on
        raise
    except Exception as error:
        met.failed = True
        log.warning("vitcg traces each block by itself, which takes longer: %s: %s", type(error).__name__, error)
        log.debug("where copying a block failed", exc_info=True)
        return None


def _known(tx: Any, module: torch.nn.Module) -> list[tuple[int, int]]:
    """(place, id) of what a block holds that the trace has met before the block: what other blocks have, too.

    Dynamo finds such an object where it has met it first, and a comparison with it tells blocks apart.
    """
    return [(place, id(value)) for place, value in enumerate(_held(module, set())) if value in tx.output.side_effects]


def _held(value: Any, seen: set[int]) -> Iterator[Any]:
    """All beneath a block that `_Equal` looks into."""
    items: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, (torch.nn.Module, dict)):
        items = (value if isinstance(value, dict) else vars(value)).values()
    elif isinstance(value, functools.partial):
        items = (value.args, value.keywords)
    for item in items:
        if isinstance(item, _LOOKED_INTO) and id(item) not in seen:
            seen.add(id(item))
            yield item
            yield from _held(item, seen)


# --- what a call is given -------------------------------------------------------------------------------------------


class _Unknown(Exception):
    """Something that is not compared."""


@dataclass
class _Given:
    """The arguments of a call, and what else its trace depends on.

    Attributes:
        shape: the arguments, each tensor replaced by its position in `tensors`.
        tensors: nodes of the tensors among them.
        sizes: nodes of the sizes among them.
        modes: see `ambient_state`.
        changes: what the trace has changed so far, see `_changes`.
    """

    shape: Any
    tensors: list[fx.Node]
    sizes: list[fx.Node]
    modes: Any
    changes: Any

    @classmethod
    def of(cls, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Given | None:
        """None where they cannot be compared."""
        root = tx.output.current_tracer.parent is None and not tx.symbolic_torch_function_state.mode_stack
        if torch.is_grad_enabled() or not root:
            return None
        given = cls(None, [], [], _modes(), _changes(tx.output))
        try:
            given.shape = [given._key(tx, arg) for arg in args], [(name, given._key(tx, arg)) for name, arg in kwargs.items()]
        except _Unknown as error:
            log.debug("a block is traced: its argument is %s", error)
            return None
        return given if given.changes is not None else None

    def _key(self, tx: Any, variable: Any) -> Any:
        """Equal for what a trace cannot tell apart, but for the tensors themselves."""
        from torch._dynamo.variables import (
            ConstantVariable,
            LazyVariableTracker,
            SymNodeVariable,
            TensorVariable,
            TupleVariable,
        )

        if isinstance(variable, LazyVariableTracker):
            if not variable.is_realized():
                return "not looked at", variable.source
            variable = variable.realize()
        if type(variable) is TensorVariable and not tx.output.side_effects.has_pending_mutation(variable):
            node = variable.as_proxy().node
            if node not in self.tensors:
                self.tensors.append(node)
            return "tensor", self.tensors.index(node)
        if type(variable) is SymNodeVariable:
            node = variable.as_proxy().node
            self.sizes.append(node)
            return "size", id(node)
        if type(variable) is ConstantVariable:
            return "constant", type(variable.value), repr(variable.value), variable.value
        if type(variable) is TupleVariable:
            return "tuple", tuple(self._key(tx, item) for item in variable.items)
        raise _Unknown(type(variable).__name__)


def _modes() -> Any:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), ambient_state()


def _changes(output: Any) -> Any:
    """What the trace has changed so far that was there before it; None where one of its values is more than plain values.

    Lists and dictionaries of plain values are noted with what is in them: one that the trace has made may change, too.
    Source: `SideEffects` (torch/_dynamo/side_effects.py).
    """
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = output.side_effects
    found: list[Any] = [len(output.random_calls), len(effects.tensor_hooks)]
    changed = [
        (variable, "", variable)
        for variable in effects.id_to_variable.values()
        if isinstance(variable.mutation_type, ValueMutationExisting) and effects.is_modified(variable)
    ]
    for variable, written in effects.store_attr_mutations.items():
        if isinstance(variable.mutation_type, AttributeMutationExisting):
            changed += [(variable, name, value) for name, value in written.items()]
    for variable, name, value in changed:
        if not value.is_python_constant():
            return None
        found.append((id(variable), name, repr(value.as_python_constant())))
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two fake tensors are the same to a trace."""
    known = type(one) is type(other) and isinstance(one, Tensor) and one.layout == torch.strided
    return known and all(
        _size(read(one)) == _size(read(other))
        for read in (
            lambda t: (t.dtype, t.device, t.layout, t.requires_grad, t.is_inference(), t.is_conj(), t.is_neg()),
            lambda t: (*t.shape, "strides", *t.stride(), t.storage_offset()),
        )
    )


def _size(sizes: Any) -> Any:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


# --- equal blocks ---------------------------------------------------------------------------------------------------


class _Equal:
    """Whether a trace cannot tell two blocks apart: compared down to the objects that they share, and to plain values.

    Where an object comes twice in one of them, its counterpart comes twice in the other.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is its object's as long as that is there

    def __call__(self, one: Any, other: Any) -> bool:
        """Whether they are equal."""
        if type(one) is not type(other):
            return False
        if isinstance(one, _PLAIN):
            return repr(one) == repr(other) if isinstance(one, (float, complex)) else bool(one == other)
        first, second = self._pairs.setdefault(id(one), id(other)), self._back.setdefault(id(other), id(one))
        self._kept += (one, other)
        if first != id(other) or second != id(one):
            return False
        if isinstance(one, torch.nn.Module):
            return self._without_hooks(one) and self._without_hooks(other) and self(vars(one), vars(other))
        if isinstance(one, Tensor):
            return type(one) in (Tensor, torch.nn.Parameter) and self._tensors(one, other)
        if one is other:
            return True
        if isinstance(one, functools.partial):
            return one.func is other.func and self(one.args, other.args) and self(one.keywords, other.keywords)
        if type(one) in (dict, OrderedDict):
            return self(list(one), list(other)) and self(list(one.values()), list(other.values()))
        if type(one) in (list, tuple):
            return len(one) == len(other) and all(map(self, one, other))
        return type(one) in (set, frozenset) and one == other and all(isinstance(item, str) for item in one)

    def _without_hooks(self, module: torch.nn.Module) -> bool:
        return "forward" not in vars(module) and not any(vars(module).get(name) for name in _HOOKS)

    def _tensors(self, one: Tensor, other: Tensor) -> bool:
        marks = [{k: v for k, v in vars(t).items() if k != "_dynamo_static_input_type"} for t in (one, other)]
        plain = not any(marks) and all(t.grad is None and not t._backward_hooks for t in (one, other))
        return plain and _alike(one, other)


# --- what a call has added to the trace -----------------------------------------------------------------------------


@dataclass
class _Noted:
    """What the trace of one call is made of.

    Attributes:
        module: the block.
        source: where Dynamo found it, which all that is its own is reached through.
        given: what it was given.
        known: see `_known`.
        inputs: placeholders for its own parameters.
        nodes: of the call.
        guards: on what is its own.
        ordered: its own dictionaries whose order is guarded.
        result: nodes of the tensors that it returns; one, or a tuple of them.
    """

    module: Any
    source: Source
    given: _Given
    known: list[tuple[int, int]]
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    guards: list[Guard]
    ordered: list[Source]
    result: Any

    @classmethod
    def of(
        cls,
        tx: Any,
        block: Any,
        given: _Given,
        known: list[tuple[int, int]],
        result: Any,
        new: list[fx.Node],
        new_guards: list[Guard],
    ) -> _Noted | None:
        """Note a call that was just traced, which has added nodes and guards; None where it cannot be copied."""
        same = (_modes(), _changes(tx.output)) == (given.modes, given.changes)
        why = None if same else "it changes what was there before"
        source = _place(block)
        met = [*(guard.originating_source for guard in new_guards), *(_source_of(n) for n in new if n.op == "placeholder")]
        if not all(_is_within(one, source) for one in met):  # what is found by way of the block, in a table of all blocks, say
            why = "it reads what no block before it has read"
        nodes = [node for node in new if node.op != "placeholder"]
        used = {node for n in nodes for node in n.all_input_nodes} | set(new)
        inputs = [node for node in used if node.op == "placeholder" and _is_within(_source_of(node), source)]
        if not all(_names_a_tensor(_source_of(node), tx) for node in inputs):
            why = "a number of its own may be another in the next call"
        reached = {*new, *given.tensors, *given.sizes}
        for node in nodes:
            if node.op not in ("call_function", "call_method") or _changes_metadata(node) or "unbacked_bindings" in node.meta:
                why = f"of its operation {node.format_node()}"
        for node in used - reached:
            if node.op != "placeholder" and not isinstance(node.meta.get("example_value"), torch.SymInt):
                why = f"it reads {node.format_node()}"
        returned = _returned(tx, result, set(nodes), given.tensors)
        guards = [guard for guard in tx.output.guards if _is_within(guard.originating_source, source)]
        if returned is None:
            why = "of what it returns"
        elif not all(map(_can_move, guards)):
            why = "of its guards"
        elif any(
            g.create_fn_name() == "ID_MATCH" and isinstance(_value_of(g.originating_source, tx), _LOOKED_INTO) for g in guards
        ):
            why = "it reads its own id"
        if why is not None:
            log.debug("calls of %s are not copied: %s", type(block.value).__name__, why)
            return None
        ordered = [one for one in tx.output.guard_on_key_order if _is_within(one, source)]
        order = {node: number for number, node in enumerate(tx.output.graph.nodes)}
        inputs.sort(key=order.__getitem__)
        return cls(block.value, source, given, known, inputs, nodes, guards, ordered, returned)

    def fits(self, block: Any, given: _Given, known: list[tuple[int, int]]) -> bool:
        """Whether a call would be traced alike."""
        if (given.shape, given.modes, given.changes) != (self.given.shape, self.given.modes, self.given.changes):
            return False
        if known != self.known:
            return False
        for one, other in zip(self.given.tensors, given.tensors, strict=True):
            if one is not other and not _alike(one.meta["example_value"], other.meta["example_value"]):
                return False
        return _Equal()(self.module, block.value)

    def copy(self, tx: Any, block: Any, given: _Given) -> Any:
        """Add to the trace what a call of `block` adds, and return its result."""
        from torch._dynamo.variables.builder import VariableBuilder

        place, output = _place(block), tx.output
        moved: dict[Source, Source] = {self.source: place}
        copies: dict[fx.Node, fx.Node] = dict(zip(self.given.tensors, given.tensors, strict=True))
        sources = [_source_of(node) for node in self.inputs]
        for guard in self.guards:
            if guard.create_fn_name() != "TENSOR_MATCH":  # that of a parameter comes with its placeholder
                output.guards.add(_moved_guard(guard, moved), collect_debug_stack=False)
        output.guard_on_key_order.update(_moved(one, moved) for one in self.ordered)
        for node, source in zip(self.inputs, sources, strict=True):
            own = _moved(source, moved)  # type: ignore[arg-type]  # `of` has seen that there is one
            copies[node] = VariableBuilder(tx, own)(_value_of(own, tx)).as_proxy().node
        try:
            for node in self.nodes:
                copies[node] = output.graph.node_copy(node, lambda n: copies.get(n, n))
            return _results(tx, self.result, copies)
        except BaseException:  # the trace that comes instead begins where this one did
            for node in reversed([copies[node] for node in self.nodes if node in copies]):
                output.graph.erase_node(node)
            raise


def _results(tx: Any, nodes: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(nodes, fx.Node):
        return _result(tx, copies[nodes])
    from torch._dynamo.variables import TupleVariable

    return TupleVariable([_result(tx, copies[node]) for node in nodes])


def _result(tx: Any, node: fx.Node) -> Any:
    """What Dynamo makes of the result of a node, which so far has the fake tensor of the node that it was copied from."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    like = node.meta.pop("example_value")
    with tx.fake_mode:
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return wrap_fx_proxy(tx, fx.Proxy(node, tx.output.current_tracer), example_value=value)


def _returned(tx: Any, result: Any, nodes: set[fx.Node], inputs: Sequence[fx.Node]) -> Any:
    """Nodes of the tensors that a call returns; None unless all of them are new, and no views of what it was given."""
    from torch._dynamo.variables import TensorVariable, TupleVariable

    if type(result) is TupleVariable:
        found = tuple(_returned(tx, item, nodes, inputs) for item in result.items)
        return found if all(isinstance(node, fx.Node) for node in found) and len(set(found)) == len(found) else None
    node = result.as_proxy().node if type(result) is TensorVariable else None
    if node is None or node not in nodes or tx.output.side_effects.has_pending_mutation(result):  # an attribute
        return None
    value, given = node.meta["example_value"], [n.meta["example_value"] for n in inputs]
    own = all(value.untyped_storage()._cdata != other.untyped_storage()._cdata for other in given)
    plain = not value.requires_grad and value.layout == torch.strided and value.storage_offset() == 0
    return node if own and plain else None


def _changes_metadata(node: fx.Node) -> bool:
    """Whether an operation may change what a trace knows of the tensors that it is given: those in place, such as `t_`, may.

    `x += y` may not: that they write into a tensor is in the graph, which is copied.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    return name.endswith("_") and not name.endswith("__")


# --- sources: where a trace has found something ---------------------------------------------------------------------


def _place(block: Any) -> Source:
    """The source of a block itself: Dynamo puts `UnspecializedNNModuleSource` round it (torch/_dynamo/source.py)."""
    source = block.source
    while "NNModuleSource" in type(source).__name__:
        source = source.base
    return source  # type: ignore[no-any-return]


def _is_known_otherwise(tx: Any, block: Any) -> bool:
    """Whether the trace has met the block, or what holds it, in a second place: code may tell blocks apart by that."""
    way, source = set(), block.source
    while source is not None:
        way.add(source)
        source = getattr(source, "base", None)
    twice = [guard for guard in tx.output.guards if guard.create_fn_name() == "DUPLICATE_INPUT"]
    return any(g.originating_source in way or g.create_fn.keywords.get("source_b") in way for g in twice)


def _source_of(placeholder: fx.Node) -> Source | None:
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def _names_a_tensor(source: Any, trace: Any) -> bool:
    """False for a number that Dynamo has made an input, which it does once its value has changed between calls."""
    return type(source).__name__ != "FloatTensorSource" and isinstance(_value_of(source, trace), Tensor)


def _parts(source: Source) -> dict[str, Source]:
    """The sources that a source holds: what it is reached through, or a key that is found elsewhere."""
    fields = [field.name for field in dataclasses.fields(source) if field.init]  # type: ignore[arg-type]
    return {name: value for name in fields if isinstance(value := getattr(source, name), Source)}


def _is_within(source: Any, place: Source) -> bool:
    """Whether a source is reached through `place`."""
    return source is not None and (source == place or any(_is_within(part, place) for part in _parts(source).values()))


def _moved(source: Source, known: dict[Source, Source]) -> Source:
    """The same source of another block; `known` holds what was asked before."""
    if source not in known:
        parts = {name: _moved(part, known) for name, part in _parts(source).items()}
        known[source] = dataclasses.replace(source, **parts) if parts else source  # type: ignore[type-var]
    return known[source]


def _can_move(guard: Guard) -> bool:
    """Whether a guard is a function of sources and plain values."""
    create = guard.create_fn
    if guard.create_fn_name() == "TENSOR_MATCH":
        return True
    if isinstance(create, functools.partial):
        return not create.args and all(isinstance(v, (*_PLAIN, Source, tuple)) for v in create.keywords.values())
    return getattr(create, "__closure__", None) is None


def _what(guard: Guard) -> Any:
    """Equal for guards that say the same: Dynamo adds many a guard each time that it comes by."""
    create = guard.create_fn
    keywords = create.keywords.items() if isinstance(create, functools.partial) else ()
    return guard.originating_source, guard.create_fn_name(), tuple((k, repr(v)) for k, v in keywords)


def _moved_guard(guard: Guard, known: dict[Source, Source]) -> Guard:
    create: Any = guard.create_fn
    if isinstance(create, functools.partial):
        keywords = {k: _moved(v, known) if isinstance(v, Source) else v for k, v in create.keywords.items()}
        create = functools.partial(create.func, **keywords)
    new = _moved(guard.originating_source, known).make_guard(create)
    new.stack, new.user_stack = guard.stack, guard.user_stack
    return new
