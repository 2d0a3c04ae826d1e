"""The compiler: the ordered passes, and nothing else. Each file holds one pass and says what it does, before and after.

On the Dynamo graph: `take_out_checks`, `write_out_of_place`, `bind_tokens`, `hoist_metadata`, `prologue_on_host`,
`cut_tail`, `split_at_attention`; before all of them, in `backend.py`, `take_out_crops`. On each unique
piece, at ATen level: the trace, `prove_padding`, the rewrites, Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import Tensor, fx

from .. import _torch
from ..debug import Dump
from ..options import Options
from ..products import Product
from .align_products import align_products
from .bind_tokens import Bound, bind_tokens, give_tokens
from .complex_to_real import complex_to_real
from .cut_tail import Tail, cut_tail
from .gelu_epilogue import gelu_epilogue
from .graph import Ineligible
from .hoist_metadata import Hoisted, hoist_metadata
from .measure_products import measure_products, products_of
from .patch_conv_to_matmul import patch_conv_to_matmul
from .program import Program, UniquePiece
from .prologue_on_host import prologue_on_host
from .prove_padding import Gather, Proof, prove_padding, prove_prologue
from .split_at_attention import split_at_attention
from .take_out_checks import Checks, take_out_checks
from .write_out_of_place import write_out_of_place

__all__ = ["CompiledBody", "Ineligible", "PieceCache", "compile_body", "give_tokens"]

TORCH_REWRITES = (gelu_epilogue,)
"""Rewrites of a piece before it is traced to ATen, where an activation is still one operation."""

ATEN_REWRITES = (complex_to_real, patch_conv_to_matmul, align_products)
"""Rewrites of the ATen piece. Each rewrite states its numerics contract; pieces that run eagerly see none of them.

But with ``matmul="torch"``, `measure_products` comes after them.
"""

MAX_PIECES = 512
"""Most pieces kept for towers to come; a tower holds its own in any case."""

PieceFunction = Callable[[list[Any]], Any]


@dataclass
class CompiledPiece:
    """A unique piece, ready to call with ``[n, *tensors]``.

    Attributes:
        function: what to call.
        proof: what the padding proof said, None when it refused.
        refusal: why it refused.
        limits: what tracing and Inductor assumed about n, such as sizes that fit 32-bit indices, as (symbol, expressions).
        gm: the piece, whose constants its key knows by their addresses: none of these is free as long as the key is kept.
        products: its products whose kernels may be chosen, see `products_of`.
    """

    function: PieceFunction
    proof: Proof | None
    refusal: Ineligible | None
    limits: tuple[sympy.Symbol, list[sympy.Basic]]
    gm: fx.GraphModule
    products: list[tuple[int, Product]]


@dataclass
class PieceCache:
    """Pieces by what makes them equal; shared by every graph, cleared by `vitcg_backend.reset()`."""

    pieces: dict[Any, CompiledPiece] = field(default_factory=dict)
    compiled: int = 0


@dataclass
class CompiledBody:
    """A graph after all passes.

    Attributes:
        hoisted: prologue and what it feeds.
        host_prologue: the prologue for a grid on the host, None where it has to run on the device.
        program: the body.
        tail: what runs after it on the exact rows, None when the body is all.
        functions: for each unique piece of the program, what to call.
        gathers: (metadata index, index rows per n, source rows per n) that each layout must satisfy.
        refusal: why the body may not be padded, or None when every piece is proved.
        limits: what the trace and the compiled pieces assume about n, see `CompiledPiece`.
        decisions: the part of them that the traces of proved pieces decided by, see `Proof`.
        checks: what the tower checks of a call's values before all else, None without any.
        products: the pieces' products whose kernels may be chosen, with their rows for each n.
        tiles: whether Triton kernels are among those.
    """

    hoisted: Hoisted
    host_prologue: fx.GraphModule | None
    program: Program
    tail: Tail | None
    functions: list[PieceFunction]
    gathers: list[tuple[int, int, int]]
    refusal: Ineligible | None
    limits: list[tuple[sympy.Symbol, list[sympy.Basic]]]
    decisions: list[tuple[sympy.Symbol, list[sympy.Basic]]] = field(default_factory=list)
    checks: Checks | None = None
    products: list[tuple[int, Product]] = field(default_factory=list)
    tiles: bool = False

    def __post_init__(self) -> None:
        self._allowed: dict[int, bool] = {}
        self._padded: dict[int, bool] = {}

    def allows(self, n: int) -> bool:
        """Whether the compiled pieces are right for `n` tokens."""
        return _all_true(self.limits, n, self._allowed)

    def may_be_padded(self, n: int) -> bool:
        """Whether a call of `n` tokens takes the branches that the pieces were traced along, as its bucket does."""
        return _all_true(self.decisions, n, self._padded)

    def products_at(self, n: int) -> list[Product]:
        """The products of a run of `n` tokens."""
        return [replace(product, rows=rows * n) for rows, product in self.products]

    def check(self, args: Sequence[Any]) -> None:
        """Make the tower's own checks of a call's values; raises what they raise in eager."""
        if self.checks is not None:
            self.checks(args)

    def assumptions(self) -> str:
        """What the compiled pieces assume about n, in words."""
        texts = {str(e.subs(s, sympy.Symbol("n"))) for s, es in self.limits for e in es}
        return f"the compiled pieces are right for token counts n with {' and '.join(sorted(texts))}"

    @property
    def bound(self) -> Bound:
        """The graph with its private sizes."""
        return self.hoisted.bound


def _all_true(expressions: list[tuple[sympy.Symbol, list[sympy.Basic]]], n: int, known: dict[int, bool]) -> bool:
    """Whether all expressions hold for `n`; answers are kept in `known`."""
    if n not in known:
        if len(known) > 4096:
            known.clear()
        known[n] = all(e.subs(s, n) == sympy.true for s, es in expressions for e in es)
    return known[n]


def compile_body(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    cache: PieceCache,
    dump: Dump,
    begun: Callable[[CompiledBody], None] = lambda body: None,
) -> CompiledBody:
    """Run the pipeline on a Dynamo graph and the inputs of its first call.

    Args:
        gm: the graph, which is changed.
        example_inputs: see above.
        options: the user's.
        cache: of pieces.
        dump: where graphs are shown.
        begun: called with the body as soon as it is taken apart, before its pieces are compiled.

    Raises:
        Ineligible: the graph cannot be taken apart at all; it then runs as an ordinary compiled graph.
    """
    dump("dynamo", gm)
    gm, checks = take_out_checks(gm)
    bound = bind_tokens(write_out_of_place(gm), example_inputs)
    dump("bind_tokens", bound.gm)
    hoisted = hoist_metadata(bound)
    dump("hoist_metadata_prologue", hoisted.prologue)
    on_host = prologue_on_host(hoisted)
    tail = cut_tail(hoisted)
    if tail is not None:
        dump("tail", tail.gm)
    program = split_at_attention(hoisted)
    functions, gathers, limits, decisions, products = [], set(), [], [], []
    refusal = prove_prologue(hoisted)
    begun(CompiledBody(hoisted, on_host, program, tail, [], [], refusal, [], checks=checks))
    for number, piece in enumerate(program.pieces):
        dump(f"piece{number}_used_{piece.uses}_times", piece.gm)
        compiled = _compile_piece(piece, program, number, options=options, cache=cache, dump=dump)
        functions.append(compiled.function)
        limits.append(compiled.limits)
        products += compiled.products
        decisions.append((compiled.limits[0], compiled.proof.decisions if compiled.proof else []))
        refusal = refusal or compiled.refusal
        for gather in compiled.proof.gathers if compiled.proof else []:
            for uses in piece.metadata_inputs:
                gathers.add(_obligation(gather, uses))
        known = [{*uses, *batch} for uses, batch in zip(piece.metadata_inputs, piece.batch_inputs, strict=True)]
        if compiled.proof and any(not compiled.proof.lookups <= positions for positions in known):
            text = "a table is looked up by an index that is not metadata: that of a padded row could point anywhere"
            refusal = refusal or Ineligible("unproved", text)
    limits.append((program.symbols.symbol, program.symbols.guards()))
    if _gives_away_inputs(program, bound):
        refusal = refusal or Ineligible("aliased_input", "a result is a view of an argument, which static buffers stand for")
    if None in gathers:
        refusal = refusal or Ineligible("unproved", "rows are gathered by an index that is not metadata")
    checked = sorted(g for g in gathers if g is not None)
    tiles = options.matmul == "max-autotune"
    return CompiledBody(
        hoisted, on_host, program, tail, functions, checked, refusal, limits, decisions, checks, products, tiles
    )


def _gives_away_inputs(program: Program, bound: Bound) -> bool:
    """Whether a result is a view of an argument of the call: a write into it would have to reach the caller's tensor."""
    given = {n.meta["memory"] for n in bound.placeholders if isinstance(n.meta["val"], Tensor)}
    results = zip(program.outputs, program.output_memory, strict=True)
    return any(kind == "slot" and memory in given for (kind, _), memory in results)


