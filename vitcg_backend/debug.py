"""Dumps: each stage of a compile as text, for people who read compile debug output.

The same text goes to ``TORCH_LOGS=+vitcg_backend`` (debug level), ``TORCH_TRACE`` (tlparse), depyf, and, with
``options={"dump_dir": FOLDER}``, to numbered files ``<pid>_<graph>_<stage>_<pass>.txt``. No pixel data is ever written.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

from torch import fx

from . import _torch

__all__ = ["Dump"]

log = _torch.log
_graph_numbers = itertools.count()


class Dump:
    """Numbered stages of one graph.

    Args:
        folder: where to write, or None for logs and traces alone. A folder that cannot be written only warns.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.graph = next(_graph_numbers)
        self._stage = itertools.count()

    def __call__(self, name: str, what: fx.GraphModule | str) -> None:
        """Show one stage: a graph, or a text such as the result of a proof."""
        if not isinstance(what, str):
            _torch.trace_artifact(f"vitcg_{name}", what)
        if self.folder is None and not log.isEnabledFor(logging.DEBUG):
            return  # printing the graphs of a deep tower takes a second, and nobody reads them
        text = what if isinstance(what, str) else what.print_readable(print_output=False)
        log.debug("graph %d, %s\n%s", self.graph, name, text)
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{os.getpid()}_{self.graph:03d}_{next(self._stage):03d}_{name}.txt"
            path.write_text(text)
        except OSError as error:
            log.warning("vitcg cannot write its dump to %s: %s; going on without dumps.", self.folder, error)
            self.folder = None
