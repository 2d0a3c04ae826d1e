"""Measured choices of kernels on disk, one small JSON file for each kind, device and set of versions.

    {"environment": {"device": "NVIDIA H200", "torch": "2.11.0+cu130", ...},
     "choices": {"heads 16/16 of 72, torch.bfloat16, 2048 rows, ...": {"kernel": "triton", "us": {"triton": 21.3, ...}}}}

The file is a cache and nothing more: one that is missing, unreadable or of another environment is an empty one, and one that
cannot be written is none. It is replaced as a whole, so no reader sees half of it; of two processes that write at once one may
lose what it measured, and measures it again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import _torch

__all__ = ["KeptChoices", "environment", "version"]

_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flashinfer-python", "nvidia-cudnn-frontend", "vitcg-backend")


def environment(device: torch.device) -> dict[str, str]:
    """What measured times depend on besides the call: the device, and versions of whatever brings a kernel."""
    on_gpu = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version() if on_gpu else None),
    }
    return found | {name: version(name) for name in _PACKAGES}


def version(package: str) -> str:
    """The installed version of a package, "none" without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class KeptChoices:
    """The file of one kind of kernels in one environment.

    Args:
        environment: see `environment`.
        kind: of kernels, ``attention`` or ``products``.
        folder: where the file lies; None = below torch's own cache of compiled code.
    """

    def __init__(self, environment: Mapping[str, str], kind: str, folder: Path | None = None) -> None:
        self.environment, self.kind, self._folder = dict(environment), kind, folder

    @property
    def path(self) -> Path:
        """The file."""
        folder = _torch.cache_folder() / "vitcg" if self._folder is None else self._folder
        text = json.dumps(self.environment, sort_keys=True)
        return folder / f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[str, str]:
        """The name of the kernel for each key."""
        return {key: choice["kernel"] for key, choice in self._read().items()}

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text("utf-8"))
            if found["environment"] != self.environment:
                return {}
            choices = found["choices"].items()
            return {key: choice for key, choice in choices if isinstance(choice["kernel"], str)}
        except FileNotFoundError:
            return {}
        except Exception as error:  # whatever it holds, it costs a measurement and no more
            _torch.log.info("measured choices of %s kernels cannot be read: %s: %s", self.kind, type(error).__name__, error)
            return {}

    def add(self, key: str, kernel: str, seconds: Mapping[str, float]) -> None:
        """Keep the choice for a key, and what it was chosen by."""
        try:
            us = {name: round(time * 1e6, 2) for name, time in seconds.items()}
            choices = self._read() | {key: {"kernel": kernel, "us": us}}
            text = json.dumps({"environment": self.environment, "choices": choices}, indent=1, sort_keys=True)
            self._replace(text)
        except Exception as error:  # a full or read-only disk
            _torch.log.info("a measured choice of %s kernels cannot be kept: %s: %s", self.kind, type(error).__name__, error)

    def _replace(self, text: str) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
