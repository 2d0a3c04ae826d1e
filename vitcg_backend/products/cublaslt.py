"""Products by cublasLt, the library that torch calls, in any of its algorithms: torch runs the first that its rules name.

The functions are those of cublasLt.h (CUDA toolkit, "Using the cublasLt API"), in the copy that torch has loaded.
The library counts matrices by columns, so that rows one after the other are columns to it: ``out.T = weight @ x.T``.

Numerics: sums in float32, as torch's. Sums of parts of the inputs (split-K) are added up in float32, too: torch by default
allows them in half precision.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .shape import Product

__all__ = ["Algorithm", "algorithms", "launch", "library_version", "reads", "unusable"]

WORKSPACES = (0, 32 << 20)
"""Most bytes that an algorithm may take to work in, one list of them after the other: with more, sums of few rows are split
over the machine, which is not always faster, and what the library prefers without is left out of its list with."""

_MOST = 8
"""Algorithms that are asked for: the library knows of about so many for a product."""

_ALIGNED = 16  # bytes: where matrices and rows have to begin

# cublasLt.h, library_types.h
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 7, 8, 26
_PLAIN, _BIAS, _GELU = 1, 4, 32
_WORKSPACE_BYTES, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_FLOAT32 = 1 | 2  # split-K in place or in the compute type, not in that of the result

_ONE, _ZERO = c_float(1.0), c_float(0.0)


@dataclass(frozen=True)
class Algorithm:
    """One of the library's algorithms for a product: opaque, and of use to this version of it on this device alone.

    Attributes:
        data: ``cublasLtMatmulAlgo_t``.
        workspace: bytes that it works in.
        place: in the library's own order.
    """

    data: bytes
    workspace: int
    place: int = field(compare=False)

    def __str__(self) -> str:
        return f"cublasLt {self.place}"


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (("algo", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4))


@functools.cache
def _library() -> tuple[Any, str | None]:
    """The library, and None; or None and why it cannot be used."""
    if torch.version.cuda is None:
        return None, "torch is built without CUDA"
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        library.cublasLtGetVersion.restype = c_size_t
        for function in ("cublasLtCreate", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulDescCreate"):
            getattr(library, function).restype = c_int
    except (OSError, AttributeError) as error:
        return None, f"{name} cannot be loaded ({error})"
    return library, None


@functools.cache
def unusable(device: torch.device) -> str | None:
    """Why products cannot be given to cublasLt on a device, in words, or None when they can."""
    if device.type != "cuda":
        return f"cublasLt needs an NVIDIA GPU, not {device.type}"
    library, reason = _library()
    if library is not None and torch.cuda.get_device_capability(device)[0] < 8:
        return f"cublasLt has no kernels in bfloat16 for {torch.cuda.get_device_name(device)}"
    return reason


def library_version() -> str:
    """Of the loaded library, "none" without one."""
    library, _ = _library()
    return "none" if library is None else str(library.cublasLtGetVersion())


def reads(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are matrices of rows one after the other, the vector in one piece, as aligned as the kernels want them."""
    size = x.element_size()
    matrices = all(
        t.stride(1) == 1 and t.stride(0) >= t.shape[1] and t.stride(0) * size % _ALIGNED == 0 and t.data_ptr() % _ALIGNED == 0
        for t in (x, weight)
    )
    vector = bias is None or (bias.stride(0) == 1 and bias.data_ptr() % _ALIGNED == 0)
    return matrices and vector and x.shape[0] > 0 and weight.shape[0] * size % _ALIGNED == 0


def algorithms(product: Product, device: torch.device) -> list[Algorithm]:
    """What the library has for a product on a device, the current one, what its rules prefer first."""
    return _plan(product, product.inputs, product.inputs, device.index).algorithms()


