"""One loader's batches, from data workers or from this process: the same pipeline, the same bytes.

Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import importlib
import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch
import torch.utils.data
from torch import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import pin_memory as torch_pin

from hetstream.mpi_dataworkers.config import (
    Identity,
    buffer_bytes_from_environment,
    compression_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.errors import RemoteError, ServiceUnavailable
from hetstream.mpi_dataworkers.interpreter import announce
from hetstream.mpi_dataworkers.loader.client import ClientOptions, Delivered, LocalFallback, Pass, ServiceClient
from hetstream.mpi_dataworkers.loader.definitions import Definitions, Sent
from hetstream.mpi_dataworkers.loader.naming import name_loader
from hetstream.mpi_dataworkers.loader.order import ListedPass, LookAhead, Order, steps_to_gather
from hetstream.mpi_dataworkers.loader.sharing import SharedStream
from hetstream.mpi_dataworkers.loader.skipped import SkippedSamples
from hetstream.mpi_dataworkers.ops.index_form import pack_indices
from hetstream.mpi_dataworkers.ops.pipeline import (
    MadeStep,
    Pipeline,
    SampleError,
    acting_as_data_worker,
    enter_worker,
    generators_kept,
    make_step,
)
from hetstream.mpi_dataworkers.ops.tree import holds_objects, resolve_class, unflatten
from hetstream.mpi_dataworkers.rates import RecentRates, step_time_s
from hetstream.mpi_dataworkers.wire.address import parse_service
from hetstream.mpi_dataworkers.wire.codec import Buffer, split
from hetstream.mpi_dataworkers.wire.messages import Batch, BatchFailed, ErrorPolicy, Failure, LoaderStats

_pin_memory: Any = torch_pin.pin_memory
_ExceptionWrapper: Any = torch_utils.ExceptionWrapper
_TorchLoader: Any = torch.utils.data.DataLoader
_log = logging.getLogger(__name__)
_open_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """What one loader object keeps between iterations: its pipeline, its connection, its statistics.

    Attributes:
        pipeline: the program's own objects; steps that the fallback makes are made with a copy.
        definitions: what data workers were given; None without a service.
        local_passes: with persistent_workers, what is kept from pass to pass in process.
        closed: it has left the service.
        makes_what_fails_there: a step whose pipeline no data worker can use is made here; else it raises.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        service: str | None,
        identity: Identity,
        pin: bool,
        timeout_s: float,
        min_window: int,
        description: dict[str, str],
        shared: SharedStream | None = None,
        buffer_bytes: int | None = None,
        skipped: SkippedSamples | None = None,
        divides: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.skipped = skipped or SkippedSamples(ErrorPolicy(), None)
        self.shared = shared
        self.timeout_s = timeout_s
        self.min_window = min_window
        self._pin = pin
        self._client: ServiceClient | None = None
        self._service = parse_service(service) if service is not None else None
        self.definitions = Definitions(self._service) if self._service is not None else None
        self._stats = LoaderStats()
        self._recent = RecentRates(time.monotonic(), 0, 0, 0)
        # When the pass that is open began; its time is counted at its end.
        self._pass_began: float | None = None
        self.local_passes: LocalPasses | None = None
        self.closed = False
        self.makes_what_fails_there = False
        if self._service is not None:
            announce(self._service)
            options = ClientOptions(
                self._service,
                identity,
                name_loader(identity, description, divides),
                description,
                functools.partial(_prepare, pin),  # not bound to this stream, which would live as long as the client
                _runs_program,
                buffer_bytes or buffer_bytes_from_environment(),
                transports_from_environment(),
                compression_from_environment(),
            )
            self._client = ServiceClient(options, self.definition().message)
            _open_streams.add(self)

    @property
    def client(self) -> ServiceClient | None:
        """The loader at its service; of a process that was forked since, a client of its own."""
        if self._client is not None and self._client.is_inherited:
            try:
                self._client = self._client.in_this_process()
            except ServiceUnavailable as error:
                _log.warning("hetstream: this process was forked and works locally: %s", error)
                self._client = None
        return self._client

    @property
    def stats(self) -> LoaderStats:
        return self._stats

    def count(self, **changes: float) -> None:
        """Add to the statistics."""
        fields = {name: getattr(self._stats, name) + value for name, value in changes.items()}
        if self._client is not None:
            fields["duplicates_dropped"] = self._client.duplicates_dropped
        self._stats = msgspec.structs.replace(self._stats, **fields)
        if "steps" in changes:
            now = time.monotonic()
            if self._pass_began is None:
                self._pass_began = now - changes.get("wait_s", 0.0)
            self._recent.note(now, self._stats.steps, self._stats.bytes, self._stats.wait_s)
        elif "elapsed_s" in changes:
            self._pass_began = None
        if self._client is not None:
            # What others see counts the pass that is open, too: it may be the only one, and take weeks.
            self._client.stats = msgspec.structs.replace(self._stats, elapsed_s=self.elapsed_s())

    def rates(self) -> dict[str, float]:
        """Steps and bytes per second, the training loop's share of waiting and own time for a step lately."""
        stats = self._stats
        steps, num_bytes, waited = self._recent.per_s(time.monotonic(), stats.steps, stats.bytes, stats.wait_s)
        rates = {"steps_per_s": steps, "bytes_per_s": num_bytes, "recent_wait_share": min(1.0, waited)}
        return rates | {"step_s": step_time_s(steps, waited)}

    def elapsed_s(self) -> float:
        """Time inside passes, with the one that is open."""
        open_s = 0.0 if self._pass_began is None else time.monotonic() - self._pass_began
        return self._stats.elapsed_s + open_s

    def definition(self) -> Sent:
        """The pipeline as it is now, for data workers; see `Definitions.now`.

        Asked for at each pass: programs change their dataset between epochs (another transform, say), as they can with
        torch's worker processes, which are forked anew.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        assert self.definitions is not None
        return self.definitions.now(self.pipeline)

    def make_locally(self, sent: Sent, order: Order, step: int, seed: int, epoch: int) -> Delivered:
        """Make a step in this process, with a copy of what data workers have: the trainer's own objects, random state
        and place are untouched."""
        indices = order.indices(step)
        if indices is None:
            raise IndexError(step)
        assert self.definitions is not None
        with generators_kept(), acting_as_data_worker(), self.definitions.entered(sent) as entered:
            pipeline = entered.enter(seed)
            try:
                seeds = order.seeds(step, indices, seed, epoch)
                made = make_step(pipeline, indices, seeds, self.skipped.policy, order.form(step))
            except SampleError as error:
                raise error.user_error() from None
        return Delivered(self.pinned(made.batch), made.num_samples, 0, "local", 0, made.num_skipped, made.left_out)

    def leave_out(self, epoch: int, step: int, num_skipped: int, left_out: Sequence[Failure]) -> None:
        """Count and report what the training loop does not get of a step.

        Raises:
            PipelineError: more samples are broken than `quarantine` can hold.
        """
        self.count(skipped=num_skipped)
        self.skipped.note(epoch, step, left_out)

    def pinned(self, batch: Any) -> Any:
        """The batch in pinned memory, if the loader pins and there is a GPU."""
        return _pinned(self._pin, batch)

    def close(self) -> None:
        """Leave the service."""
        self.closed = True
        if self._client is not None:
            self._client.close()
        _open_streams.discard(self)

    def close_with(self, owner: object) -> None:
        """Leave the service when the loader object is no more: programs make a new loader for each epoch."""
        if self._client is not None:
            weakref.finalize(owner, self._client.request_close).atexit = False


def _prepare(pin: bool, header: Batch, frames: Sequence[Buffer]) -> Any:
    if header.num_samples == 0:
        return None
    return _pinned(pin, unflatten(header.spec, split(frames, header.buffers)))


def _pinned(pin: bool, batch: Any) -> Any:
    return _pin_memory(batch) if pin and torch.cuda.is_available() else batch


@atexit.register
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


def _runs_program(header: Batch) -> bool:
    return header.num_samples > 0 and holds_objects(header.spec)


class StreamIterator(Iterator[Any]):
    """One pass over an epoch from data workers; ends at the end of the epoch, or when it is dropped (by `break`, say).

    An exception, of user code or of the service, is raised at its step and never looks like the end: user code's is
    raised once and the next call gives the next step, as in torch; the service's is raised again by each call.

    Args:
        stream: the loader's stream.
        order: which samples each step has.
        seed: base of the random state of samples.
        epoch: the epoch.
        first_step: where to begin.
        owner: what the stream closes with, kept alive for as long as it is iterated.
        look_ahead: how far a program's own sampler is drawn.
        sent: what data workers run; default the pipeline as it is now.
    """

    def __init__(
        self,
        stream: Stream,
        order: Order,
        seed: int,
        epoch: int,
        first_step: int,
        owner: object,
        look_ahead: LookAhead = LookAhead(),  # noqa: B008, it is frozen
        sent: Sent | None = None,
    ) -> None:
        assert stream.client is not None
        self._owner = owner
        self._stream = stream
        self._client = stream.client
        self._order = order
        self._seed = seed
        self._epoch = epoch
        self._started = time.monotonic()
        self._look_ahead = look_ahead
        self._first_step = self._listed = first_step
        self._unsent: list[bytes] = []
        self._end_is_sent = order.num_steps >= 0
        self.position = first_step
        self._sent = sent or stream.definition()
        self._pass: Pass | None = self._open()
        self._extend(taking=False)

    def _open(self) -> Pass:
        """Open the pass at the position."""
        definition = self._sent.message
        stream, order, seed, shared = self._stream, self._order, self._seed, self._stream.shared
        return self._client.open_pass(
            definition,
            self._epoch,
            seed,
            order.order,
            self.position,
            order.num_steps,
            stream.min_window,
            shared.with_others(definition.definition_id, seed, order.order, order.num_steps) if shared else None,
            (shared.shift or 0) if shared else 0,
            errors=stream.skipped.policy,
        )

    def _go_on_as_child(self) -> Pass:
        """In a process that was forked in the middle of the pass: go on from there with a pass of its own."""
        client, order = self._stream.client, self._order
        if client is None:
            raise ServiceUnavailable(
                f"process {os.getpid()} was forked in the middle of an epoch and reaches no dispatcher to go on with it"
            )
        self._client = client
        self._pass = one = self._open()
        if isinstance(order, ListedPass):
            # What the parent drew from the sampler is there.
            drawn = range(self.position, self._listed)
            self._unsent = []
            steps = [
                pack_indices(indices, order.form(step))
                for step in drawn
                if (indices := order.indices(step)) is not None
            ]
            client.extend(one, steps, self._end_is_sent)
        return one

    def _extend(self, taking: bool) -> None:
        """Draw from the program's sampler, and send what was drawn."""
        one, order = self._pass, self._order
        if one is None or not isinstance(order, ListedPass) or self._end_is_sent:
            return
        position = one.buffer.position
        goal = self._look_ahead.goal(position, one.window, taking, self._listed > self._first_step)
        try:
            while self._listed < goal and (indices := order.indices(self._listed)) is not None:
                self._unsent.append(pack_indices(indices, order.form(self._listed)))
                self._listed += 1
        finally:  # also what it gave before it raised
            self._end_is_sent = order.num_steps >= 0
            is_needed = self._listed - len(self._unsent) <= position < self._listed
            if self._end_is_sent or is_needed or len(self._unsent) >= steps_to_gather(goal, position):
                steps, self._unsent = self._unsent, []
                if steps or self._end_is_sent:
                    self._client.extend(one, steps, self._end_is_sent)

    def __next__(self) -> Any:
        while (item := self._next_item()).num_samples == 0:
            pass
        return item.payload

    def _next_item(self) -> Delivered:
        one = self._pass
        if one is None:
            raise StopIteration
        if self._client.is_inherited:
            one = self._go_on_as_child()
        step = one.buffer.position
        self._extend(taking=True)
        if step == self._order.num_steps:
            self._stream.count(epochs=1)
            self.close()
            raise StopIteration
        started = time.monotonic()
        item = self._take(one, started)
        self.position = step + 1
        self._order.forget(step)
        if isinstance(item, BatchFailed):
            raise rebuild_error(item)
        if isinstance(item.payload, LocalFailure):
            raise item.payload.error
        if item.num_skipped:
            self._stream.leave_out(self._epoch, step, item.num_skipped, item.left_out)
        if item.num_samples == 0:
            return item
        self._stream.count(steps=1, samples=item.num_samples, bytes=item.num_bytes, wait_s=time.monotonic() - started)
        if self._stream.shared is not None and item.origin != "local":
            self._stream.count(
                shared_steps=item.origin == "cache",
                repeated_steps=item.origin == "again",
                skipped_steps=self._stream.shared.skipped(item.shift),
            )
        return item

    def _take(self, one: Pass, started: float) -> Delivered | BatchFailed:
        timeout_s = self._stream.timeout_s
        try:
            item = self._client.take(one, started + timeout_s if timeout_s > 0 else None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds") from None
        if isinstance(item, LocalFallback):
            self._client.say_local(item.reason)
            return self._client.put_local(one, self._made_here(item.step))
        if isinstance(item, BatchFailed) and item.failure.is_final and self._stream.makes_what_fails_there:
            self._client.say_local(f"data workers cannot: {_told(item.failure)}")
            return self._made_here(item.step)
        self._client.say_streaming()
        return item

    def _made_here(self, step: int) -> Delivered:
        self._stream.count(local_steps=1)
        try:
            return self._stream.make_locally(self._sent, self._order, step, self._seed, self._epoch)
        except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
            return Delivered(LocalFailure(error), -1, 0)

    def close(self) -> None:
        """End the pass; safe to call twice."""
        if self._pass is not None:
            ended, self._pass = self._pass, None
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            self._client.close_pass(ended)

    def __del__(self) -> None:
        one = getattr(self, "_pass", None)
        if one is not None and not self._stream.closed:  # at the interpreter's end streams are closed first
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            self._client.abandon(one)


class LocalFailure:
    """In the place of a batch: user code raised while the loader made the step itself."""

    def __init__(self, error: Exception) -> None:
        # As itself a StopIteration would look like the end of the data.
        self.error = RuntimeError(f"user code raised {error!r}") if isinstance(error, StopIteration) else error


def _told(failure: Failure) -> str:
    """A failure on one line: what, and where."""
    first = failure.text.partition("\n")[0]
    return f"{first} (on {failure.host}, {failure.interpreter})" if failure.host else first


def rebuild_error(failed: BatchFailed) -> Exception:
    """The exception of a data worker as its own type, with the sample and the remote traceback in its text."""
    failure = failed.failure
    module, name = failure.error_type
    where = f"sample {failure.sample_index}" if failure.sample_index >= 0 else f"step {failed.step}"
    host = f" on {failure.host} ({failure.interpreter})" if failure.host else ""
    text = f"{failure.text}\n\nin a data worker{host}, {where}:\n{failure.remote_traceback}"
    try:
        if module not in ("builtins", "__main__"):
            importlib.import_module(module)
        kind = getattr(builtins, name) if module == "builtins" else resolve_class(module, name)
        error = kind(text)
    except Exception:  # noqa: BLE001, a class that is not here or takes other arguments: any exception may come
        return RemoteError(f"{module}.{name}: {text}")
    fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # which would look like the end
    return error if fit else RemoteError(f"{module}.{name}: {text}")


# --- in process -----------------------------------------------------------------------------------------------------


class FailedStep:
    """In the place of a step: user code raised while torch's own DataLoader made it.

    A value, because an exception would look like torch's own (a timeout, a process that died), which takes no step.

    Args:
        error: what user code raised.
        in_trainer: in the training process; else the exception has to travel.
    """

    def __init__(self, error: BaseException, in_trainer: bool) -> None:
        kind = type(error)
        where = "in a process of the loader"
        self._error: Any = error if in_trainer else _ExceptionWrapper((kind, error, error.__traceback__), where)

    def reraise(self) -> None:
        """Raise the exception, with its own type."""
        if isinstance(self._error, BaseException):
            raise self._error
        self._error.reraise()


class _StepDataset(torch.utils.data.Dataset[Any]):
    """Steps as elements: lets torch's own worker processes run the pipeline, a batch an element."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_ready = False

    def __getitem__(self, step: Any) -> Any:
        indices, seeds, policy, form = step
        if not self._is_ready:  # in the process that makes the steps, after worker_init_fn
            self._pipeline, self._is_ready = self._pipeline.with_own_generators(), True
        in_trainer = torch.utils.data.get_worker_info() is None
        try:
            if in_trainer:
                with generators_kept(self._pipeline.own_generators):
                    made = make_step(self._pipeline, indices, seeds, policy, form)
            else:
                made = make_step(self._pipeline, indices, seeds, policy, form)
        except SampleError as error:
            return FailedStep(error.user_error(), in_trainer)
        return made


def no_collate(batch: Any) -> Any:
    """The batch as it is: torch's own DataLoader gets whole ones."""
    return batch


class PlainLoader(_TorchLoader):  # type: ignore[misc]
    """torch's own DataLoader, as it is without the hook and whatever else has changed its class."""

    _iterator: Any

    def _get_iterator(self) -> Any:
        kind = torch_dataloader._MultiProcessingDataLoaderIter
        return kind(self) if self.num_workers else torch_dataloader._SingleProcessDataLoaderIter(self)

    def __iter__(self) -> Any:
        if not self.persistent_workers:
            return self._get_iterator()
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator


@dataclass(frozen=True)
class BeginWorker:
    """The `worker_init_fn` of torch's processes that run a pipeline: they show user code what a data worker shows."""

    pipeline: Pipeline
    base_seed: int

    def __call__(self, worker_id: int) -> None:
        enter_worker(self.pipeline, self.base_seed, worker_id, begins=True)


class _CurrentSteps:
    """The sampler of torch's DataLoader: the steps of the pass that began last."""

    def __init__(self) -> None:
        self.steps: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.steps


class LocalPasses:
    """torch's own DataLoader over the steps of passes, one after the other; its worker processes may outlive a pass.

    Args:
        pipeline: what makes a step.
        torch_options: keywords of torch's DataLoader.
        base_seed: of the worker processes.
    """

    def __init__(self, pipeline: Pipeline, torch_options: dict[str, Any], base_seed: int) -> None:
        self._steps = _CurrentSteps()
        self._current: weakref.ref[object] | None = None
        self._loader = PlainLoader(
            _StepDataset(pipeline),
            batch_size=None,
            sampler=self._steps,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            **torch_options | {"worker_init_fn": BeginWorker(pipeline, base_seed)},
        )

    def begin(self, owner: object, steps: Iterator[Any]) -> Iterator[Any]:
        """Make steps; ends the owner before this one, whose worker processes these are."""
        self._steps.steps, self._current = steps, weakref.ref(owner)
        iterator: Iterator[Any] = iter(self._loader)
        return iterator

    def is_current(self, owner: object) -> bool:
        """Whether the worker processes still work for this owner."""
        return self._current is not None and self._current() is owner


class LocalPass(Iterator[Any]):
    """A pass in process, which counts how long it took."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._open = True

    def _end(self) -> NoReturn:
        """Count the pass as a whole one, and say that it is over."""
        if self._open:
            self._stream.count(epochs=1)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Note how long the pass took; safe to call twice."""
        if self._open:
            self._open = False
            self._stream.count(elapsed_s=time.monotonic() - self._started)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class LocalIterator(LocalPass):
    """One pass in process, through torch's own DataLoader with the user's `num_workers`."""

    def __init__(
        self, stream: Stream, order: Order, seed: int, epoch: int, first_step: int, torch_options: dict[str, Any]
    ) -> None:
        self._epoch = epoch
        self._order = order
        self.position = first_step
        self._passes = stream.local_passes or LocalPasses(stream.pipeline, torch_options, seed)
        if torch_options.get("persistent_workers"):
            stream.local_passes = self._passes
        self._iterator = self._passes.begin(self, self._steps(stream, order, seed, epoch, first_step))
        super().__init__(stream)

    @staticmethod
    def _steps(stream: Stream, order: Order, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        for step in itertools.count(first_step):
            indices = order.indices(step)
            if indices is None:
                return
            yield indices, order.seeds(step, indices, seed, epoch), stream.skipped.policy, order.form(step)

    def __next__(self) -> Any:
        while (made := self._next_made()).num_samples == 0:
            pass
        return made.batch

    def _next_made(self) -> MadeStep:
        started = time.monotonic()
        if self._open and not self._passes.is_current(self):
            raise RuntimeError(
                "another iteration of this DataLoader has begun; with persistent_workers=True there is one at a time"
            )
        made: MadeStep | FailedStep | None = next(self._iterator, None)
        if made is None:
            self._iterator = iter(())  # ends torch's processes
            if self._order.indices(self.position) is not None:
                raise early_end(self.position)
            self._end()
        step = self.position
        self._order.forget(step)
        self.position = step + 1
        if isinstance(made, FailedStep):
            made.reraise()
        assert isinstance(made, MadeStep)
        if made.num_skipped:
            self._stream.leave_out(self._epoch, step, made.num_skipped, made.left_out)
        if made.num_samples > 0:
            self._stream.count(steps=1, samples=made.num_samples, local_steps=1, wait_s=time.monotonic() - started)
        return made


def early_end(step: int) -> RuntimeError:
    """torch's own DataLoader says that there is no more, and there is: this is not the end of the data."""
    return RuntimeError(
        f"the DataLoader's processes ended before step {step}: one of them died, or user code (worker_init_fn, "
        "the sampler) raised"
    )
