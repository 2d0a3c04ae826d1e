"""Forwards that crop and pack padded images in a loop, in the packed form that is traced in their place.

Note [The form belongs to a forward]
    A form does what one forward does, so it takes its place only where the installed code is that forward: the source of
    every function that it stands for or leans on is compared, by hash (`fingerprint`). Another forward is traced as it is,
    which gives a graph break, with the reason ``other_forward``. A form returns None for calls that it is not made for, and
    these are traced as they are, too.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch
from .crops import crops, image_boundaries, image_positions
from .marking import note_step, reject_as_eager
from .metadata_lowering import untouched

__all__ = ["FORMS", "Form", "fingerprint", "forward_of", "make_packed"]


@dataclass(frozen=True)
class Form:
    """The packed form of one forward.

    Attributes:
        tower: name of the class in its module.
        parts: other classes there whose forwards hand the segments on to the attention.
        known: fingerprints of the forwards that it is the form of.
        packed: ``(self, *args, **kwargs)`` -> what the forward returns, or None for a call that it is not made for.
    """

    tower: str
    parts: tuple[str, ...]
    known: frozenset[str]
    packed: Callable[..., Any]


def forward_of(module: types.ModuleType, name: str) -> types.FunctionType:
    """The undecorated forward of a class."""
    function: types.FunctionType = inspect.unwrap(getattr(module, name).forward)
    return function


def fingerprint(module: types.ModuleType, form: Form) -> str:
    """A hash of the forwards that a form stands for and leans on, without comments and annotations."""
    texts = []
    for name in (form.tower, *form.parts):
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward_of(module, name)))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        for argument in ast.walk(tree.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        texts += [ast.unparse(tree.args), *map(ast.unparse, body)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@torch._dynamo.assume_constant_result
def _note_other(name: str) -> None:
    text = f"the installed {name} is not the forward that this release has a packed form of: it is traced as it is"
    note_step("other_forward", text)


@torch._dynamo.assume_constant_result
def _keep_graphs() -> None:
    _torch.keep_graphs(_torch.current_trace())


def make_packed(
    original: types.FunctionType, *, active: Callable[[], bool], module: types.ModuleType, form: Form
) -> Callable[..., Any]:
    """The substitute of a forward.

    Args:
        original: the forward.
        active: whether the running trace is one of ours.
        module: where it is from.
        form: of this forward or another.
    """
    copy, packed = untouched(original), form.packed
    known = fingerprint(module, form) in form.known
    has_segments = "cu_seq_lens_q" in inspect.getsource(original)  # from 5.20 on; before, flash attention gets none
    name = f"{form.tower}.forward"
    if not known:
        _torch.log.info("vitcg has no packed form of this %s", name)

    def lowered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not active():
            return copy(self, *args, **kwargs)
        if not known:
            _note_other(name)
            return copy(self, *args, **kwargs)
        result = None
        if has_segments or "flash" not in (self.config._attn_implementation or ""):
            result = packed(self, *args, **kwargs)
        if result is not None:
            return result
        _keep_graphs()
        return copy(self, *args, **kwargs)

    return lowered


_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CONVOLVE = nn.Conv2d.forward, nn.Conv2d._conv_forward  # torch's own, which no row of patches tells from a row of images


# --- the forms, inlined by Dynamo -----------------------------------------------------------------------------------


def _pixtral(self: Any, pixel_values: Any, image_sizes: Any = None, **kwargs: Any) -> Any:
    """`PixtralVisionModel.forward`: each image cropped to its size, rows one after another, attention within an image."""
    if not _is_plain(self, kwargs):
        return None
    if not _are_images(self.patch_conv.in_channels, pixel_values, image_sizes):
        if image_sizes is None or isinstance(image_sizes, (Tensor, list, tuple)):  # eager would use an iterator up
            reject_as_eager()
        return None
    patches, grid_thw = crops(pixel_values, image_sizes, self.patch_size)
    rows = self.patch_conv(patches.to(dtype=self.patch_conv.weight.dtype)).flatten(1)
    rows = self.ln_pre(rows.unsqueeze(0))
    positions = self.patch_positional_embedding(rows, image_positions(grid_thw))
    cu_seqlens = image_boundaries(grid_thw)
    generic = sys.modules["transformers.utils.generic"]
    if not generic.is_flash_attention_requested(self.config):  # the attention takes no segments
        return None
    return self.transformer(
        rows,
        attention_mask=None,
        position_embeddings=positions,
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        **kwargs,
    )


def _is_plain(tower: Any, kwargs: dict[str, Any]) -> bool:
    """Whether nobody looks at what the form leaves out: the convolution of whole images, the mask, weights of attention."""
    conv, side = tower.patch_conv, (tower.patch_size, tower.patch_size)
    if type(conv) is not nn.Conv2d or conv._forward_hooks or conv._forward_pre_hooks:
        return False
    if "forward" in conv.__dict__ or "_conv_forward" in conv.__dict__:
        return False
    if nn.Conv2d.forward is not _CONVOLVE[0] or nn.Conv2d._conv_forward is not _CONVOLVE[1]:
        return False
    if conv.kernel_size != side or conv.stride != side or conv.padding != (0, 0) or conv.dilation != (1, 1):
        return False
    if tower.training and tower.config.attention_dropout != 0.0:
        return False
    if kwargs.get("output_attentions", getattr(tower.config, "output_attentions", False)):
        return False
    return "cu_seq_lens_q" not in kwargs and "cu_seq_lens_k" not in kwargs and "is_causal" not in kwargs


def _are_images(channels: int, pixels: Any, sizes: Any) -> bool:
    """Whether these are a batch of images and a size for each, such as need no gradient."""
    if not isinstance(pixels, Tensor) or pixels.dim() != 4 or pixels.shape[1] != channels:
        return False
    if torch.is_grad_enabled() and pixels.requires_grad:
        return False
    if sizes is None:
        return True
    if isinstance(sizes, Tensor):
        return sizes.dim() == 2 and sizes.shape[1] == 2 and sizes.dtype in _WHOLE_NUMBERS
    if not isinstance(sizes, (list, tuple)) or len(sizes) == 0:
        return False
    return all(
        isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(number, int) for number in size) for size in sizes
    )


FORMS = {
    "transformers.models.pixtral.modeling_pixtral": Form(
        "PixtralVisionModel",
        ("PixtralTransformer", "PixtralAttentionLayer", "PixtralAttention"),
        frozenset({"740f9011134138ed", "34b342298c7bb25b", "124dc102de81f32a"}),  # 5.17; 5.18 and 5.19; 5.20 to 5.24
        _pixtral,
    ),
}
"""Module -> the form of its tower's forward."""
