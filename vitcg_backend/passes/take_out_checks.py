"""Before pass 0: checks that a tower makes of its inputs' values run on the call's own inputs, in front of everything.

Why: a tower that takes padded images looks at their sizes and raises for bad ones. A replay cannot raise, and padded rows are
not the caller's. Moves work only: what is checked, and the error, are eager's.

Preconditions: checks appear as ``vitcg::check``, which `lowering` puts there.

Cases: 1. a check that only whole numbers among the inputs reach is taken out, with all that it needs. 2. One that pixels or
weights reach refuses the graph: it could only be made after the tower has run. 3. A graph without checks comes back as the
same object.

Before::

    %gt = l_shapes > 0;  %all = %gt.all();  vitcg.check(%all, "sizes must be positive")
    %h = linear(%l_pixels, %l_weight)

After::

    checks(l_shapes):  %gt = l_shapes > 0;  %all = %gt.all();  vitcg.check(%all, "sizes must be positive")
    %h = linear(%l_pixels, %l_weight)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .graph import Ineligible, erase_unread, made_from, where

__all__ = ["Checks", "check", "take_out_checks"]


@torch.library.custom_op("vitcg::check", mutates_args=())
def check(condition: Tensor, text: str) -> None:
    """Raise ValueError with `text` unless all of `condition` is true: `torch_compilable_check` of transformers, in eager."""
    if not bool(condition.all()):
        raise ValueError(text)


@check.register_fake
def _(condition: Tensor, text: str) -> None:
    return None


_CHECKS = (torch.ops.vitcg.check, torch.ops.vitcg.check.default)
for _target in _CHECKS:
    fx.node.has_side_effect(_target)  # no result: to the tracer it would be dead


@dataclass
class Checks:
    """The checks of a graph.

    Attributes:
        gm: module of its inputs that makes them all.
        arguments: positions of the call's arguments that it takes.
    """

    gm: fx.GraphModule
    arguments: tuple[int, ...]

    def __call__(self, args: Sequence[Any]) -> None:
        """Check a call.

        Raises:
            ValueError: what eager raises.
        """
        self.gm(*[args[i] for i in self.arguments])


def take_out_checks(gm: fx.GraphModule) -> tuple[fx.GraphModule, Checks | None]:
    """Take the checks out of a Dynamo graph, in place (see the module's text).

    Raises:
        Ineligible: a check needs pixels or weights.
    """
    checks = [node for node in gm.graph.nodes if node.target in _CHECKS]
    if not checks:
        return gm, None
    needed = made_from(checks)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    positions = []
    for position, node in enumerate(where(gm.graph.nodes, "placeholder")):
        if node in needed:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                raise Ineligible("check", f"the tower checks values that {node.name} reaches, which padding and replays cannot")
            copies[node] = graph.placeholder(node.name)
            positions.append(position)
    for node in gm.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(())
    for node in checks:
        gm.graph.erase_node(node)
    erase_unread(gm, needed)
    gm.recompile()
    return gm, Checks(fx.GraphModule(gm, graph, class_name="Checks"), tuple(positions))
