"""From a batch's header and frames to what the training loop gets."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pin

from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
from hetstream.mpi_dataworkers.loader.session import Delivered, LoaderSession
from hetstream.mpi_dataworkers.ops.tree import holds_objects, unflatten
from hetstream.mpi_dataworkers.wire.codec import Buffer, split
from hetstream.mpi_dataworkers.wire.messages import Batch, BatchFailed, Failure

_log = logging.getLogger(__name__)

_pin_memory: Any = torch_pin.pin_memory


@dataclass(frozen=True)
class TorchBatches:
    """Builds a loader's batches from what has come, in the connection's thread or in one of the loader's own.

    Attributes:
        pin: they go to pinned memory, if there is a GPU.
    """

    pin: bool

    def build(self, header: Batch, frames: Sequence[Buffer]) -> Any:
        """The batch of this header; None for one without samples."""
        if header.num_samples == 0:
            return None
        return self.pinned(unflatten(header.spec, split(frames, header.buffers)))

    def step_of(self, header: Batch, frames: Sequence[Buffer]) -> Delivered | BatchFailed | None:
        """The step of this header; None for a batch that is refused, whose step will be leased again."""
        try:
            payload = self.build(header, frames)
        except ProtocolError as error:
            _log.warning("refused step %d: %s; it will be leased again", header.step, error)
            return None
        except BaseException as error:  # noqa: BLE001, user classes are rebuilt here; the same would happen again
            text = f"the batch cannot be rebuilt in the trainer: {error}"
            kind = (RemoteError.__module__, RemoteError.__qualname__)
            return BatchFailed(header.session_id, header.step, Failure(-1, kind, text, traceback.format_exc()))
        num_bytes = sum([length for _, _, length in header.buffers])
        return Delivered(
            payload,
            header.num_samples,
            num_bytes,
            header.origin,
            header.shift,
            header.num_skipped,
            header.left_out,
            header.snapshot,
            num_bytes + len(header.spec) if header.num_samples > 0 else 0,
            header.wrote,
            header.cache,
        )

    def runs_program(self, header: Batch) -> bool:
        """Whether `build` runs code of the program, which may hang."""
        return header.num_samples > 0 and holds_objects(header.spec)

    def pinned(self, batch: Any) -> Any:
        """The batch in pinned memory, if the loader pins and there is a GPU."""
        return _pin_memory(batch) if self.pin and torch.cuda.is_available() else batch


class Rebuilder:
    """Rebuilds batches of one loader in a thread of its own, because that runs code of the program.

    The thread is there while the loader has an open session in which such a batch has come. `put` and `end` are called
    with the loader's lock.

    Args:
        rebuild: rebuilds a batch and puts it into its session. Does not raise.
    """

    def __init__(self, rebuild: Callable[[LoaderSession, Batch, Sequence[Buffer]], None]) -> None:
        self._rebuild = rebuild
        self._work: queue.SimpleQueue[tuple[LoaderSession, Batch, Sequence[Buffer]] | None] | None = None
        self._thread: threading.Thread | None = None  # the last one, which may have been told to end

    def put(self, session: LoaderSession, header: Batch, frames: Sequence[Buffer]) -> None:
        """Rebuild this batch after those before it."""
        if self._work is None:
            self._work = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._work,), name="hetstream-rebuild", daemon=True)
            self._thread.start()
        self._work.put((session, header, frames))

    def end(self) -> None:
        """End when all that was put in is done."""
        if self._work is not None:
            self._work.put(None)
            self._work = None

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it has ended."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self, work: queue.SimpleQueue[tuple[LoaderSession, Batch, Sequence[Buffer]] | None]) -> None:
        while (item := work.get()) is not None:
            self._rebuild(*item)
            del item  # the memory of the batch belongs to the training loop
