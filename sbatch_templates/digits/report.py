"""What the demo reports: counts from the ledger, components from Slurm's words, the table. Pure; used by `demo.py`."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING")


@dataclass(frozen=True)
class Component:
    """One component of the job; `nodes`, `cpus` and `gpus` are what Slurm allocated, or what ran locally.

    Attributes:
        role: `trainer` or `data_workers`.
        nodelist: the nodes' names in Slurm's short form.
    """

    role: str
    nodes: int
    cpus: int
    gpus: int
    nodelist: str


@dataclass(frozen=True)
class Delivery:
    """What the trainer got, in batches (steps) and samples."""

    steps: int
    expected: int
    delivered: int
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Run:
    """One run of the training script.

    Attributes:
        elapsed_s: from submission to the end, as the user waits.
        training_s: the program's own time, without queue and start-up.
        accuracy: on the test set after the last epoch.
    """

    elapsed_s: float
    training_s: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """Everything the table and the JSON file say.

    Attributes:
        backend: `slurm` or `local`.
        reason: why this backend.
        machine_cpus: cores that all nodes share in truth.
        load_before: the machine's load average over the minute before the demo.
        same_order: whether both runs trained on the same samples in the same order.
        wait_share: part of the trainer's time in its loops that it waited for data, 0 to 1.
    """

    backend: str
    reason: str
    slurm_version: str | None
    components: tuple[Component, ...]
    delivery: Delivery
    same_order: bool
    wait_share: float
    streamed: Run
    plain: Run
    machine_cpus: int
    load_before: float

    @property
    def passed(self) -> bool:
        return self.delivery.lost == 0 and self.delivery.duplicated == 0 and self.same_order

    def as_json(self) -> dict[str, Any]:
        """The form of `build/demo.json`; README names its keys."""
        components = [asdict(component) for component in self.components]
        for component in components:
            del component["nodelist"]
        return {
            "backend": self.backend,
            "slurm_version": self.slurm_version,
            "components": components,
            "steps": self.delivery.steps,
            "samples_expected": self.delivery.expected,
            "samples_delivered": self.delivery.delivered,
            "samples_lost": self.delivery.lost,
            "samples_duplicated": self.delivery.duplicated,
            "trainer_wait_share": round(self.wait_share, 4),
            "accuracy": self.streamed.accuracy,
            "elapsed_s": round(self.streamed.elapsed_s, 2),
            "elapsed_plain_s": round(self.plain.elapsed_s, 2),
        }


def program_of(script: str) -> tuple[list[str], int]:
    """The program that the batch script starts (the words after `srun`) and the number of epochs it is told to run."""
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    program = shlex.split(line)[1:]
    return program, int(program[program.index("--epochs") + 1])


def count_delivery(lines: Iterable[str], expected_ids: Mapping[str, Sequence[int]], epochs: int) -> Delivery:
    """Compare a ledger with the ids that every epoch must hold once.

    Args:
        lines: JSON lines `{"split", "epoch", "ids"}`, one a batch.
        expected_ids: By split, the ids of one epoch.
        epochs: How many epochs the program was to run. A missing epoch counts as lost.

    Returns:
        Ids beyond the expected ones, or of an epoch beyond the last, count as duplicated: nobody asked for them.
    """
    got: dict[tuple[str, int], Counter[int]] = {}
    steps = 0
    for line in lines:
        batch = json.loads(line)
        got.setdefault((batch["split"], batch["epoch"]), Counter()).update(batch["ids"])
        steps += 1
    want = {(split, epoch): Counter(ids) for split, ids in expected_ids.items() for epoch in range(epochs)}
    none: Counter[int] = Counter()
    return Delivery(
        steps=steps,
        expected=sum(ids.total() for ids in want.values()),
        delivered=sum(ids.total() for ids in got.values()),
        lost=sum((ids - got.get(key, none)).total() for key, ids in want.items()),
        duplicated=sum((ids - want.get(key, none)).total() for key, ids in got.items()),
    )


def components_of(scontrol: str) -> tuple[Component, ...]:
    """Components from the output of `scontrol show job -o ID`, a line each; the first is the trainer."""
    found: list[Component] = []
    for fields in _jobs(scontrol):
        nodes = int(fields["NumNodes"].partition("-")[0])
        per = {"TresPerNode": nodes, "TresPerTask": int(fields["NumTasks"]), "TresPerJob": 1}
        gpus = sum(times * count for key, times in per.items() for count in _gpus_in(fields.get(key, "")))
        role = "data_workers" if found else "trainer"
        found.append(Component(role, nodes, int(fields["NumCPUs"]), gpus, fields["NodeList"]))
    return tuple(found)


def active(scontrol: str) -> bool:
    """Whether a component of the job still waits or runs."""
    return any(fields["JobState"] in _ACTIVE for fields in _jobs(scontrol))


def completed(scontrol: str) -> bool:
    """Whether the trainer's component ended with exit code 0."""
    return _jobs(scontrol)[0]["JobState"] == "COMPLETED"


