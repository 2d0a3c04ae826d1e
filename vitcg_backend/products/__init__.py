"""Matrix products of the pieces: the operator `vitcg::product`, and which kernel runs it in a capture.

::

    compile  passes/measure_products.py puts the operator into a piece, and the body lists its products by their sizes
    capture  choice.py times the products of the size, each at most once ─▶ op.py runs what was faster: one of cublasLt's
             algorithms (cublaslt.py) or, where that is asked for, a Triton kernel (triton_product.py)
    else     op.py runs torch's own products (library.py), as it does wherever nothing was chosen

Importing this package needs neither a GPU nor triton.
"""

from __future__ import annotations

from .choice import CHOICES
from .op import PRODUCT, using
from .shape import Product

__all__ = ["CHOICES", "PRODUCT", "Product", "using"]
