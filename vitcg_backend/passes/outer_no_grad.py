"""Before pass 1: take off a ``no_grad`` or an ``inference_mode`` that covers a whole graph.

Why: a function that is decorated with `torch.no_grad` and compiled as a whole starts in grad mode, and Dynamo writes the
decorator into its graph. Nothing in such a graph wants gradients, so it may be captured; with a part outside of the region it
may not, and the graph is left as it is. Numerics: no operation changes.

Preconditions: a Dynamo graph; whoever runs the result does so without gradients, and in inference mode where the graph was.

Cases: 1. the region begins before the first tensor is computed and ends after the last: both its ends are erased. 2. Anything
else: the same object comes back.

Before::

    _set_grad_enabled(False); %h = linear(%l_pixels, %l_weight); _set_grad_enabled(True); return (%h,)

After::

    %h = linear(%l_pixels, %l_weight); return (%h,)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

__all__ = ["enters_inference_mode", "outer_no_grad", "turns_gradients_on", "without_grad_modes"]

_SET, _ENTER, _EXIT = "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"


def outer_no_grad(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph without a ``no_grad`` or ``inference_mode`` around all of it (see the module's text), or the same object."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    ends = _switches(gm)
    names = [_name(n) for n in ends]
    covers = names == [_SET, _SET] and [n.args for n in ends] == [(False,), (True,)]
    if not covers and not (names == [_ENTER, _EXIT] and ends[0].args == (True,)):
        return gm
    first, last = (nodes.index(n) for n in ends)
    outside = [*nodes[:first], *nodes[last + 1 :]]
    if any(isinstance(n.meta.get("example_value"), Tensor) for n in outside):
        return gm
    return _without(gm, ends)


def enters_inference_mode(gm: fx.GraphModule) -> bool:
    """Whether a part of a graph runs in inference mode."""
    return any(_name(n) == _ENTER and n.args[0] for n in _switches(gm))


def turns_gradients_on(gm: fx.GraphModule) -> bool:
    """Whether a graph that starts without gradients computes some of it with them, as a hook or a decorator may say."""
    return any(_name(n) == _SET and n.args[0] for n in _switches(gm))


def without_grad_modes(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph that wants no gradients without its switches of grad mode, or the same object if it has none.

    They change no value. A graph that leaves another grad mode behind than it found keeps its switches: the caller sees that.
    """
    switches = [n for n in _switches(gm) if _name(n) == _SET]
    if not switches or switches[-1].args[0] is not torch.is_grad_enabled():
        return gm
    return _without(gm, switches)


def _switches(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and _name(n) in (_SET, _ENTER, _EXIT)]


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _without(gm: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for node in reversed(nodes):
        graph.erase_node(values[node])
    return fx.GraphModule(gm, graph)
