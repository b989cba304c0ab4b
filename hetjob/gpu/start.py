"""Starts the agent when the program has imported torch. Imports nothing of torch, and little else, before."""

from __future__ import annotations

import multiprocessing

from hetstream.base.imports import when_imported


def share_when_torch_is_imported() -> None:
    """Wait for torch. A program that never imports it launches nothing by it, and is left alone."""
    when_imported("torch", lambda _: _share())


def _share() -> None:
    """Start the agent. Processes that the program has made with multiprocessing have nothing of an emulated GPU."""
    from hetstream.base.errors import HetstreamError
    from hetstream.hetjob.gpu.config import settings_from_environment
    from hetstream.hetjob.gpu.devices.emulated_file import PREFIX

    try:
        settings = settings_from_environment()
        is_child = multiprocessing.parent_process() is not None
        if settings is not None and not (is_child and settings.gpu.startswith(PREFIX)):
            from hetstream.hetjob.gpu.hooks import share_gpu

            share_gpu(settings)
    except HetstreamError as error:
        raise SystemExit(f"hetstream: {error}") from error
