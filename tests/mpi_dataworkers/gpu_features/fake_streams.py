"""Streams without a GPU: everything runs at once in host memory, and what could run too early on a GPU is an error.

Each stream has a clock of what it has seen of all streams. A kernel that reads memory must have seen its last write,
and one that writes must have seen the last write and all reads: else a GPU might do them in the other order. Memory
that nothing has written yet holds the same senseless number everywhere.

While a step is captured CUDA allows less, and so does this: memory is neither taken nor copied from the host, no event
of outside is waited for, a stream works only when it has waited for one that is captured, and in the end training has
waited for all. What a graph gives is senseless once another one has been replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hetstream.mpi_dataworkers.gpu_features.streams import Stream

UNWRITTEN = 0x7FF00BAD_7FF00BAD


class _Clock(dict[Stream, int]):
    """What a stream has seen; as an event, in which capture it was recorded: 0 in none."""

    capture = 0


class FakeStreams:
    """The streams of a device that is not there.

    Args:
        full_at: numbers of copies and of memory taken, counted from 0 on together, for which there is no room.
        num_multiprocessors: that it says it has.

    Attributes:
        log: what has been done, in order: the stream, and what it was.
    """

    def __init__(self, full_at: Sequence[int] = (), num_multiprocessors: int = 4) -> None:
        self.device = torch.device("cpu")
        self.num_multiprocessors = num_multiprocessors
        self.log: list[tuple[Stream, str]] = []
        self._full_at = set(full_at)
        self._taken = 0
        self._clocks: dict[Stream, _Clock] = {stream: _Clock(dict.fromkeys(Stream, 0)) for stream in Stream}
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, list[tuple[Stream, int]]] = {}
        self._alive: list[torch.Tensor] = []  # so that no address comes twice
        self._num_captures = 0
        self._capture = 0  # the one that is under way; 0: none
        self._joined: set[Stream] = set()  # streams that work for it
        self._given: list[Any] = []  # by graphs

    def first(self) -> contextlib.AbstractContextManager[Any]:
        """As `Streams`."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """There is one training stream."""

    def record(self, stream: Stream) -> _Clock:
        """As `Streams`."""
        event = _Clock(self._clocks[stream])
        event.capture = self._capture if stream in self._joined else 0
        return event

    def wait(self, stream: Stream, event: _Clock) -> None:
        """As `Streams`."""
        if self._capture and stream in self._joined and event.capture != self._capture:
            raise AssertionError(
                f"{stream.value} waits for what is outside of its capture (cudaErrorStreamCaptureIsolation)"
            )
        if event.capture and event.capture != self._capture:
            raise AssertionError(f"{stream.value} waits for what was captured (cudaErrorCapturedEvent)")
        if event.capture:
            self._joined.add(stream)
        clock = self._clocks[stream]
        for each, count in event.items():
            clock[each] = max(clock[each], count)

    def copy(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """As `Streams`."""
        self._must_not_capture("a copy from host memory")
        if source.device.type != "cpu":
            raise AssertionError(f"a copy from {source.device}, and not from host memory")
        if into is not None and len(source) > len(into):
            raise AssertionError(f"a copy of {len(source)} words into {len(into)}")
        if into is None:
            self._take("copy")
            into = self._keep(torch.empty_like(source))
        self._do(Stream.COPYING, f"copy {len(source)}", (), [into])
        into[: len(source)].copy_(source)
        return into

    def empty(self, num_words: int) -> torch.Tensor:
        """As `Streams`."""
        self._must_not_capture("memory for results")
        self._take("results")
        return self._keep(torch.full((num_words,), UNWRITTEN, dtype=torch.int64))

    def launch(self, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """As `Streams`."""
        self._do(Stream.PREPROCESSING, "launch", reads, writes)
        run()

    def use(self, tensors: Sequence[torch.Tensor], stream: Stream) -> None:
        """As `Streams`; whoever uses memory reads it from here on."""
        self._do(stream, "use", tensors, ())

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """As `Streams`: a replay does the same again on the same memory."""
        self._must_not_capture("another capture")
        self.log.append((Stream.TRAINING, "capture"))
        made = self._captured(run)
        self._given.append(made)

        def replay() -> None:
            self.log.append((Stream.TRAINING, "replay"))
            for each in self._given:
                _overwrite(each, float("nan"))
            for mine, found in zip(tree_leaves(made), tree_leaves(self._captured(run)), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(found)

        return replay, made

    def _captured(self, run: Callable[[], Any]) -> Any:
        self._num_captures += 1
        self._capture, self._joined = self._num_captures, {Stream.TRAINING}
        try:
            made = run()
        finally:
            joined, self._capture, self._joined = self._joined, 0, set()
        for stream in joined:
            if self._clocks[Stream.TRAINING][stream] < self._clocks[stream][stream]:
                raise AssertionError(f"{stream.value} was captured, and training does not wait for it")
        return made

    def _must_not_capture(self, what: str) -> None:
        if self._capture:
            raise AssertionError(f"{what} while a step is captured")

    def _take(self, what: str) -> None:
        number = self._taken
        self._taken += 1
        if number in self._full_at:
            raise torch.OutOfMemoryError(f"fake device: out of memory, no room for a {what}")

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive.append(tensor)
        return tensor

    def _do(self, stream: Stream, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        if self._capture and stream not in self._joined:
            raise AssertionError(f"{what} on {stream.value} would not be captured: it has not waited for training")
        clock = self._clocks[stream]
        clock[stream] += 1
        now = (stream, clock[stream])
        self.log.append((stream, what))
        for place in {tensor.untyped_storage().data_ptr() for tensor in reads}:
            self._check(clock, stream, what, [self._written[place]] if place in self._written else [])
            self._read.setdefault(place, []).append(now)
        for place in {tensor.untyped_storage().data_ptr() for tensor in writes}:
            before = [self._written[place]] if place in self._written else []
            self._check(clock, stream, what, before + self._read.pop(place, []))
            self._written[place] = now

    def _check(self, clock: _Clock, stream: Stream, what: str, before: Sequence[tuple[Stream, int]]) -> None:
        for other, count in before:
            if other is not stream and clock[other] < count:
                raise AssertionError(f"{what} on {stream.value} does not wait for number {count} of {other.value}")


def _overwrite(made: Any, number: float) -> None:
    for tensor in tree_leaves(made):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(number)