def launch(algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> None:
    """``x @ weight.T + bias``, with a tanh-GELU on the float32 sums where `gelu` is set, into `out`.

    Args:
        algorithm: which.
        x: float16 or bfloat16 ``[rows, inputs]`` on the current device; the others likewise. See `reads`.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``, or None.
        gelu: apply the activation.
        out: contiguous ``[rows, outputs]``.

    Raises:
        RuntimeError: the library refuses.
    """
    product = Product(x.shape[0], weight.shape[0], x.shape[1], x.dtype, bias is not None, gelu)
    _plan(product, x.stride(0), weight.stride(0), x.device.index).run(algorithm, x, weight, bias, out)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cublasLt: {what} returned status {status}")


@functools.cache
def _handle(index: int) -> c_void_p:
    """The library's handle of a device, for all threads and as long as the process."""
    handle = c_void_p()
    with torch.cuda.device(index):
        _check(_library()[0].cublasLtCreate(byref(handle)), "cublasLtCreate")
    return handle


@functools.lru_cache(maxsize=1024)
def _plan(product: Product, row: int, weight_row: int, index: int) -> _Plan:
    return _Plan(product, row, weight_row, index)


class _Plan:
    """The descriptions that the library wants of a product; `row` and `weight_row` are strides in elements."""

    def __init__(self, product: Product, row: int, weight_row: int, index: int) -> None:
        self._lib, self._handle = _library()[0], _handle(index)
        self._lock = threading.Lock()  # of the description, which holds the address of the bias
        kind = _TYPES[product.dtype]
        epilogue = (_BIAS if product.biased else 0) | (_GELU if product.gelu else 0) or _PLAIN
        self._product = self._made("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
        self._set("MatmulDesc", self._product, _TRANSPOSE_A, c_int32(1))
        self._set("MatmulDesc", self._product, _EPILOGUE, c_uint32(epilogue))
        self._set("MatmulDesc", self._product, _BIAS_TYPE, c_int32(kind))
        if product.biased:  # an address for the library's rules, which read nothing
            self._set("MatmulDesc", self._product, _BIAS_POINTER, c_void_p(1 << 12))
        self._weight = self._layout(kind, product.inputs, product.outputs, weight_row)
        self._x = self._layout(kind, product.inputs, product.rows, row)
        self._out = self._layout(kind, product.outputs, product.rows, product.outputs)

    def _made(self, kind: str, *args: Any) -> c_void_p:
        made = c_void_p()
        _check(getattr(self._lib, f"cublasLt{kind}Create")(byref(made), *args), f"cublasLt{kind}Create")
        weakref.finalize(self, getattr(self._lib, f"cublasLt{kind}Destroy"), made).atexit = False
        return made

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> c_void_p:
        return self._made("MatrixLayout", kind, c_uint64(rows), c_uint64(columns), c_int64(stride))

    def _set(self, kind: str, described: c_void_p, attribute: int, value: Any) -> None:
        setter = getattr(self._lib, f"cublasLt{kind}SetAttribute")
        _check(setter(described, attribute, byref(value), c_size_t(sizeof(value))), f"cublasLt{kind}SetAttribute {attribute}")

    def algorithms(self) -> list[Algorithm]:
        """See the function of this name."""
        found = [one for space in WORKSPACES for one in self._found(space)]
        different = dict.fromkeys((bytes(one.algo), one.workspace) for one in found)
        return [Algorithm(data, space, place) for place, (data, space) in enumerate(different)]

    def _found(self, space: int) -> list[_Found]:
        wanted = self._made("MatmulPreference")
        self._set("MatmulPreference", wanted, _WORKSPACE_BYTES, c_uint64(space))
        self._set("MatmulPreference", wanted, _REDUCTIONS, c_uint32(_IN_FLOAT32))
        for attribute in _ALIGNMENTS:
            self._set("MatmulPreference", wanted, attribute, c_uint32(_ALIGNED))
        found, count = (_Found * _MOST)(), c_int()
        matrices = (self._weight, self._x, self._out, self._out)
        heuristic = self._lib.cublasLtMatmulAlgoGetHeuristic
        if heuristic(self._handle, self._product, *matrices, wanted, _MOST, byref(found), byref(count)):
            return []  # the library has none
        return [one for one in found[: count.value] if one.state == 0]

    def run(self, algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Enqueue it on the current stream. The memory to work in comes from torch, in stream order."""
        algo = (c_uint64 * 8).from_buffer_copy(algorithm.data)
        space = torch.empty(algorithm.workspace, dtype=torch.uint8, device=x.device) if algorithm.workspace else None
        with self._lock:
            if bias is not None:
                self._set("MatmulDesc", self._product, _BIAS_POINTER, c_void_p(bias.data_ptr()))
            status = self._lib.cublasLtMatmul(
                self._handle, self._product,
                byref(_ONE), c_void_p(weight.data_ptr()), self._weight, c_void_p(x.data_ptr()), self._x,
                byref(_ZERO), c_void_p(out.data_ptr()), self._out, c_void_p(out.data_ptr()), self._out,
                byref(algo), c_void_p(None if space is None else space.data_ptr()), c_size_t(algorithm.workspace),
                c_void_p(_torch.raw_stream(x.device)),
            )  # fmt: skip
        _check(status, "cublasLtMatmul")
