"""`partition`: move the stateless part of a model's forward to the data workers of a loader.

    loader = hetstream.DataLoader(...)
    moved = hetstream.partition(model, example_batch, loader=loader)
    print(moved.reason)
    for features, labels in loader:  # the program goes on as it was
        loss = criterion(model(features), labels)

`unmodified.py` does the same for programs that do not know hetstream.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hetstream.base.errors import OptionsError
from hetstream.base.text import count_words
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.partitioner.analysis import FALLING_BORDERS, Analysis, Offload, analyse, analysis_of
from hetstream.mpi_dataworkers.partitioner.capture import Graph
from hetstream.mpi_dataworkers.partitioner.cut import CutAssessment, CutDecision, CutTrial, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.forward import Counts, PartitionedForward
from hetstream.mpi_dataworkers.partitioner.leaves import Delivery, leaves_of
from hetstream.mpi_dataworkers.partitioner.split import unpack
from hetstream.mpi_dataworkers.partitioner.unguarded_constants import NotCaptured

# Which modules can be partitioned. Called by `unmodified.py`, too.


def release(module: torch.nn.Module) -> None:
    """Give a model that is partitioned its own forward back: the loader that feeds it last has it."""
    if isinstance(module._compiled_call_impl, PartitionedForward):
        module._compiled_call_impl.withdraw("another loader feeds this model now")


def check_module(module: torch.nn.Module) -> None:
    """Refuse modules whose forward is not one to be captured.

    Raises:
        NotCaptured: with the reason.
    """
    for part in module.modules():
        call = part._compiled_call_impl
        if hasattr(part, "_orig_mod") or (call is not None and not isinstance(call, PartitionedForward)):
            raise NotCaptured("torch.compile compiles the model, or a part of it, which may give it other bits")
        if isinstance(part, torch.jit.ScriptModule):
            raise NotCaptured("the model, or a part of it, is a TorchScript module, whose forward is no Python")
    if isinstance(module, torch.nn.DataParallel):
        raise NotCaptured("the model is a DataParallel, which cuts each batch; use DistributedDataParallel")
    if any(type(parameter.data) is not torch.Tensor for parameter in module.parameters()):
        raise NotCaptured("the model's parameters are no plain tensors, as with FSDP")
    if not module.training:
        raise NotCaptured("the model is in eval mode; only its training is partitioned")


# How long a loader's steps take, and the rates that a cut depends on. Pure.

# Steps between two looks at the rates.
STEPS_OF_A_LOOK = 100
# Less of a change is no reason to decide again, and less of a wait is no sign that data workers are too slow.
_SHARE_THAT_COUNTS = 0.2
_WAIT_THAT_COUNTS = 0.1
# The wire's rate is never quite the same.
_RATIO_THAT_COUNTS = 1.5


def observed_rates(
    before: Rates, step_and_wait_s: tuple[float, float], num_data_workers: int, moved: Sequence[OperatorCost]
) -> Rates:
    """Return rates as they are now, as if nothing were moved.

    Args:
        before: those of the last decision.
        step_and_wait_s: a step's time, and what of it was a wait for data.
        num_data_workers: as there are now.
        moved: what the moved operators take.
    """
    period_s, wait_s = step_and_wait_s
    step_s = max(1e-6, period_s - wait_s) + sum(cost.trainer_s for cost in moved)
    batch_s = before.batch_s
    all_workers_s = period_s * max(1, num_data_workers) - sum(cost.data_worker_s for cost in moved)
    if wait_s > _WAIT_THAT_COUNTS * period_s:
        batch_s = max(0.0, all_workers_s)  # the trainer waits, so they make batches as fast as they can
    else:
        batch_s = min(batch_s, max(0.0, all_workers_s))
    return replace(before, step_s=step_s, batch_s=batch_s, num_data_workers=num_data_workers)


def is_other(rates: Rates, before: Rates) -> bool:
    """Return whether rates differ enough to decide again."""
    if rates.num_data_workers != before.num_data_workers:
        return True
    slower, faster = sorted((rates.wire_bytes_per_s, before.wire_bytes_per_s))
    if faster > _RATIO_THAT_COUNTS * slower:
        return True
    pairs = (rates.step_s, before.step_s), (rates.batch_s, before.batch_s)
    return any(abs(now - then) > _SHARE_THAT_COUNTS * max(rates.step_s, before.step_s) for now, then in pairs)


class StepInterval:
    """How long steps take, from one look at the loader's counters to the next."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_changes = 0
        self._before: tuple[float, float] | None = None

    def begin_again(self) -> None:
        """Count from here: other steps than usual were taken."""
        self.num_steps, self._before = 0, None

    def step_and_wait(self, now: float, wait_s: float) -> tuple[float, float] | None:
        """After each `STEPS_OF_A_LOOK` steps: a step's time, and what of it was a wait for data."""
        self.num_steps += 1
        if self.num_steps % STEPS_OF_A_LOOK:
            return None
        before, self._before = self._before, (now, wait_s)
        if before is None:
            return None
        return (now - before[0]) / STEPS_OF_A_LOOK, (wait_s - before[1]) / STEPS_OF_A_LOOK


