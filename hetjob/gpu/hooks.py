"""Puts an agent into a program that knows nothing of it, by torch's own hooks.

The end of an optimizer's step is the boundary of a mini-batch. On an emulated GPU every operator is a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.agent import Agent, Channel
from hetstream.hetjob.gpu.antman import FileChannel
from hetstream.hetjob.gpu.config import SharingSettings
from hetstream.hetjob.gpu.devices.emulation import PREFIX, EmulatedGpu, Kernels
from hetstream.hetjob.gpu.introduction import Connection, Introduction
from hetstream.hetjob.gpu.pages import VERSION


def share_gpu(settings: SharingSettings) -> Agent:
    """Have this process share its GPU from now on, and until it ends."""
    introduction = Introduction(VERSION, settings.job, settings.job_class, settings.gpu)
    gpu = EmulatedGpu(settings.gpu.removeprefix(PREFIX), settings.host_bytes)

    def connect() -> Channel:
        if settings.config_file:
            status = Path(settings.status_file) if settings.status_file else None
            return FileChannel(Path(settings.config_file), status, settings.gpu)
        return Connection(settings.socket, introduction)

    agent = Agent(gpu, settings.job_class, connect)

    def at_boundary(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        _or_end(agent.at_boundary)

    register_optimizer_step_post_hook(at_boundary)
    Kernels(gpu, lambda: _or_end(agent.before_launch), agent.after_launch).__enter__()  # type: ignore[no-untyped-call]
    return agent


def _or_end(call: Callable[[], None]) -> None:
    """A process that may not take part ends, with one line and no traceback."""
    try:
        call()
    except GpuJobRefused as error:
        raise SystemExit(f"hetstream: {error}") from None
