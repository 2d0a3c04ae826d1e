"""Pass 0: writes into fresh tensors become operations that return a new one.

Why: pieces are compiled apart and buckets are padded, so nothing may change a tensor behind a node's back. Towers do write
into tensors that they have just made (scatter into zeros, class tokens between patches). Moves work only: bit-equal.

Preconditions: none; a graph without such a write comes back as the same object.

Cases: ``x[index] = value`` and ``x.method_(...)`` where `x` 1. is made by an operation that returns memory of its own, and
2. has no user before the write (which might be a view of it). Its later users read the new tensor. Any other write is left
for `bind_tokens`, which refuses it.

Before::

    %x = new_zeros(%h, 64, 32)            # f32[64, 32]
    %_ = index_add_(%x, 0, %index, %h)
    %y = view(%x, 16, 4, 32)

After::

    %x = new_zeros(%h, 64, 32)
    %w = written(%x, "index_add_", 0, %index, %h)      # f32[64, 32], %x as it was
    %y = view(%w, 16, 4, 32)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from .graph import is_size

__all__ = ["write_out_of_place", "written"]

_FRESH = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "clone", "repeat"}
_FRESH |= {"zeros_like", "ones_like", "full_like", "empty_like"}
_FRESH |= {"add", "sub", "mul", "truediv", "neg"}  # and arithmetic, which has a result of its own


def written(tensor: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """A copy of `tensor` after ``copy.method(*args)``."""
    copy = tensor.clone()
    getattr(copy, method)(*args, **kwargs)
    return copy


def write_out_of_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace the writes of a Dynamo graph that may be replaced (see the module's text), in place."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    changed = False
    for node in list(gm.graph.nodes):
        method = _method(node)
        if method is None or not _is_own(node.args[0], node, order):
            continue
        target = node.args[0]
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(written, (target, method, *node.args[1:]), dict(node.kwargs))
        new.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        new.meta["example_value"] = target.meta.get("example_value")
        order[new] = order[node]
        for user in list(target.users):
            if user is not new and order[user] > order[node]:
                user.replace_input_with(target, new)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()
    return gm


def _method(node: fx.Node) -> str | None:
    if node.op == "call_function" and node.target is operator.setitem:
        return "__setitem__"
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
        return str(node.target)
    return None


def _is_own(target: Any, write: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a tensor's memory is its own and nobody has looked at it before the write."""
    if not isinstance(target, fx.Node) or not isinstance(target.meta.get("example_value"), Tensor):
        return False
    name = target.target if isinstance(target.target, str) else getattr(target.target, "__name__", "")
    if target.target is not written and name not in _FRESH:
        return False
    if target.kwargs.get("out") is not None:
        return False
    before = [user for user in target.users if order[user] < order[write]]
    return all(user.target is written or is_size(user.meta.get("example_value")) for user in before)
