"""Before pass 1: take off a ``no_grad`` that covers a whole graph.

Why: a function that is decorated with `torch.no_grad` and compiled as a whole starts in grad mode, and Dynamo writes the
decorator into its graph. Nothing in such a graph wants gradients, so it may be captured; with a part outside of the region it
may not, and the graph is left as it is. Numerics: no operation changes.

Preconditions: a Dynamo graph; whoever runs the result does so without gradients.

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

__all__ = ["outer_no_grad", "without_grad_modes"]


def outer_no_grad(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph without a ``no_grad`` around all of it (see the module's text), or the same object."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    ends = [n for n in nodes if n.target is torch._C._set_grad_enabled]
    if [n.args for n in ends] != [(False,), (True,)]:
        return gm
    first, last = (nodes.index(n) for n in ends)
    outside = [*nodes[:first], *nodes[last + 1 :]]
    if any(isinstance(n.meta.get("example_value"), Tensor) for n in outside):
        return gm
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for node in ends:
        graph.erase_node(values[node])
    return fx.GraphModule(gm, graph)


def without_grad_modes(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph that wants no gradients without its switches of grad mode, or the same object if it has none.

    They change no value, and Dynamo restores the caller's mode itself where a graph leaves another one behind.
    """
    if not any(node.target is torch._C._set_grad_enabled for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for node, copy in values.items():
        if node.target is torch._C._set_grad_enabled:
            graph.erase_node(copy)
    return fx.GraphModule(gm, graph)
