"""`partition` in a program's own hands: the same losses, bit for bit, with the forward's stateless part elsewhere."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import sample_models as models
import torch
from torch.utils.data import default_collate

from benchmarks.partition_programs.catalogue import PROGRAMS
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.partitioner.cut import Rates
from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition

LOADER_OPTIONS: dict[str, Any] = {}
MOVES = sorted(PROGRAMS.keys() - {"nothing_to_move"})
FAST = Rates(step_s=1e-4, batch_s=0.0, num_data_workers=1000, wire_bytes_per_s=1e15, receive_bytes_per_s=1e15)


def example(dataset: Any, size: int) -> Any:
    return default_collate([dataset[number] for number in range(size)])


def train(
    loader: Any, model: torch.nn.Module, num_inputs: int = 1, between: Callable[[int, Any], Any] | None = None
) -> list[str]:
    """Losses of a plain training loop; `between` is what the program does to a batch before the forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, batch in enumerate(loader):
        if between is not None:
            batch = between(number, batch)
        optimizer.zero_grad()
        outputs = model(*batch[:num_inputs])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch[-1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def both(
    loaders: Callable[..., Any],
    make: Callable[[], torch.nn.Module],
    between: Callable[[int, Any], Any] | None = None,
    num_rows: int = 80,
    inputs: Callable[[Any], Any] | None = None,
    **options: Any,
) -> tuple[Partition, torch.nn.Module]:
    """Train as it is and partitioned; both must give the same."""
    dataset = models.Rows(num_rows)
    random.seed(0)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8), make(), between=between)
    random.seed(0)
    torch.manual_seed(0)
    model, loader = make(), loaders(dataset, batch_size=8)
    done = partition(model, example(dataset, 8), loader=loader, inputs=inputs, **{"offload": "all"} | options)
    assert train(loader, model, between=between) == expected
    return done, model


def check_program(name: str, loaders: Callable[..., Any], **options: Any) -> None:
    program = PROGRAMS[name]
    dataset = program.dataset(6 * 32)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=32), program.model(), program.num_inputs)
    torch.manual_seed(0)
    model, loader = program.model(), loaders(dataset, batch_size=32, **options)
    done = partition(model, example(dataset, 32), loader=loader, offload="all")
    assert train(loader, model, program.num_inputs) == expected
    if name in MOVES:
        assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 3, 0), done.reason
    else:
        assert not done.is_active


@pytest.mark.shows("a partitioned program has the losses of the original, bit for bit on CPU trainers")
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_each_program_has_the_losses_that_it_has_without(name: str, loaders: Callable[..., Any], three: Any) -> None:
    check_program(name, loaders, service=three.name)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_in_process_runs_the_stage_as_well(num_workers: int, loaders: Callable[..., Any]) -> None:
    check_program("dlrm", loaders, num_workers=num_workers)


def test_nothing_moves_in_a_model_that_begins_with_parameters(loaders: Callable[..., Any]) -> None:
    program = PROGRAMS["nothing_to_move"]
    dataset = program.dataset(64)
    done = partition(program.model(), example(dataset, 32), loader=loaders(dataset, batch_size=32), offload="all")
    assert done.reason.startswith("no operator of the forward may move; the first is _C._nn.linear (")
    assert "a product of matrices" in done.reason


