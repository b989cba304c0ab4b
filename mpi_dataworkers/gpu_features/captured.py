"""Training steps as CUDA graphs, with the preprocessing of the next batch captured beside their layers.

    with CapturedCoRun(graph, plan, model, step) as training:
        for loss in training(loader):
            ...

A replay is one launch, and kernels begin beside the layers without a word of Python. A graph has fixed memory, so
there are three slots, for the batch that is trained, the one that is computed and the one that is copied; and three
graphs for each size of batches, of which each trains one slot and computes the next. `arena.py` says which sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.arena import MOST_SIZES, Packed, StepMode, decide_step
from hetstream.mpi_dataworkers.gpu_features.corun import AHEAD, Captured, CoRun, own_memory
from hetstream.mpi_dataworkers.gpu_features.launches import LaunchPlan
from hetstream.mpi_dataworkers.gpu_features.streams import Stream, Streams

_log = logging.getLogger(__name__)
_SLOTS = AHEAD + 1
# Steps that run as they are before the first is captured: libraries and allocators settle in them.
_WARM_UP = 3 * _SLOTS
# Size of a slot, in sizes of the first batch: later ones may be larger.
_ROOM = 1.25
# Sizes of which it is known how often they came.
_MOST_KNOWN = 1024
# Of all tensors of a batch: where they are, and their shapes.
Form = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]


@dataclass
class _Slot:
    """Memory for a batch, which a graph reads and writes.

    Attributes:
        read: the event after which nobody needs the batch that was there before.
        number: of the batch that is there; -1 where it found no room.
    """

    arena: torch.Tensor
    made: torch.Tensor
    read: Any = None
    number: int = -1


class CapturedCoRun:
    """Trains a model by CUDA graphs that compute the next batch, too.

    A graph is for batches whose outputs have the sizes of the batch with which it was captured. Sizes that come often
    have graphs, eight of them at most; of lists they are a few if the plan is padded. Other batches, the first nine,
    and those without room run the step as it is. What a step gives is overwritten by the next one.

    Args:
        graph, plan: As in `CoRun`.
        model: The model.
        step: A whole training step on the features of a batch: gradients, forward, backward, optimizer. It must bear to
            be captured, as `torch.cuda.graph` demands, and with a padded plan zeros behind the lists.
        layers, optimizer, streams, kernel: As in `CoRun`.

    Attributes:
        corun: What computes the batches; `corun.state_dict()` is the position.
        num_replays: Steps that were replayed.

    Raises:
        FeatureError: as `CoRun`, and where step is no function.
    """

    def __init__(
        self,
        graph: FeatureGraph | CutGraph,
        plan: LaunchPlan,
        model: torch.nn.Module,
        step: Callable[[dict[str, Any]], Any],
        *,
        streams: Streams | None = None,
        **options: Any,
    ) -> None:
        if not callable(step):
            raise FeatureError(f"step={step!r}: give a function of a batch's features, a whole training step")
        self.corun = CoRun(graph, plan, model, streams=streams, **options)
        self.corun.take_memory = self._take
        self.num_replays = 0
        self._step = step
        self._slots: list[_Slot] = []
        self._graphs: dict[Form, Captured] = {}
        self._captured_sizes: list[object] = []
        self._seen: dict[object, int] = {}
        self._refusal, self._has_said_so = "", False

    def __call__(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Train on all batches of an iteration; what the step gives for each.

        After an exception it goes on with the next batch.
        """
        for slot in self._slots:
            slot.number = -1
        return map(self._train, self.corun(loader))

    def close(self) -> None:
        """Free graphs and slots, and take the hooks off the model; safe to call twice."""
        self.corun.close()
        self._graphs.clear()
        self._slots.clear()

    def __enter__(self) -> CapturedCoRun:
        self.corun.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _train(self, features: dict[str, Any]) -> Any:
        """Train on a batch, by the graph of its slot if it found room there."""
        number = self.corun.number
        try:
            return self._train_in_slot(number, features) if self._is_in_slot(number) else self._step(features)
        except StopIteration as error:
            raise FeatureError("step raised StopIteration, which would look like the end of the data") from error
        finally:
            # A graph reads the next slot, too, whatever is there.
            for at in (number, number + 1) if self._slots else ():
                self._slots[at % _SLOTS].read = self.corun.streams.record(Stream.TRAINING)

    def _train_in_slot(self, number: int, features: dict[str, Any]) -> Any:
        form, sizes = self._form_of(features)
        num_seen, has_next = self._seen.get(sizes, 0), self._is_in_slot(number + 1)
        decided = decide_step(
            is_captured=form in self._graphs,
            is_warm=number >= _WARM_UP,
            has_next=has_next,
            num_seen=num_seen,
            size_at=self._captured_sizes.index(sizes) if sizes in self._captured_sizes else -1,
            num_sizes=len(self._captured_sizes),
            refusal=self._refusal,
        )
        if num_seen or len(self._seen) < _MOST_KNOWN:
            self._seen[sizes] = num_seen + 1
        if decided.act is StepMode.CAPTURE:
            self._capture(form, sizes, features)
        elif decided.act is StepMode.RUN and len(self._captured_sizes) == MOST_SIZES and not self._has_said_so:
            _log.warning("hetstream: features: steps of other sizes run as they are: %s", decided.reason)
            self._has_said_so = True
        captured = self._graphs.get(form)
        if captured is None:
            return self._step(features)
        self.corun.replay(captured, has_next=has_next)
        self.num_replays += 1
        return captured.result

    def _capture(self, form: Form, sizes: object, features: dict[str, Any]) -> None:
        try:
            self._graphs[form] = self.corun.capture(lambda: self._step(features))
        except RuntimeError as error:
            self._refusal = str(error).partition("\n")[0]
            _log.warning("hetstream: features: steps are not captured, and run as they are: %s", self._refusal)
            return
        if sizes not in self._captured_sizes:
            self._captured_sizes.append(sizes)

    @property
    def refusal(self) -> str:
        """Why steps are not captured; "" if they are."""
        return self._refusal

    @property
    def num_graphs(self) -> int:
        """How many have been captured."""
        return len(self._graphs)

    def _is_in_slot(self, number: int) -> bool:
        return bool(self._slots) and self._slots[number % _SLOTS].number == number

    def _form_of(self, features: Mapping[str, Any]) -> tuple[Form, object]:
        """Where all tensors are and their sizes, and the sizes alone."""
        tensors = [
            part
            for value in features.values()
            for part in (value if isinstance(value, tuple) else (value,))
            if isinstance(part, torch.Tensor)
        ]
        form = tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        return form, tuple((shape, dtype) for _, shape, dtype in form)

    def _take(self, streams: Streams, number: int, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of a batch: the slot of its number, where it has room there."""
        if not self._slots:
            sizes = [int(size * _ROOM) + 1 for size in (len(packed.words), -(-packed.made_bytes // 8))]
            self._slots = [_Slot(streams.empty(sizes[0]), streams.empty(sizes[1])) for _ in range(_SLOTS)]
        slot = self._slots[number % _SLOTS]
        slot.number = -1
        if len(packed.words) > len(slot.arena) or packed.made_bytes > 8 * len(slot.made):
            return own_memory(streams, number, packed)
        if slot.read is not None:
            streams.wait(Stream.COPYING, slot.read)
            streams.wait(Stream.PREPROCESSING, slot.read)
        streams.wait(Stream.COPYING, streams.record(Stream.PREPROCESSING))  # of an iteration that was left
        slot.number = number
        return streams.copy(packed.words, slot.arena), slot.made
