"""Puts an agent into a program that knows nothing of it, by torch's own hooks.

The end of an optimizer's step is the boundary of a mini-batch. In an opportunistic process, and on an emulated GPU,
every operator is a launch. Of a guaranteed process on a real GPU, the first module that runs after a boundary is. On a
real GPU, replays of CUDA graphs are launches of both, and kernels of Triton's of an opportunistic process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hetstream.base.errors import OptionsError
from hetstream.base.process import when_imported
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.agent import Agent, OrderChannel
from hetstream.hetjob.gpu.config import SharingSettings
from hetstream.hetjob.gpu.cuda import (
    CudaGpu,
    Graphs,
    Launches,
    compile_nothing,
    current_gpu,
    is_capturing,
    is_in_use,
    used_beside,
    watch_triton,
)
from hetstream.hetjob.gpu.device import Device
from hetstream.hetjob.gpu.emulated_file import PREFIX
from hetstream.hetjob.gpu.emulation import EmulatedGpu, Kernels
from hetstream.hetjob.gpu.handshake import Connection, Introduction
from hetstream.hetjob.gpu.orders import VERSION, JobClass


def share_gpu(settings: SharingSettings, launcher: int) -> Agent | None:
    """Have this process share its GPU from now on, and until it ends.

    Args:
        settings: how.
        launcher: process that has started this one as a rank, such as torchrun; 0: nobody who would end it.

    Returns:
        Its agent; None for a guaranteed process of which nobody can say which GPU it uses.

    Raises:
        OptionsError: the emulated GPU is none.
        GpuJobRefused: nobody can say which emulated GPU an opportunistic process uses.
    """
    if settings.gpus[0].startswith(PREFIX):
        if settings.problem:
            if settings.job_class is JobClass.OPPORTUNISTIC:
                raise GpuJobRefused(settings.problem)
            sys.stderr.write(f"hetstream: {settings.problem}; this guaranteed job goes on as if alone\n")
            return None
        try:
            gpu = EmulatedGpu(settings.gpu.removeprefix(PREFIX), settings.host_bytes)
        except (OSError, ValueError) as error:
            raise OptionsError(
                f"HETSTREAM_GPU={settings.gpu}: {error}. Make one: hetstream internal gpu-emulate FILE"
            ) from error
        agent = _agent(settings, gpu, launcher)
        register_optimizer_step_post_hook(lambda *_: _or_end(agent.at_boundary))
        launches: Any = Kernels(gpu, lambda: _or_end(agent.before_launch), agent.after_launch)
        launches.__enter__()
        return agent
    cuda = CudaGpu(settings.gpu, settings.host_bytes)
    agent = _agent(settings, cuda, launcher)

    def before() -> None:
        _or_end(agent.before_launch)

    def after_replay() -> None:
        cuda.launches_much()
        agent.after_launch()

    graphs = Graphs(torch.cuda.CUDAGraph, before, after_replay, lambda: _or_end(agent.at_boundary))

    def after_step(*_: object) -> None:
        if is_in_use() and not graphs.takes_step():
            _or_end(agent.at_boundary)

    register_optimizer_step_post_hook(after_step)
    if settings.job_class is JobClass.OPPORTUNISTIC:
        if len(settings.gpus) > 1:
            register_optimizer_step_post_hook(lambda *_: _or_end(_use_one_gpu))
        launches = Launches(before, agent.after_launch)
        launches.__enter__()
        compile_nothing()
        when_imported("triton", lambda triton: watch_triton(triton, before, agent.after_launch))
    else:
        _FirstForward(agent)
    return agent


class _FirstForward:
    """Has the agent notice the first forward after each boundary, and takes its hook away until the next one."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handle: RemovableHandle | None = None
        self._watch()
        register_optimizer_step_post_hook(lambda *_: self._watch())

    def _watch(self) -> None:
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._notice)

    def _notice(self, *_: Any) -> None:
        if self._handle is not None and is_in_use() and not is_capturing():
            self._handle.remove()
            self._handle = None
            _or_end(self._agent.before_launch)


def _agent(settings: SharingSettings, gpu: Device, launcher: int) -> Agent:
    rank = settings.rank

    def connect() -> OrderChannel:
        name = settings.gpu
        if len(settings.gpus) > 1 and not settings.gpus[0].startswith(PREFIX):
            name = current_gpu(settings.gpus) or name
        if not name:
            raise GpuJobRefused(settings.problem)
        introduction = Introduction(
            VERSION, settings.job, settings.job_class, name,
            rank=rank.number, num_ranks=rank.count, launch=rank.launch, program=settings.program,
        )  # fmt: skip
        return Connection(settings.socket, introduction, settings.coordinator_uid)

    follows_forks = not settings.gpu.startswith(PREFIX)
    return Agent(gpu, settings.job_class, connect, follows_forks=follows_forks, launcher=launcher)


def _use_one_gpu() -> None:
    """An agent keeps to the orders for one GPU: nothing would hold the process back on another one."""
    others = used_beside() if is_in_use() else []
    if others:
        raise GpuJobRefused(
            f"this opportunistic process has tensors on GPU {', '.join(map(str, others))} beside its own, and may have "
            "one GPU. Start a process for each (torchrun --nproc-per-node=N, srun --ntasks-per-node=N), and have each "
            "call torch.cuda.set_device(LOCAL_RANK) first"
        )


def _or_end(call: Callable[[], None]) -> None:
    """A process that may not take part ends, with one line and no traceback."""
    try:
        call()
    except GpuJobRefused as error:
        raise SystemExit(f"hetstream: {error}") from None
