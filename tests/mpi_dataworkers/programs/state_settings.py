"""Settings of `state_programs.py`, in a module that a forward reads."""

from types import SimpleNamespace

SCALE = 1.0
cfg = SimpleNamespace(gain=1.0)


class Cfg:
    scale = 1.0


def gain() -> float:
    return 1.0