class FallingBorders(torch.nn.Module):
    """Looks its numbers up among borders that are in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("borders", torch.tensor([0.0, 3.0, 1.0]))
        self.layer = torch.nn.Linear(13, 1)

    def forward(self, numbers: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(numbers).clamp(min=0.0).log1p()
        return self.layer(torch.bucketize(clean, self.borders).float()).squeeze(1)


@pytest.mark.shows("NaN, ids out of range, borders that decrease and empty features are computed or refused")
def test_borders_that_decrease_are_named_with_their_line(
    loaders: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = PROGRAMS["dlrm"].dataset(64)
    loader = loaders(dataset, batch_size=32)
    done = partition(FallingBorders(), example(dataset, 32), loader=loader, offload="all")
    assert done.analysis is not None
    [kept] = [operator for operator in done.analysis.graph.operators if "bucketize" in operator.target]
    assert kept.keeps == "its borders decrease: 1, at place 2, is below 3"
    assert done.is_active
    assert kept.name not in done.decision.moved
    assert f"test_partition.py:{FallingBorders.forward.__code__.co_firstlineno + 2}) stays: its borders" in caplog.text


# What is said of each; of some the beginning moves, or all: torch.compile sees what they write.
SAID = {
    models.InPlace: "nan_to_num_ (sample_models.py:56) changes it in place",
    models.ReadsFile: "that is the forward's beginning alone",
    models.ReadsTime: "that is the forward's beginning alone",
    models.DrawsPythonNumbers: "that is the forward's beginning alone",
    models.UsesNumpy: "that is the forward's beginning alone",
    models.ReadsObject: "everything that may move was asked for",
    models.WritesGlobal: "everything that may move was asked for",
    models.Counts: "everything that may move was asked for",
    models.CountsPrivately: "everything that may move was asked for",
    models.Prints: "that is the forward's beginning alone",
    models.OwnOperator: "a custom operator, hetstream_tests::twice, which data workers may not have",
}


@pytest.mark.shows("a forward that decides by the data, reads files or the time, or has side effects, stays right")
@pytest.mark.shows("what no parameter, changed buffer or side effect leads to moves out of a forward")
@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
def test_what_a_graph_cannot_hold_is_named_and_the_program_has_its_losses(
    kind: type[torch.nn.Module], loaders: Callable[..., Any]
) -> None:
    done, _ = both(loaders, kind, num_rows=40)
    assert done.analysis is not None
    reasons = [done.reason, *done.counts.reasons, *(each.reason for each in done.analysis.verdicts.values())]
    assert any(SAID[kind] in reason for reason in reasons), reasons


@pytest.mark.shows("a partitioned program has the losses of the original, bit for bit on CPU trainers")
def test_random_numbers_stay_where_they_are_unless_asked_for(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(80)

    def losses(offload: str, service: str | None = None) -> tuple[list[str], Partition | None]:
        torch.manual_seed(0)
        model, loader = models.Noisy(), loaders(dataset, batch_size=8, service=service)
        done = partition(model, example(dataset, 8), loader=loader, offload=offload, rates=FAST, num_checked=0)
        return train(loader, model), done

    as_written, _ = losses("off")
    default, done = losses("auto")
    assert default == as_written
    assert done is not None
    assert done.counts.partitioned == 10
    moved, _ = losses("all")
    assert moved != as_written, "data workers draw from the seeds of the steps"
    assert losses("all")[0] == moved


@pytest.mark.shows("a partitioned program has the losses of the original, bit for bit on CPU trainers")
def test_dropout_draws_the_same_numbers(loaders: Callable[..., Any]) -> None:
    done, _ = both(loaders, models.Drops, offload="auto", rates=FAST)
    assert done.counts.partitioned == 7


def test_running_statistics_that_no_schema_names_stay_right(loaders: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = models.Normalises()
    train(loaders(models.Rows(80), batch_size=8), plain)
    done, model = both(loaders, models.Normalises)
    assert done.counts.partitioned == 7
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)


def test_jagged_values_move_as_far_as_the_table(loaders: Callable[..., Any]) -> None:
    done, _ = both(loaders, models.Jagged)
    assert done.decision is not None
    assert done.counts.partitioned == 7, done.reason
    assert done.analysis is not None
    targets = done.analysis.graph.by_name()
    assert any("unique" in targets[name].target for name in done.decision.moved)


@pytest.mark.shows("a forward that decides by the data, reads files or the time, or has side effects, stays right")
@pytest.mark.parametrize("kind", [models.HoldsLambda, models.FallingBorders, models.EmptyJagged])
def test_odd_models_and_values_have_their_losses(kind: type[torch.nn.Module], loaders: Callable[..., Any]) -> None:
    both(loaders, kind)


def test_an_error_of_the_program_is_raised_as_it_is(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(160)
    loader, model = loaders(dataset, batch_size=8), models.LooksUp()
    done = partition(model, example(dataset, 8), loader=loader, offload="all")
    with pytest.raises(IndexError, match="index out of range") as raised:
        train(loader, model)
    assert done.counts.partitioned == 10
    assert any(entry.path.name == "sample_models.py" for entry in raised.traceback)


@pytest.mark.shows("that an argument of a forward is a leaf of the batch is proved")
def test_what_stands_between_loader_and_forward_is_proved_to_only_move(loaders: Callable[..., Any]) -> None:
    def moved(_: int, batch: Any) -> Any:
        return [batch[0].to("cpu", non_blocking=True), batch[1]]

    done, _ = both(loaders, models.Clean, between=moved, inputs=lambda batch: (batch[0].to("cpu"),))
    assert done.counts.partitioned == 7

    def mixed(number: int, batch: Any) -> Any:
        return [batch[0] if number % 2 else batch[0].flip(0) * 0.5, batch[1]]

    done, _ = both(loaders, models.Clean, between=mixed)
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 2, 5)
    assert [*done.counts.reasons] == ["data workers have computed nothing of what it is given now"]
    done, _ = both(loaders, models.Clean, inputs=lambda batch: (batch[0] * 2,))
    assert "no argument of the forward is a tensor of the loader" in done.reason


@pytest.mark.shows("that an argument of a forward is a leaf of the batch is proved")
def test_a_leaf_that_the_program_changes_in_place_is_no_leaf_any_more(loaders: Callable[..., Any]) -> None:
    def changed(number: int, batch: Any) -> Any:
        if number == 5:
            batch[0].mul_(2)
        if number == 6:
            batch[0].numpy()[:] = 1
        if number == 7:
            batch[0].detach().numpy()[0, 0] = 7
        if number == 8:
            batch[0][0].numpy()[:] = 8
        if number == 9:
            batch[0].view(-1).split(4)[1].data.zero_()
        return batch

    done, _ = both(loaders, models.Clean, between=changed)
    assert done.counts.original == 5


def test_a_part_of_a_leaf_that_is_only_read_leaves_the_leaf_as_it_is(loaders: Callable[..., Any]) -> None:
    def read(_: int, batch: Any) -> Any:
        assert batch[0][:, 1:].nan_to_num().max() > batch[0].unbind()[0].nan_to_num().min()
        assert f"{batch[0][1, 1]:.1f}" == f"{batch[0].tolist()[1][1]:.1f}"
        assert type(pickle.loads(pickle.dumps(batch[0][0]))) is torch.Tensor
        return batch

    done, _ = both(loaders, models.Clean, between=read)
    assert (done.counts.checked, done.counts.original) == (3, 0)


@pytest.mark.shows("arguments and leaves that are changed in place stay right")
def test_an_output_that_data_workers_computed_may_be_changed_in_place(loaders: Callable[..., Any]) -> None:
    class Returns(models.Clean):
        def forward(self, values: torch.Tensor) -> Any:
            clean = torch.nan_to_num(values).log1p()
            return self.layer(clean), clean

    dataset = models.Rows(80)

    def losses(partitioned: bool) -> list[str]:
        torch.manual_seed(0)
        model, loader, found = Returns(), loaders(dataset, batch_size=8), []
        if partitioned:
            done = partition(model, example(dataset, 8), loader=loader, offload="all")
            assert done.is_active, done.reason
        for values, _ in loader:
            _, clean = model(values)
            clean.mul_(2)
            found.append(float(model(values)[0].detach().sum()).hex())
        return found

    assert losses(partitioned=True) == losses(partitioned=False)


def test_activation_checkpointing_recomputes_what_it_computed(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(80)

    def losses(partitioned: bool) -> list[str]:
        torch.manual_seed(0)
        model, loader, found = models.Clean(), loaders(dataset, batch_size=8), []
        if partitioned:
            done = partition(model, example(dataset, 8), loader=loader, offload="all")
            assert done.is_active, done.reason
        for values, _ in loader:
            loss = torch.utils.checkpoint.checkpoint(model, values, use_reentrant=False).square().sum()
            loss.backward()
            found.append(float(loss.detach()).hex())
        return found

    assert losses(partitioned=True) == losses(partitioned=False)


def test_two_calls_in_a_step_share_running_statistics_with_the_check(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(80)

    def losses(partitioned: bool) -> list[str]:
        torch.manual_seed(0)
        model, loader = torch.nn.Sequential(models.Clean(), torch.nn.BatchNorm1d(1)), loaders(dataset, batch_size=8)
        if partitioned:
            done = partition(model, example(dataset, 8), loader=loader, offload="all")
            assert done.is_active, done.reason
        found = []
        for values, _ in loader:
            loss = model(values).square().sum() + model(values).sum()
            loss.backward()
            found.append(float(loss.detach()).hex())
        return found

    assert losses(partitioned=True) == losses(partitioned=False)


def change_in_mid_run(loaders: Callable[..., Any], change: Callable[[torch.nn.Module], None]) -> Partition:
    """Trains with a model that changes before the sixth step, and has the same losses."""
    dataset, doubled, forward = models.Rows(80), models.doubled, models.Clean.forward

    def losses(partitioned: bool) -> tuple[list[str], Partition | None]:
        torch.manual_seed(0)
        model, loader = models.ReadsGlobals(), loaders(dataset, batch_size=8)
        done = partition(model, example(dataset, 8), loader=loader, offload="all") if partitioned else None

        def between(number: int, batch: Any) -> Any:
            if number == 5:
                change(model)
            return batch

        try:
            return train(loader, model, between=between), done
        finally:
            models.SETTINGS["scale"] = 3.0
            models.ReadsGlobals.offset, models.GAIN.gain, models.doubled = 0.0, 1.0, doubled
            vars(models)["Clean"].forward = forward

    expected, _ = losses(partitioned=False)
    found, done = losses(partitioned=True)
    assert found == expected
    assert done is not None
    return done


# What changes, and how many of the five steps behind compute all: three with another graph, which is then cut; all
# where a copy is another one, or what no guard sees; none where the operators and what they take are as they were.
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "attribute": (lambda model: setattr(model, "factor", 3.0), 3),
    "global": (lambda _: models.SETTINGS.update(scale=4.0), 3),
    "structure": (lambda model: setattr(model, "layer", torch.nn.Linear(4, 1)), 0),
    "more parts": (lambda model: model.add_module("more", torch.nn.Linear(1, 1)), 0),
    "hook": (lambda model: model.layer.register_forward_hook(lambda *_: None), 0),
    "hook with a result": (lambda model: model.layer.register_forward_hook(lambda *given: given[2] * 2), 3),
    "private attribute": (lambda model: setattr(model, "_gain", 3.0), 3),
    "new attribute": (lambda model: setattr(model, "offset", 3.0), 3),
    "attribute of the class": (lambda model: setattr(type(model), "offset", 3.0), 3),
    "forward of a layer": (lambda model: setattr(model.layer, "forward", lambda x: x @ model.layer.weight.T), 3),
    "forward of the class": (
        lambda _: setattr(models.Clean, "forward", lambda self, values: self.layer(values.nan_to_num())),
        5,
    ),
    "global function": (lambda _: setattr(models, "doubled", torch.neg), 3),
    "global object": (lambda _: setattr(models.GAIN, "gain", 3.0), 3),
    "uncounted": (lambda model: model.mean.data.add_(1), 5),
    "buffer": (lambda model: model.mean.add_(1), 5),
}


@pytest.mark.shows("a model or a batch that changes its structure stays right")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_seen_to(change: str, loaders: Callable[..., Any]) -> None:
    done = change_in_mid_run(loaders, CHANGES[change][0])
    assert done.counts.original == CHANGES[change][1], done.counts


def test_a_checkpoint_with_the_same_buffers_keeps_the_cut(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(80)

    def losses(partitioned: bool) -> tuple[list[str], Partition | None]:
        torch.manual_seed(0)
        model, loader = models.Clean(), loaders(dataset, batch_size=8)
        done = partition(model, example(dataset, 8), loader=loader, offload="all") if partitioned else None
        saved = copy.deepcopy(model.state_dict())
        other = saved | {"mean": saved["mean"] + 1}

        def between(number: int, batch: Any) -> Any:
            if number in (5, 7):
                model.load_state_dict(saved)
            elif number == 6:
                model.load_state_dict(other)
            return batch

        return train(loader, model, between=between), done

    expected, _ = losses(partitioned=False)
    found, done = losses(partitioned=True)
    assert found == expected
    assert done is not None
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 6, 1)
    assert [*done.counts.reasons] == ["a tensor that the forward reads, of which data workers have a copy, has changed"]


@pytest.mark.shows("hooks, and values that are no tensors, stay right in a partitioned forward")
def test_hooks_inside_the_model_are_a_part_of_it(loaders: Callable[..., Any]) -> None:
    def hooked() -> torch.nn.Module:
        model = models.Clean()
        model.layer.register_forward_hook(lambda module, args, output: output * 2)
        return model

    done, _ = both(loaders, hooked)
    assert done.counts.partitioned == 7


@pytest.mark.shows("a model or a batch that changes its structure stays right")
def test_a_batch_of_another_size_is_taken_and_one_with_other_bytes_runs_as_written(loaders: Callable[..., Any]) -> None:
    done, _ = both(loaders, models.Clean, num_rows=77)
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (4, 6, 0), "each size is checked"
    done, _ = both(loaders, models.Clean, num_rows=73)  # torch.compile makes a graph of its own for one row
    assert (done.counts.partitioned, done.counts.original) == (6, 1)
    done, _ = both(
        loaders,
        models.Clean,
        between=lambda number, batch: [batch[0].double().float() + number // 4, batch[1]],
    )
    assert done.counts.original == 6


@pytest.mark.shows("a leaf is always sent, and moved values are taken only for its very bytes")
def test_a_copy_of_the_batch_is_as_good_as_the_batch(loaders: Callable[..., Any]) -> None:
    done, _ = both(loaders, models.Clean, between=lambda _, batch: [batch[0].double().float().clone(), batch[1]])
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 7, 0)


def test_evaluation_copies_and_checkpoints_know_nothing_of_it(loaders: Callable[..., Any]) -> None:
    done, model = both(loaders, models.Clean)
    assert done.counts.partitioned == 7
    assert [*model.state_dict()] == [*models.Clean().state_dict()]
    batch = example(models.Rows(8), 8)
    model.eval()
    expected = models.Clean.forward(model, batch[0])
    assert torch.equal(model(batch[0]), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.__self__ is other
        with torch.no_grad():
            other.layer.weight.add_(1)
        assert not torch.equal(other(batch[0]), expected)
    assert "forward" not in vars(model)
    done.remove("the test ends")
    assert "_compiled_call_impl" not in vars(model)


@pytest.mark.shows("the first batches of a cut are computed both ways, and a difference ends it")
def test_a_difference_in_the_check_ends_it(loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from hetstream.mpi_dataworkers.partitioner import split

    real = split.pack
    monkeypatch.setattr(split, "pack", lambda values, *more: real([value * 1.0000001 for value in values], *more))
    done, _ = both(loaders, models.Clean)
    assert not done.is_active
    assert "the check of a batch failed: value 0 differs" in done.reason
    assert done.counts.partitioned == 0


@pytest.mark.shows("the first batches of a cut are computed both ways, and a difference ends it")
def test_work_in_vain_ends(loaders: Callable[..., Any]) -> None:
    done, _ = both(loaders, models.Clean, between=lambda _, batch: [batch[0] + 1, batch[1]], num_rows=480)
    assert not done.is_active
    assert "50 steps in a row could not use it" in done.reason


@pytest.mark.shows("costs decide where a forward is cut; a cut that gains nothing is taken back")
def test_another_decision_takes_effect_between_two_steps(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(80)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8), models.Clean())
    torch.manual_seed(0)
    model, loader = models.Clean(), loaders(dataset, batch_size=8)
    slow = Rates(step_s=1e-4, batch_s=0.0, num_data_workers=0)
    done = partition(model, example(dataset, 8), loader=loader, rates=slow, num_checked=1)
    assert (done.is_active, done.reason) == (False, "there are no data workers")

    def between(number: int, batch: Any) -> Any:
        if number == 2:
            done.decide(Rates(1e-4, 0.0, 4, 1e12, 1e12))
        if number == 7:
            done.decide(slow)
        return batch

    assert train(loader, model, between=between) == expected
    assert (done.counts.checked, done.counts.partitioned) == (1, 3)
    assert not done.is_active


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
def test_mixed_precision_and_ddp(loaders: Callable[..., Any], tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dataset = models.Rows(80)
        results = []
        for partitioned in (False, True):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(models.Clean())
            loader = loaders(dataset, batch_size=8)
            done = partition(model, example(dataset, 8), loader=loader, offload="all") if partitioned else None
            with torch.autocast("cpu", dtype=torch.bfloat16):
                results.append(train(loader, model))
            del model
        assert results[0] == results[1]
        assert done is not None
        assert done.counts.partitioned == 7
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_is_no_plain_module_stays_as_it_is(loaders: Callable[..., Any]) -> None:
    dataset = models.Rows(16)
    loader = loaders(dataset, batch_size=8)
    compiled = partition(torch.compile(models.Clean(), backend="eager"), example(dataset, 8), loader=loader)
    assert "torch.compile compiles the model" in compiled.reason
    evaluated = partition(models.Clean().eval(), example(dataset, 8), loader=loader)
    assert "eval mode" in evaluated.reason
    anything = partition(
        models.TakesAnything(), example(dataset, 8), loader=loader, inputs=lambda one: (one[0], object())
    )
    assert not anything.is_active
    with pytest.raises(OptionsError, match="must be a hetstream"):
        partition(models.Clean(), example(dataset, 8), loader=[])
    with pytest.raises(OptionsError, match=r"Clean.forward does not take these 2 argument.*inputs=lambda batch"):
        partition(models.Clean(), example(dataset, 8), loader=loader, inputs=lambda one: (one[0], one[0]))
    with pytest.raises(OptionsError, match="must be one of auto, all, off"):
        partition(models.Clean(), example(dataset, 8), loader=loader, offload="some")
