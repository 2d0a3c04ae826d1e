"""Options of the backend: ``torch.compile(tower, backend="vitcg", options={...})``, validated when given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bucketing import Ladder
from .errors import OptionError

__all__ = ["Options"]

ATTENTION = ("auto", "triton", "torch", "flash_attn", "flashinfer", "mem_efficient", "sdpa")
MATMUL = ("auto", "max-autotune", "torch")
CAPTURE = ("lazy", "warmup", "never")
OUTPUTS = ("copy", "borrow")
INNER = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """What a user may choose. Every field has a default that is right for most.

    Attributes:
        token_budgets: output tokens per bucket, any order; ``None`` = an automatic ladder up to `max_tokens`; ``"observed"`` =
            that ladder with a budget of its own for each size that is frequent in the traffic.
        max_tokens: largest automatic budget, in output tokens.
        max_items: most items (images or videos) of one replay; a call with more takes several. ``None`` = no bound.
        max_frames: most attention segments (frames, windows) of one replay, in the same way; ``None`` = no bound.
        min_tokens: calls with fewer output tokens run uncaptured; ``"auto"`` = each bucket is timed at its first use beside
            the uncaptured pieces, and the faster one serves.
        attention: kernel of the packed attention; ``auto`` = on a GPU the fastest of those that can run there, measured once
            for each size and kept on disk, elsewhere ``sdpa``.
        matmul: kernels of the matrix products; ``auto`` = in half precision on an NVIDIA GPU, and in a capture, each in the
            fastest of cublasLt's algorithms, measured once for each of its sizes and kept on disk; ``max-autotune`` = with
            Triton kernels of ours among the candidates; ``torch`` = torch's.
        capture: ``lazy`` = a bucket is captured at its first use; ``warmup`` = only by `vitcg_backend.warmup`; ``never`` =
            always the uncaptured pieces.
        memory_limit_mib: cap in MiB of the static buffers and graph pools of one tower; ``None`` = no cap. Over it the
            buckets that were used least recently are dropped.
        outputs: ``copy`` = results belong to the caller; ``borrow`` = views of the static outputs, valid until the next
            call.
        inner: ``inductor`` compiles the pieces, ``eager`` runs their operations one by one.
        self_check: at the first use of a bucket compare it with the unpadded run, with NaN in the padded rows.
        strict: a refusal raises `Refused` instead of taking a slower path; that the uncaptured pieces are faster is none.
        dump_dir: folder for the graphs before and after each pass.
    """

    token_budgets: tuple[int, ...] | str | None = None
    max_tokens: int = 16384
    max_items: int | None = None
    max_frames: int | None = None
    min_tokens: int | str = "auto"
    attention: str = "auto"
    matmul: str = "auto"
    capture: str = "lazy"
    memory_limit_mib: int | None = None
    outputs: str = "copy"
    inner: str = "inductor"
    self_check: bool = True
    strict: bool = False
    dump_dir: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Validate what `torch.compile` passes on.

        Raises:
            OptionError: an unknown name or a value that is not allowed; the text says what is.
        """
        if mode not in (None, "default"):
            raise OptionError(f"mode={mode!r} is not supported by backend 'vitcg'; leave mode out and use options={{...}}.")
        given = dict(options or {})
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise OptionError(f"unknown option {name!r} for backend 'vitcg'; known options: {', '.join(names)}.")
        return cls(**{name: _VALIDATE[name](name, value) for name, value in given.items()})


def _budgets(name: str, value: Any) -> tuple[int, ...] | str | None:
    if value is None or value == "observed":
        return value
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise OptionError(f"{name}={value!r}: expected a list of output-token counts such as [256, 1024], 'observed' or None.")
    try:
        return Ladder.from_budgets(value, unit=1).budgets
    except ValueError as error:
        raise OptionError(str(error)) from None


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: expected a whole number of at least 1.")
    return value


def _positive_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _positive(name, value)


def _positive_or_auto(name: str, value: Any) -> int | str:
    if isinstance(value, str) and value != "auto":
        raise OptionError(f"{name}={value!r}: expected 'auto' or a whole number of at least 1.")
    return value if isinstance(value, str) else _positive(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: expected True or False.")
    return value


def _folder(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{name}={value!r}: expected the path of a folder, or None.")
    if value is None:
        return None
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{name}={os.fspath(value)!r}: cannot make this folder ({error}); give one that can be written."
        ) from None
    return os.fspath(value)


def _one_of(*allowed: str) -> Any:
    def validate(name: str, value: Any) -> str:
        if value not in allowed:
            raise OptionError(f"{name}={value!r}: expected one of {', '.join(repr(a) for a in allowed)}.")
        return value

    return validate


_VALIDATE = {
    "token_budgets": _budgets,
    "max_tokens": _positive,
    "max_items": _positive_or_none,
    "max_frames": _positive_or_none,
    "min_tokens": _positive_or_auto,
    "attention": _one_of(*ATTENTION),
    "matmul": _one_of(*MATMUL),
    "capture": _one_of(*CAPTURE),
    "memory_limit_mib": _positive_or_none,
    "outputs": _one_of(*OUTPUTS),
    "inner": _one_of(*INNER),
    "self_check": _flag,
    "strict": _flag,
    "dump_dir": _folder,
}
