"""Whether a feature graph runs in native code or with torch: (chains, time spent, compiler) -> what, and why. Pure.

Used by `transform.py`. Native code has torch's bits in all operators but two. Where results must not depend on whether
a host has a compiler, it runs only the chains without those, so it may also begin in the midst of an epoch: then
nobody pays for compiling before torch has cost as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.chains import Chain

# Native code computes them with functions of its own, within 1e-6 of torch's.
_INEXACT = (ops.Logit, ops.BoxCox)
# What torch has to have taken in a process before native code is compiled there: compiling takes as long.
WORTH_S = 2.0


@dataclass(frozen=True)
class NativeChoice:
    """What runs a graph.

    Attributes:
        runs: "undecided": torch for now.
        reason: why, in words; "" where nobody asked for native code.
    """

    runs: Literal["native", "torch", "undecided"]
    reason: str


def is_exact(chains: Sequence[Chain]) -> bool:
    """Whether native code gives torch's bits for chains of one group."""
    return not any(isinstance(step.operator, _INEXACT) for step in chains[0].steps)


def native_choice(
    *, is_asked_for: bool, num_exact: int, num_chains: int, spent_s: float, compiler: str | None
) -> NativeChoice:
    """Decide what runs a graph.

    Args:
        is_asked_for: whether all of it is to be native, whatever the bits of Logit and BoxCox.
        num_exact, num_chains: chains for which native code gives torch's bits, of all.
        spent_s: that the graph has taken in this process with torch.
        compiler: the path of one; None where there is none.
    """
    if is_asked_for:
        return NativeChoice("native", "native code")
    if not num_exact:
        return NativeChoice("torch", "torch, because all chains have Logit or BoxCox" if num_chains else "")
    if compiler is None:
        return NativeChoice("torch", "torch, because there is no C++ compiler")
    if spent_s < WORTH_S:
        return NativeChoice("undecided", f"torch, until that has taken {WORTH_S:g} s")
    others = "" if num_exact == num_chains else ", torch where Logit or BoxCox is"
    return NativeChoice("native", f"native code in {num_exact} of {num_chains} chains{others}")