# At which rate batches come to a loader. Called by `unmodified.py`, too.

_COPIED_BYTES = 1 << 23


def with_wire(rates: Rates, connection: LoaderConnection) -> Rates:
    """Return rates with that at which batches come to a loader, as far as it is known.

    Batches that come through shared memory are copied once, by the data worker, and so come as fast as memory is.
    """
    client = connection.client
    if client is None:
        return rates
    measured = client.wire.bytes_per_s
    if measured is None and client.batches_by_transport and {*client.batches_by_transport} == {"shm"}:
        measured = _copied_bytes_per_s()
    return rates if measured is None else replace(rates, wire_bytes_per_s=measured)


@functools.cache
def _copied_bytes_per_s() -> float:
    """How fast this host copies memory."""
    source, goal = torch.zeros(_COPIED_BYTES, dtype=torch.uint8), torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    started = time.perf_counter()
    goal.copy_(source)
    return _COPIED_BYTES / max(1e-6, time.perf_counter() - started)


_log = logging.getLogger(__name__)
# A forward and a backward pass take about three times a forward's time.
_STEP_PER_FORWARD = 3.0
NUM_CHECKED = 3
# Most changes of the cut in a run: each has the batches on their way made anew.
_MOST_CHANGES = 8
# Most graphs of one forward that are analysed: an attribute may change from epoch to epoch.
_MOST_ANALYSES = 3
# Cuts of which is measured what they gain: what was measured counts for the later ones.
_MOST_TRIALS = 3
# Numbers of cuts, in common: one loader may feed two models, and neither takes what was computed for the other.
_generations = itertools.count(1)


