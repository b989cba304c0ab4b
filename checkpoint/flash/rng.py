"""The states of the random number generators that a program trains with: Python, NumPy, torch, each CUDA device.

Called by the checkpointer: part of every record, so that a resumed run draws what the undisturbed one would have.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hetstream.base.text import count_words
from hetstream.checkpoint.errors import StateMismatch

_NUM_WORDS = 625  # of Python's Mersenne twister: 624 and the position
_FORM = struct.Struct(f"<{_NUM_WORDS}I")


class Generators:
    """Takes the states. Made once: the tensors that it gives stay the same ones, so that the plan of a save holds."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def capture(self) -> dict[str, Any]:
        """Return all states, as plain values and tensors; the tensors change with the next call."""
        version, mersenne, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        states: dict[str, Any] = {
            "python": {"version": version, "words": _FORM.pack(*mersenne), "gauss": gauss},
            "numpy": {"kind": kind, "keys": keys, "position": position, "has_gauss": has_gauss, "gauss": cached},
            "torch": self._keep(-1, torch.get_rng_state()),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            every = torch.cuda.get_rng_state_all()
            states["cuda"] = [self._keep(device, state) for device, state in enumerate(every)]
        return states

    def _keep(self, number: int, state: torch.Tensor) -> torch.Tensor:
        return self._kept.setdefault(number, torch.empty_like(state)).copy_(state)


def restore(states: Mapping[str, Any]) -> list[str]:
    """Set all generators; nothing is set unless every state has its form.

    Returns:
        What could not be restored here, in words.

    Raises:
        StateMismatch: a state breaks its form.
    """
    try:
        python = states["python"]
        python_state = (int(python["version"]), _FORM.unpack(python["words"]), python["gauss"])
        random.Random().setstate(python_state)
        numpy = states["numpy"]
        numpy_state = tuple(numpy[name] for name in ("kind", "keys", "position", "has_gauss", "gauss"))
        np.random.RandomState().set_state(numpy_state)
        torch_state = states["torch"].clone()
        torch.Generator().set_state(torch_state)
        cuda_states = [state.clone() for state in states.get("cuda", ())]
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, struct.error) as error:
        raise StateMismatch(
            f"the states of the random number generators are not as this release stores them: {error}"
        ) from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    return _restore_cuda(cuda_states)


def _restore_cuda(states: list[torch.Tensor]) -> list[str]:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states[:num_devices]):
        torch.cuda.set_rng_state(state, device)
    if len(states) == num_devices or not states:
        return []
    return [f"the record has generators of {count_words(len(states), 'CUDA device')}, this process sees {num_devices}"]
