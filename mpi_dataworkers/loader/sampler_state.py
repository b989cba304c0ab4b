"""How a program's own sampler begins an epoch again where it began it before. Called by `data_loader.py`.

A sampler is drawn ahead of the training loop, so its state at the loop's position is not to be had. What is kept is its
state at the beginning of the epoch; a resume begins it again and draws the indices, without data, up to the position.
One that has no state is begun as it is: whether it gives the same indices again is seen when they are drawn.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

from hetstream.mpi_dataworkers.errors import StateError

# torch's samplers that draw from `generator`, or from torch's global one where that is None.
_DRAWING = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def beginning_of(sampler: Any, in_epoch: bool) -> str:
    """The state of a sampler that is about to begin an epoch, as text.

    Args:
        sampler: the loader's sampler or batch_sampler.
        in_epoch: the epoch begins now; else it is a later one, and torch's global generator, which the program keeps
            in its own checkpoint, may go on before it begins.

    Returns:
        "repeats" when the sampler gives the same order again, or nothing can be kept of it; else its state.
    """
    kind, source = _kind_of(sampler)
    if kind == "generator":
        return f"generator {_pack(source.generator.get_state())}"
    if kind == "global":
        return f"global {_pack(torch.get_rng_state())}" if in_epoch else "repeats"
    if kind == "state":
        try:
            return f"state {json.dumps(source.state_dict())}"
        except Exception:  # noqa: BLE001, the sampler's own code; as one without a state, it is drawn as it is then
            return "repeats"
    return "repeats"


@contextlib.contextmanager
def beginning_again(sampler: Any, beginning: str) -> Iterator[None]:
    """Put a sampler to where it began; what is drawn inside the context is what it drew then.

    The program's own random state is afterwards what it was before.

    Raises:
        StateError: the state is of another kind of sampler, or damaged.
    """
    kind, source = _kind_of(sampler)
    saved, _, text = beginning.partition(" ")
    if saved in ("", "repeats", "unknown"):
        yield
        return
    if saved != kind:
        raise StateError(f"the state is of a sampler with {saved!r} state, {type(source).__name__} has {kind!r} state")
    before = torch.get_rng_state()
    try:
        if kind == "generator":
            source.generator.set_state(_unpack(text))
        elif kind == "global":
            torch.set_rng_state(_unpack(text))
        else:
            source.load_state_dict(json.loads(text))
    except Exception as error:  # a sampler's own load_state_dict may raise anything
        raise StateError(f"{type(source).__name__} cannot begin again from the state: {error}") from error
    try:
        yield
    finally:
        if kind == "global":
            torch.set_rng_state(before)


class SamplerEpochSetter:
    """Sets the epoch of samplers that have `set_epoch`, for a program that does not do it itself.

    A sampler whose `epoch` is not where it was left has been set by the program, which then sets it for good.

    Args:
        *samplers: the loader's own.
    """

    def __init__(self, *samplers: Any) -> None:
        # They begin at 0; what is not there was set before the loader was made.
        with_epochs = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
        begins = [(sampler, 0 if hasattr(sampler, "epoch") else None) for sampler in with_epochs]
        self._left_at: list[tuple[Any, Any]] = begins
        self._set_by_program = False

    def begin(self, epoch: int) -> None:
        """The samplers are about to begin this epoch."""
        now = [getattr(sampler, "epoch", None) for sampler, _ in self._left_at]
        self._set_by_program |= any(found != left for found, (_, left) in zip(now, self._left_at, strict=True))
        if self._set_by_program:
            return
        for sampler, _ in self._left_at:
            sampler.set_epoch(epoch)
        self._left_at = [(sampler, getattr(sampler, "epoch", None)) for sampler, _ in self._left_at]


def _kind_of(sampler: Any) -> tuple[str, Any]:
    """What makes a sampler give an order again, and the object that holds it."""
    if hasattr(sampler, "set_epoch"):
        return "repeats", sampler
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return "state", sampler
    if isinstance(sampler, torch.utils.data.BatchSampler):
        return _kind_of(sampler.sampler)
    if isinstance(sampler, _DRAWING):
        if isinstance(sampler.generator, torch.Generator):
            return "generator", sampler
        is_torchs = type(sampler) in _DRAWING
        return ("global" if is_torchs else "repeats"), sampler
    return "repeats", sampler


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text, validate=True))), dtype=torch.uint8)