def _obligation(gather: Gather, uses: dict[int, int]) -> tuple[int, int, int] | None:
    if gather.index not in uses:
        return None
    return uses[gather.index], gather.index_rows, gather.source_rows


def _compile_piece(
    piece: UniquePiece, program: Program, number: int, *, options: Options, cache: PieceCache, dump: Dump
) -> CompiledPiece:
    key = (piece.key, options.inner, options.matmul == "torch", _torch.ambient_state())
    if key in cache.pieces:
        return cache.pieces[key]
    symbols = program.symbols
    compiled = options.inner == "inductor"
    gm = piece.gm
    for torch_rewrite in TORCH_REWRITES if compiled else ():
        gm = torch_rewrite(gm)
    fakes = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    aten = _torch.aot_trace(gm, fakes, symbols.mode)
    proof, refusal = None, None
    try:
        proof = prove_padding(aten, symbols)
        dump(f"piece{number}_proof", "\n".join(f"{op}: {why}" for op, why in proof.rules))
    except Ineligible as error:
        refusal = error
        dump(f"piece{number}_refused", str(error))
    for rewrite in ATEN_REWRITES if compiled else ():
        aten = rewrite(aten)
    if compiled and options.matmul != "torch":
        aten = measure_products(aten, symbols=symbols)
    products = products_of(aten, symbols)
    dump(f"piece{number}_aten", aten)
    function = _torch.compile_piece(aten, symbols.mode) if compiled else _run_eager(piece.gm)
    cache.compiled += 1
    if len(cache.pieces) >= MAX_PIECES:
        cache.pieces.pop(next(iter(cache.pieces)))
    limits = (symbols.symbol, symbols.guards())
    cache.pieces[key] = CompiledPiece(function, proof, refusal, limits, piece.gm, products)
    return cache.pieces[key]


def _run_eager(gm: fx.GraphModule) -> PieceFunction:
    """The torch-level piece as it stands: the operations of eager, in eager's order."""

    def function(arguments: list[Any]) -> Any:
        return gm(*arguments)

    return function
