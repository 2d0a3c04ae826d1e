"""Before pass 0: the crops of padded images run on the call's own inputs, in front of the graph, which begins at the patches.

Why: how many patches a call has is written in the sizes of its images, not in any shape, and what is padded in a batch has no
place in a bucket. Behind the crops the graph is that of a packed tower with a grid. Moves work only: bit-equal.

Preconditions: crops appear as ``vitcg::crops``, which `lowering` puts there.

Cases: 1. the crops are taken out with all that they need; patches, grid and the number of patches become inputs, the last
ones. 2. Inputs that nothing else reads stay where they are, as the number 0. 3. Crops that a weight reaches, and several crops,
refuse the graph. 4. A graph without crops is left as it is.

Before::

    %l_pixels : [u0, 3, u1, u2]   %l_sizes : [u3, 2]   %l_weight : [64, 3, 16, 16]
    %crops = vitcg.crops(%l_pixels, %l_sizes, None, 16)
    %patches = getitem(%crops, 0);  %grid = getitem(%crops, 1)        # [u4, 3, 16, 16], i64[u5, 3]
    %h = conv2d(%patches, %l_weight);  %meta = vitcg.metadata(key, %grid, [], "{}")

After::

    crops(l_pixels, l_sizes):  return vitcg_backend.crops.cut(...)
    %l_pixels : 0   %l_sizes : 0   %l_weight   %patches : [u4, 3, 16, 16]   %grid : i64[u5, 3]   %rows : u4
    %h = conv2d(%patches, %l_weight);  %meta = vitcg.metadata(key, %grid, [], "{}")
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..crops import CROPS, cut
from .bind_tokens import erase_asserts, role_of
from .graph import Ineligible, Role, erase_unread, made_from, where

__all__ = ["Crops", "take_out_crops"]


@dataclass
class Crops:
    """What runs in front of a graph.

    Attributes:
        gm: module of inputs of the call that returns patches and grid.
        arguments: positions of the call's arguments that it takes.
        unread: positions of those that the graph does not read.
    """

    gm: fx.GraphModule
    arguments: tuple[int, ...]
    unread: tuple[int, ...]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the graph for a call.

        Raises:
            RuntimeError: what eager raises for no image, or one smaller than a patch.
        """
        patches, grid = self.gm(*[args[i] for i in self.arguments])
        given = list(args)
        for position in self.unread:
            given[position] = 0
        return [*given, patches, grid, len(patches)]


def take_out_crops(gm: fx.GraphModule) -> Crops | None:
    """Take the crops out of a Dynamo graph, in place (see the module's text). None without crops.

    Raises:
        Ineligible: several crops, or a weight reaches them.
    """
    found = [node for node in gm.graph.nodes if node.target in CROPS]
    if not found:
        return None
    if len(found) > 1:
        raise Ineligible("crops", f"the tower crops {len(found)} batches of images, expected one")
    erase_asserts(gm)
    inputs = where(gm.graph.nodes, "placeholder")
    needed = made_from(found)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    taken = [position for position, node in enumerate(inputs) if node in needed]
    for position in taken:
        if role_of(inputs[position]) == Role.STATE:
            raise Ineligible(
                "crops", f"{inputs[position].name}, which the tower owns, reaches its images before they are cropped"
            )
        copies[inputs[position]] = graph.placeholder(inputs[position].name)
    for node in gm.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    copies[found[0]].target = cut  # no operator: forward-mode differentiation goes through it
    graph.output(copies[found[0]])
    _begin_at_patches(gm, found[0], inputs[-1])
    erase_unread(gm, needed)
    unread = [position for position in taken if not inputs[position].users]
    for position in unread:
        inputs[position].meta["example_value"] = 0
    gm.graph.lint()
    gm.recompile()
    return Crops(fx.GraphModule(gm, graph, class_name="Crops"), tuple(taken), tuple(unread))


def _begin_at_patches(gm: fx.GraphModule, crops: fx.Node, last: fx.Node) -> None:
    """Put inputs in place of what the crops give, behind the last one."""
    patches, grid = crops.meta["example_value"]
    for name, value in (("rows", patches.shape[0]), ("grid", grid), ("patches", patches)):
        with gm.graph.inserting_after(last):
            node = gm.graph.placeholder(name)
        node.meta["example_value"] = value
        for user in list(crops.users):
            if name != "rows" and user.target is operator.getitem and user.args[1] == ("patches", "grid").index(name):
                user.replace_all_uses_with(node)
                gm.graph.erase_node(user)
