"""The streams of a GPU on which training, preprocessing and copies run beside one another: the seam of `corun.py`.

`CudaStreams` is a GPU's. `fake_streams.py` of the tests has the other, which needs none and finds what is read too
early.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from hetstream.mpi_dataworkers.errors import FeatureError

# PyTorch knows these two priorities; 0 is the default.
_FIRST, _LAST = -1, 0


class Stream(enum.Enum):
    """Who works on a stream."""

    TRAINING = "training"
    PREPROCESSING = "preprocessing"
    COPYING = "copying"


class Streams(Protocol):
    """Three streams of one device, each of which does what it gets in order.

    Attributes:
        device: on which tensors are.
        num_multiprocessors: of it.
    """

    device: torch.device
    num_multiprocessors: int

    def first(self) -> contextlib.AbstractContextManager[Any]:
        """Return what the caller does within comes before preprocessing."""

    def follow(self) -> None:
        """Take the caller's current stream as the one of training."""

    def record(self, stream: Stream) -> Any:
        """Return an event: what the stream has got to do up to here."""

    def wait(self, stream: Stream, event: Any) -> None:
        """What the stream gets from here on begins when the event is over. The host waits for nothing."""

    def copy(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Begin to copy from host memory, on the copying stream; `into` begins with it, or new memory is taken.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """

    def empty(self, num_words: int) -> torch.Tensor:
        """Return memory for results, int64, which preprocessing writes first.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """

    def launch(self, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Run a kernel on the preprocessing stream, which reads and writes this memory."""

    def use(self, tensors: Sequence[torch.Tensor], stream: Stream) -> None:
        """Another stream than the one that took the memory reads it; it is given away when that is done."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what a function gives to the training stream, as a graph: a function that replays it, and its result.

        The result is overwritten when this graph or another one of these streams is replayed.
        """


def device_of(device: str | torch.device) -> torch.device:
    """torch's device of a name; raises FeatureError where there is none of it."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        found = str(error).partition("\n")[0]
        raise FeatureError(f"device={device!r}: a device of torch, such as 'cuda' or 'cuda:1': {found}") from error


class CudaStreams:
    """The streams of a CUDA device: training on the program's own, preprocessing on one of the lowest priority.

    Priority 0 is the default and the lowest, so preprocessing comes after training only where training is within
    `first()`, which has priority -1. It is a hint: kernels that run are not stopped.

    Args:
        device: the device.

    Raises:
        FeatureError: there is no such device.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = device_of(device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise FeatureError(f"device={str(device)!r}: there is no GPU here")
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.device = torch.device("cuda", index)
        self.num_multiprocessors = int(torch.cuda.get_device_properties(self.device).multi_processor_count)
        self._streams: dict[Stream, Any] = {
            Stream.PREPROCESSING: torch.cuda.Stream(self.device, priority=_LAST),  # type: ignore[no-untyped-call]
            Stream.COPYING: torch.cuda.Stream(self.device, priority=_LAST),  # type: ignore[no-untyped-call]
        }
        self._capturing = torch.cuda.Stream(self.device, priority=_FIRST)  # type: ignore[no-untyped-call]
        self._captured: Callable[[], Any] = lambda: None  # the graph that was captured last, if there still is one
        self.follow()

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """As `Streams`."""
        outer = torch.cuda.current_stream(self.device)
        inner = torch.cuda.Stream(self.device, priority=_FIRST)  # type: ignore[no-untyped-call]
        inner.wait_stream(outer)
        with torch.cuda.stream(inner):
            yield
        outer.wait_stream(inner)

    def follow(self) -> None:
        """As `Streams`."""
        self._streams[Stream.TRAINING] = torch.cuda.current_stream(self.device)

    def record(self, stream: Stream) -> Any:
        """As `Streams`."""
        return self._streams[stream].record_event()

    def wait(self, stream: Stream, event: Any) -> None:
        """As `Streams`."""
        self._streams[stream].wait_event(event)

    def copy(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """As `Streams`."""
        with torch.cuda.stream(self._streams[Stream.COPYING]):
            source = source if source.is_pinned() else source.pin_memory()  # else the host would wait
            if into is None:
                return source.to(self.device, non_blocking=True)
            self.use([into], Stream.COPYING)
            into[: len(source)].copy_(source, non_blocking=True)
            return into

    def empty(self, num_words: int) -> torch.Tensor:
        """As `Streams`."""
        with torch.cuda.stream(self._streams[Stream.PREPROCESSING]):
            return torch.empty(num_words, dtype=torch.int64, device=self.device)

    def launch(self, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """As `Streams`."""
        self.use([*reads, *writes], Stream.PREPROCESSING)
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[Stream.PREPROCESSING]):
            run()

    def use(self, tensors: Sequence[torch.Tensor], stream: Stream) -> None:
        """As `Streams`."""
        for tensor in tensors:
            tensor.record_stream(self._streams[stream])

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """As `Streams`."""
        graph = torch.cuda.CUDAGraph()
        before, current = self._streams[Stream.TRAINING], torch.cuda.current_stream(self.device)
        # Where the steps before ran, as autograd wants it; the default stream cannot be captured.
        is_default = current == torch.cuda.default_stream(self.device)
        last = self._captured()
        capturing = torch.cuda.graph(
            graph,
            pool=None if last is None else last.pool(),  # graphs share memory: one runs after the other
            stream=self._capturing if is_default else current,
            # Other threads, such as those that receive batches, may pin memory and look at events meanwhile.
            capture_error_mode="thread_local",
        )
        try:
            with capturing:
                self.follow()
                made = run()
        finally:
            self._streams[Stream.TRAINING] = before
            torch.cuda.set_stream(current)  # torch leaves the other one current where capturing has failed
        self._captured = weakref.ref(graph)
        return graph.replay, made