class Partition:
    """What was moved of a model's forward, and why not more.

    Attributes:
        reason: in words: what was decided, or why nothing moves.
        analysis: what is known of the forward; None when it could not be captured.
        decision: which operators move; None when it could not be captured.
    """

    def __init__(
        self, module: torch.nn.Module, connection: LoaderConnection, offload: Offload, follows_rates: bool = False
    ) -> None:
        self.reason = ""
        self.analysis: Analysis | None = None
        self.decision: CutDecision | None = None
        self._module = module
        self._connection = connection
        self._offload = offload
        self._forward: PartitionedForward | None = None
        self._rates = Rates(0.0, 0.0, 0)
        self._generation = 0
        self._num_leaves = 0
        self._pace = StepInterval() if follows_rates else None
        self._trial: CutTrial | None = None
        self._gain, self._num_trials = 1.0, 0
        self._num_analyses = 0
        self._last: list[Any] = []  # leaves of the last batch

    @property
    def is_active(self) -> bool:
        """Whether data workers run a part of the forward."""
        return self._forward is not None and self._forward.split is not None

    @property
    def counts(self) -> Counts:
        """How the calls of the forward went since it was partitioned."""
        return self._forward.counts if self._forward is not None else Counts()

    def begin(self, analysis: Analysis, num_leaves: int, rates: Rates, num_checked: int) -> None:
        """Decide for the first time, and stand in for the module's forward.

        Args:
            analysis: of the forward.
            num_leaves: of a batch.
            rates: what the decision depends on.
            num_checked: batches that are computed both ways and compared.
        """
        self.analysis, self._num_leaves = analysis, num_leaves
        self._forward = PartitionedForward(self._module, analysis, num_checked, self.remove, self._analyse_again)
        self._rates = rates
        self._connection.at_close.append(self._forget)
        for operator in analysis.graph.operators:
            if operator.keeps.startswith(FALLING_BORDERS):
                text = "hetstream: %s of %s's forward (%s) stays: %s"
                _log.warning(text, operator.target, type(self._module).__name__, operator.line, operator.keeps)
        self.decide(rates)
        if not self.is_active:
            _log.warning("hetstream: nothing of %s moves: %s", type(self._module).__name__, self.reason)
        if self._pace is not None and not self.is_active:
            self._connection.on_extra = self._deliver  # it may pay later

    def decide(self, rates: Rates) -> None:
        """Decide again, for other rates, and change the cut if another one is faster; between two steps.

        Args:
            rates: what the decision depends on.
        """
        if self.analysis is None or self._forward is None:
            return
        self._rates = rates
        decision = self.analysis.decide(self._offload, rates, self._gain)
        before = self.decision.moved if self.decision is not None else frozenset()
        self.decision, self.reason = decision, decision.reason
        if self.analysis.why_not_all:
            self.reason += f"; that is the forward's beginning alone; the rest stays: {self.analysis.why_not_all}"
        if decision.moved == before:
            return
        if not decision.moved:
            self._stop()
            return
        self._generation = next(_generations)
        cut = self.analysis.cut(decision, self._num_leaves, self._generation)
        # Should data workers not take the stage, nothing has changed.
        self._connection.use_forward_stage(cut.stage, self._deliver)
        # Numbers that are drawn elsewhere are others than the program's own, so there is nothing to compare.
        self._forward.use(cut, is_checked=cut.draws)
        if self._pace is not None and self._offload is Offload.AUTO and self._num_trials < _MOST_TRIALS:
            self._trial, self._num_trials = CutTrial(), self._num_trials + 1
        if not self._forward.install():
            self.remove("the program has put something else in the place of its call")
            return
        text = "hetstream: data workers run %d operators of %s's forward: %s"
        _log.warning(text, len(decision.moved), type(self._module).__name__, self.reason)

    def _analyse_again(self, graph: Graph, inputs: Sequence[Any], arguments: Sequence[torch.Tensor]) -> None:
        """torch.compile has another graph of the forward, as where an attribute has changed for good: cut that one."""
        if self._forward is None or self.analysis is None:
            return
        self._num_analyses += 1
        if self._num_analyses > _MOST_ANALYSES:
            self.remove(f"it has had {_MOST_ANALYSES} other graphs, and has another one")
            return
        kind = self.analysis.way, self.analysis.why_not_all
        try:
            self.analysis = analysis_of(graph, inputs, arguments, self._last, self._offload, *kind)
        except NotCaptured as reason:
            self.remove(str(reason))
            return
        self._forward.analysed(self.analysis)
        self._trial, self._forward.is_paused, self.decision = None, False, None
        self.decide(self._rates)
        if not self.is_active:
            self._stop()

    def _try(self, trial: CutTrial, forward: PartitionedForward) -> None:
        """A step of the trial begins: change to the cut, or to how it was without, and in the end decide."""
        used = trial.uses_cut
        trial.next_step(time.monotonic(), self._connection.statistics.counters.wait_s)
        if trial.verdict is not None:
            self._trial = None
            if self._pace is not None:
                self._pace.begin_again()
            self._judge(trial.verdict)
        elif used and not trial.uses_cut:
            forward.is_paused = True
            self._connection.use_forward_stage(None, self._deliver)
        elif trial.uses_cut and not used:
            assert forward.split is not None
            self._connection.use_forward_stage(forward.split.stage, self._deliver)

    def _judge(self, verdict: CutAssessment) -> None:
        """Have the decision know what the cut gains, as measured."""
        assert self.analysis is not None
        assert self.decision is not None
        estimated_s = sum(self.analysis.costs[name].trainer_s for name in self.decision.moved)
        gained_s = verdict.without_s - verdict.with_cut_s if verdict.pays else 0.0
        self._gain = gained_s / estimated_s if estimated_s else 0.0
        self.decide(replace(self._rates, step_s=verdict.without_s))
        if not self.is_active:
            self.reason = self.reason if verdict.pays else verdict.reason
            _log.warning("hetstream: %s runs as it is written: %s", type(self._module).__name__, self.reason)

    def _reconsider(self, pace: StepInterval) -> None:
        """Decide again when the rates are other ones than those of the decision."""
        seen = pace.step_and_wait(time.monotonic(), self._connection.statistics.counters.wait_s)
        if seen is None or pace.num_changes >= _MOST_CHANGES or self.analysis is None:
            return
        client, costs = self._connection.client, self.analysis.costs
        moved = self.decision.moved if self.is_active and self.decision is not None else frozenset()
        num_workers = client.num_data_workers if client is not None else self._rates.num_data_workers
        gained = [replace(costs[name], trainer_s=self._gain * costs[name].trainer_s) for name in moved]
        rates = with_wire(observed_rates(self._rates, seen, num_workers, gained), self._connection)
        if is_other(rates, self._rates):
            before = self._generation, self.is_active
            self.decide(rates)
            pace.num_changes += (self._generation, self.is_active) != before

    def remove(self, reason: str) -> None:
        """Have the program run as it is written, for good.

        Args:
            reason: why, for the user.
        """
        if self.is_active:
            _log.warning("hetstream: %s runs as it is written from now on: %s", type(self._module).__name__, reason)
        self.reason = reason
        self._stop()
        self.analysis = None

    def _stop(self) -> None:
        if self._forward is None:
            return
        stage = self._forward.split.stage if self._forward.split is not None else None
        self._forward.use(None)
        self._forward.uninstall()
        self._forget()
        self._trial, self._forward.is_paused = None, False
        if self._connection.pipeline.forward_stage in (
            stage,
            None,
        ):  # else of another model, which this loader feeds now
            self._connection.use_forward_stage(None, self._deliver if self._pace is not None else None)

    def _forget(self) -> None:
        """Let go of all batches: they may lie in memory of the connection's."""
        self._last = []
        if self._forward is not None:
            self._forward.deliveries.clear()

    def _deliver(self, _step: int, batch: Any, extra: Sequence[torch.Tensor]) -> Any:
        """A batch for the program; what data workers have computed for it is kept for the forward."""
        forward = self._forward
        if forward is not None and self.is_active and forward.is_checked and self._trial is not None:
            self._try(self._trial, forward)
        if self._pace is not None and self.analysis is not None and self._trial is None:
            self._reconsider(self._pace)
        if not extra or forward is None:
            return batch
        if forward.is_paused and (self._trial is None or self._trial.uses_cut):
            forward.is_paused = False  # the first batch with values after steps without the cut
        generation, values = unpack(extra)
        self._connection.count(moved_bytes=sum(value.nbytes for value in values))
        self._last = leaves_of(batch)
        if (forms := forward.forms(generation)) and not forward.is_paused:
            leaves = {form.number: self._last[form.number] for form in forms}
            forward.deliveries.add(Delivery(generation, leaves, values))
        return batch