def _jobs(scontrol: str) -> list[dict[str, str]]:
    """The `KEY=value` words of each line, by component; Slurm 22.05 repeats lines."""
    by_offset = {}
    for line in scontrol.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields:
            by_offset[int(fields.get("HetJobOffset", 0))] = fields
    return [by_offset[offset] for offset in sorted(by_offset)]


def _gpus_in(tres: str) -> list[int]:
    """GPU counts in `gres:gpu:2`, `gres:gpu:a100:2` or `cpu=4,gres/gpu=2`."""
    return [int(count) for count in re.findall(r"\bgpu(?::[A-Za-z]\w*)?[:=](\d+)", tres)]


def wait_share_of(summary: Mapping[str, Any]) -> float:
    """Part of the loaders' time that their trainer waited for a batch, from a dispatcher's summary."""
    loaders = summary["loaders"]
    elapsed_s = sum(loader["elapsed_s"] for loader in loaders)
    return sum(min(loader["wait_s"], loader["elapsed_s"]) for loader in loaders) / elapsed_s if elapsed_s else 0.0


def read_output(text: str, elapsed_s: float) -> Run:
    """Accuracy and training time from what the program printed.

    Raises:
        ValueError: It did not print its last lines, so it did not end well.
    """
    accuracies, trained = re.findall(r"accuracy (\d\.\d+)", text), re.search(r"trained in (\d+\.\d+) s", text)
    if not accuracies or trained is None:
        raise ValueError("the program ended without its last lines")
    return Run(elapsed_s, float(trained.group(1)), float(accuracies[-1]))


def table(result: Result) -> str:
    """The short table at the end of the demo."""
    where = f"Slurm {result.slurm_version}" if result.backend == "slurm" else "the local backend"
    lines = [f"The digits on {where} ({result.reason})", "", f"{'component':<16}{'nodes':<16}{'CPUs':>5}{'GPUs':>6}"]
    for part in result.components:
        lines.append(f"{part.role:<16}{f'{part.nodes} ({part.nodelist})':<16}{part.cpus:>5}{part.gpus:>6}")
    delivery, streamed, plain = result.delivery, result.streamed, result.plain
    lines += [
        "",
        f"{'':<26}{'hetstream':>12}{'plain':>12}",
        f"{'steps':<26}{delivery.steps:>12}",
        f"{'samples expected':<26}{delivery.expected:>12}",
        f"{'samples delivered':<26}{delivery.delivered:>12}",
        f"{'samples lost':<26}{delivery.lost:>12}",
        f"{'samples duplicated':<26}{delivery.duplicated:>12}",
        f"{'order as in the plain run':<26}{'yes' if result.same_order else 'NO':>12}",
        f"{'trainer waited for data':<26}{result.wait_share:>12.1%}",
        f"{'accuracy':<26}{streamed.accuracy:>12.4f}{plain.accuracy:>12.4f}",
        f"{'submission to end':<26}{streamed.elapsed_s:>10.1f} s{plain.elapsed_s:>10.1f} s",
        f"{'of that, training':<26}{streamed.training_s:>10.1f} s{plain.training_s:>10.1f} s",
        "",
        verdict(result),
    ]
    return "\n".join(lines)


def verdict(result: Result) -> str:
    """What to think of the times on one machine, and of the accuracies."""
    accuracy = "Accuracies differ a little, because hetstream seeds augmentation for each sample."
    if result.load_before > result.machine_cpus / 2:
        return (
            f"The machine was busy (load {result.load_before:.1f}) before the demo began: the times cannot be compared."
            f"\n{accuracy}"
        )
    difference = result.streamed.training_s / result.plain.training_s - 1
    if abs(difference) < 0.05:
        speed = "Training took as long with hetstream as without it"
    else:
        how = "longer" if difference > 0 else "less time"
        speed = f"Training took {abs(difference):.0%} {how} with hetstream than without"
    return (
        f"{speed}.\n"
        f"Every node is the same {result.machine_cpus} cores here: data workers add no CPU to the trainer's, so\n"
        f"the demo shows that the parts work together, and not what they gain on a cluster.\n{accuracy}"
    )
