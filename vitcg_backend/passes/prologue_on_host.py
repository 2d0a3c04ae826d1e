"""The prologue of a tower on a GPU, to be run on the host.

Why: a layout that has not been seen before has its metadata computed in the call. On a GPU that is a hundred small launches
and several waits for the device; on the host, where the grid has been read anyway, it is a fraction of a millisecond and one
copy.

Preconditions: `hoist_metadata`. The results are those of the device wherever they are integers. So only functions are taken
whose result on another device is the same number, or the same interpolation: positions, segments and windows are integer
arithmetic, and where a coordinate falls just beside a table entry instead of on it, linear and cubic weights say so. The
nearest entry would be another one.

Before::

    %meta = vitcg.metadata("…get_vision_position_ids", %grid, …); %at = torch.arange(%n, device=cuda:0)

After::

    %meta = vitcg.metadata("…get_vision_position_ids", %grid, …); %at = torch.arange(%n, device=cpu)
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, fx

from .bind_tokens import METADATA_TARGETS
from .graph import Role
from .hoist_metadata import Hoisted

__all__ = ["prologue_on_host"]

_MODULE = "transformers.vision_utils."
_INTEGER = {"get_vision_cu_seqlens", "get_vision_attention_seqlens", "get_vision_position_ids", "get_vision_window_index"}
_INTERPOLATION = "get_vision_interpolation_indices_and_weights"
_CONTINUOUS = {"bilinear", "bicubic"}
_HOST = torch.device("cpu")


def prologue_on_host(hoisted: Hoisted) -> fx.GraphModule | None:
    """The same prologue for inputs on the host, or None where it has to run where the tower is."""
    placeholders = hoisted.bound.placeholders
    roles = {placeholders[i].meta["role"] for i in hoisted.prologue_inputs}
    if not roles <= {Role.GRID, Role.ITEMS, Role.SIZE}:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in hoisted.prologue.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_method" and node.target == "cuda"):
            return None
        if node.target in METADATA_TARGETS and not _same_anywhere(node):
            return None
        if _rounds(node):
            return None
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].args = fx.node.map_aggregate(copies[node].args, _moved)
        copies[node].kwargs = fx.node.map_aggregate(copies[node].kwargs, _moved)
    return fx.GraphModule(hoisted.prologue, graph, class_name="PrologueOnHost")


def _same_anywhere(node: fx.Node) -> bool:
    key = str(node.args[0])
    if not key.startswith(_MODULE):
        return False
    name = key.removeprefix(_MODULE)
    if name == _INTERPOLATION:
        return json.loads(str(node.args[3])).get("mode") in _CONTINUOUS
    return name in _INTEGER


def _rounds(node: fx.Node) -> bool:
    """Whether a node makes integers (or booleans) out of floating-point numbers."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or made.dtype.is_floating_point or node.target in METADATA_TARGETS:
        return False
    read = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dtype.is_floating_point for value in read)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _HOST
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