_EITHER = (
    "partition(loader=...): the loader has features=, and either the graph or the forward is divided; "
    "give the graph as batch_stage=FeatureTransform(graph), or leave partition out"
)


def partition(
    model: torch.nn.Module,
    example_batch: Any,
    *,
    loader: Any,
    inputs: Callable[[Any], tuple[Any, ...]] | None = None,
    offload: str = "auto",
    rates: Rates | None = None,
    num_checked: int = NUM_CHECKED,
) -> Partition:
    """Move the part of a model's forward that depends on no state to the data workers of a loader.

    The training loop stays as it is: `model(...)` computes what is left when it gets the loader's own tensors, moved at
    most, and its own forward for anything else. Where nothing can be moved, nothing changes, and `reason` says why.

    Args:
        model: in training mode, or wrapped in DistributedDataParallel. Parameters and `state_dict` stay as they are.
        example_batch: a batch as the loader gives it.
        loader: a `hetstream.DataLoader`.
        inputs: makes the forward's arguments of a batch, as the training loop does. Default: the batch, or of a list
            or tuple its first items, as many as the forward must have.
        offload: "auto" moves deterministic operators where that makes a step faster; "all" moves all that needs no
            state, random numbers too, which data workers then draw from the seed of (seed, epoch, step); "off" none.
        rates: what the decision depends on; default: measured with the example and as batches come. Until the wire's
            rate is known it counts as 1 GB/s.
        num_checked: first calls of the forward that are run both ways and compared; a difference ends it.

    Raises:
        OptionsError: the loader is no `hetstream.DataLoader`, `offload` is none of the three, or the forward does not
            take such arguments.
    """
    connection = getattr(loader, "_connection", None)
    if not isinstance(connection, LoaderConnection):
        raise OptionsError(f"partition(loader={type(loader).__name__}): must be a hetstream.DataLoader")
    if connection.has_features:
        raise OptionsError(_EITHER)
    if offload not in [choice.value for choice in Offload]:
        raise OptionsError(
            f"partition(offload={offload!r}): must be one of {', '.join(choice.value for choice in Offload)}"
        )
    module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    made = Partition(module, connection, Offload(offload), follows_rates=rates is None)
    leaves = leaves_of(example_batch)
    try:
        check_module(module)
        release(module)
        args = _arguments(module, inputs or _default_inputs(module), example_batch)
        analysis = analyse(module, args, {}, leaves, made._offload)
    except NotCaptured as reason:
        made.reason = str(reason)
        _log.warning("hetstream: nothing of %s moves: %s", type(module).__name__, reason)
        return made
    num_workers = connection.client.num_data_workers if connection.client is not None else loader.num_workers
    batch_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    measured = Rates(analysis.seconds * _STEP_PER_FORWARD, 0.0, num_workers, batch_bytes=batch_bytes)
    made.begin(analysis, len(leaves), rates or with_wire(measured, connection), num_checked)
    return made


def _arguments(module: torch.nn.Module, inputs: Callable[[Any], Any], batch: Any) -> tuple[Any, ...]:
    found = inputs(batch)
    args = found if isinstance(found, tuple) else (found,)
    try:
        inspect.signature(module.forward).bind(*args)
    except TypeError as error:
        raise OptionsError(
            f"partition(): {type(module).__name__}.forward does not take these {count_words(len(args), 'argument')}: "
            f"{error}. Say what the training loop gives it, such as inputs=lambda batch: (batch['x'], batch['y'])"
        ) from error
    return args


def _default_inputs(module: torch.nn.Module) -> Callable[[Any], tuple[Any, ...]]:
    def inputs(batch: Any) -> tuple[Any, ...]:
        if not isinstance(batch, list | tuple):
            return (batch,)
        parameters = inspect.signature(module.forward).parameters.values()
        number = sum(parameter.default is parameter.empty and parameter.kind in (0, 1) for parameter in parameters)
        return tuple(batch[: max(1, number)])

    return inputs
