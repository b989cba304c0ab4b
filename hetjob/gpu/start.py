"""Starts the agent when the program has imported torch. Imports nothing of torch, and little else, before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TARGET = "torch"


def share_when_torch_is_imported() -> None:
    """Wait for torch. A program that never imports it launches nothing by it, and is left alone."""
    sys.meta_path.insert(0, _Finder())


def _share() -> None:
    """Start the agent, but not in processes that the program has made with multiprocessing: those have no GPU."""
    from hetstream.base.errors import HetstreamError
    from hetstream.hetjob.gpu.config import settings_from_environment

    if multiprocessing.parent_process() is not None:
        return
    try:
        settings = settings_from_environment()
        if settings is not None:
            from hetstream.hetjob.gpu.hooks import share_gpu

            share_gpu(settings)
    except HetstreamError as error:
        raise SystemExit(f"hetstream: {error}") from error


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and starts the agent when torch is complete."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _SharingLoader(spec.loader)
        return spec


class _SharingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _share()
