"""What the demo reports: counts from the ledger, components from Slurm's words, the table and the picture. Pure; used
by `demo.py`."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Above it others take so much of the machine that times say little.
MOST_BUSY = 0.2
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
class Epoch:
    """One pass of the training loop, as the program measured it.

    Attributes:
        elapsed_s: its time.
        computed_s: of that, the network's. In the rest the trainer waits for a batch, or for the core that makes it.
    """

    elapsed_s: float
    computed_s: float

    @property
    def waited_s(self) -> float:
        return max(0.0, self.elapsed_s - self.computed_s)


@dataclass(frozen=True)
class Run:
    """One run of the training script.

    Attributes:
        elapsed_s: from submission to the end, as the user waits.
        training_s: the program's own time, without queue and start-up.
        accuracy: on the test set after the last epoch.
        epochs: of the training set.
    """

    elapsed_s: float
    training_s: float
    accuracy: float
    epochs: tuple[Epoch, ...]

    @property
    def later(self) -> tuple[Epoch, ...]:
        """All epochs but the first, in which processes start and hetstream compares; a short run has no other."""
        return self.epochs[1:] or self.epochs

    @property
    def wait_share(self) -> float:
        """Part of these epochs that the training loop waited for batches, 0 to 1."""
        elapsed_s = sum(epoch.elapsed_s for epoch in self.later)
        return sum(epoch.waited_s for epoch in self.later) / elapsed_s if elapsed_s else 0.0

    def samples_per_s(self, samples: int) -> float:
        """Throughput of these epochs, of so many samples each."""
        return samples * len(self.later) / sum(epoch.elapsed_s for epoch in self.later)

    def samples_per_s_of_all(self, samples: int) -> float:
        """Throughput of the whole run, with queue, start and test set."""
        return samples * len(self.epochs) / self.elapsed_s


@dataclass(frozen=True)
class Result:
    """Everything the table and the JSON file say.

    Attributes:
        backend: `slurm` or `local`.
        reason: why this backend.
        num_cores: that the nodes have in truth: the GPU node has one of them, data workers the others. With one core
            they share it.
        busy_before: share of the machine's cores that others used just before the demo, 0 to 1.
        same_order: whether both runs trained on the same samples in the same order.
        num_samples: of one epoch of the training set.
        compared_steps: that torch's own workers made, too, in the run with hetstream.
        differing_steps: of these, those that were not equal.
    """

    backend: str
    reason: str
    slurm_version: str | None
    components: tuple[Component, ...]
    delivery: Delivery
    same_order: bool
    num_samples: int
    compared_steps: int
    differing_steps: int
    streamed: Run
    plain: Run
    num_cores: int
    busy_before: float

    @property
    def passed(self) -> bool:
        return self.delivery.lost == 0 and self.delivery.duplicated == 0 and self.same_order

    def as_json(self) -> dict[str, Any]:
        """The form of `build/demo.json`; docs/demo.md names its keys."""
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
            "cores": self.num_cores,
            "steps_compared": self.compared_steps,
            "steps_differing": self.differing_steps,
            "samples_per_s": round(self.streamed.samples_per_s(self.num_samples), 1),
            "samples_per_s_plain": round(self.plain.samples_per_s(self.num_samples), 1),
            "trainer_wait_share": round(self.streamed.wait_share, 4),
            "trainer_wait_share_plain": round(self.plain.wait_share, 4),
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


def compared_of(summary: Mapping[str, Any]) -> tuple[int, int]:
    """How many steps torch's own workers made, too, and how many of these were not equal, from a job's summary."""
    loaders = summary["loaders"]
    return sum(loader["compared_steps"] for loader in loaders), sum(loader["differing_steps"] for loader in loaders)


def read_output(text: str, elapsed_s: float) -> Run:
    """Accuracy and times from what the program printed.

    Raises:
        ValueError: It did not print its last lines, so it did not end well.
    """
    epochs = re.findall(r"accuracy (\d\.\d+), computed (\d+\.\d+) of (\d+\.\d+) s", text)
    trained = re.search(r"trained in (\d+\.\d+) s", text)
    if not epochs or trained is None:
        raise ValueError("the program ended without its last lines")
    times = tuple(Epoch(float(whole), float(computed)) for _, computed, whole in epochs)
    return Run(elapsed_s, float(trained.group(1)), float(epochs[-1][0]), times)


def table(result: Result) -> str:
    """The short table at the end of the demo."""
    where = f"Slurm {result.slurm_version}" if result.backend == "slurm" else "the local backend"
    lines = [f"The digits on {where} ({result.reason})", "", f"{'component':<16}{'nodes':<16}{'CPUs':>5}{'GPUs':>6}"]
    for part in result.components:
        lines.append(f"{part.role:<16}{f'{part.nodes} ({part.nodelist})':<16}{part.cpus:>5}{part.gpus:>6}")
    delivery, streamed, plain, samples = result.delivery, result.streamed, result.plain, result.num_samples

    def both(name: str, form: str, of_streamed: float, of_plain: float) -> str:
        return f"{name:<32}{form.format(of_streamed):>14}{form.format(of_plain):>14}"

    per_s, seconds = "{:.0f} samples/s", "{:.1f} s"
    lines += [
        "",
        f"{'':<32}{'hetstream':>14}{'plain':>14}",
        both("epochs after the first", per_s, streamed.samples_per_s(samples), plain.samples_per_s(samples)),
        both("  trainer waited for data", "{:.0%}", streamed.wait_share, plain.wait_share),
        both("first epoch", seconds, streamed.epochs[0].elapsed_s, plain.epochs[0].elapsed_s),
        both("submission to end", seconds, streamed.elapsed_s, plain.elapsed_s),
        both("  the whole of it", per_s, streamed.samples_per_s_of_all(samples), plain.samples_per_s_of_all(samples)),
        both("accuracy", "{:.4f}", streamed.accuracy, plain.accuracy),
        "",
        f"{delivery.delivered} of {delivery.expected} samples delivered in {delivery.steps} steps: "
        f"{delivery.lost} lost, {delivery.duplicated} duplicated.",
        f"Order as in the plain run: {'yes' if result.same_order else 'NO'}.",
        f"{result.compared_steps} steps, most of the first epoch's among them, were also made by torch's own workers "
        f"and compared: {result.differing_steps} differed.",
        "",
        verdict(result),
    ]
    return "\n".join(lines)


def verdict(result: Result) -> str:
    """What to think of the times, and of the accuracies."""
    accuracy = "Accuracies differ a little, because hetstream seeds augmentation for each sample."
    if result.busy_before > MOST_BUSY:
        share = f"{result.busy_before:.0%} of its cores"
        busy = f"The machine was busy ({share}) before the demo began: the times cannot be compared."
        return f"{busy}\n{emulation(result)}\n{accuracy}"
    samples = result.num_samples
    gain = result.streamed.samples_per_s(samples) / result.plain.samples_per_s(samples)
    whole = result.plain.elapsed_s / result.streamed.elapsed_s
    speed = (
        f"With data workers: {gain:.2f} times the throughput after the first epoch, {whole:.2f} times in the whole run."
    )
    return f"{speed}\n{emulation(result)}\n{accuracy}"


def emulation(result: Result) -> str:
    """What is not as on a cluster."""
    if result.num_cores < 2:
        return "Emulated: all nodes are one core here, so data workers add nothing to the trainer's."
    others = "the other core" if result.num_cores == 2 else f"the other {result.num_cores - 1} cores"
    return (
        f"Emulated: nodes are cores of one machine. The plain run has the GPU node's core alone; data workers have\n"
        f"{others}. The GPU is emulated by the GPU node's core, which computes the network, too."
    )


# The picture: two bars over one axis of time, from submission to end.

_WIDTH, _LEFT, _RIGHT, _BAR, _TOP, _ROW = 760, 20, 20, 34, 78, 84
_STYLE = (
    "svg{font-family:system-ui,DejaVu Sans,Helvetica,sans-serif;--ink:#1b1f24;--dim:#57606a;--line:#d0d7de;"
    "--ground:#ffffff;--train:#0b5cad;--wait:#f0a35c;--start:#c9d1d9}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--dim:#9aa4af;--line:#30363d;--ground:#0d1117;--train:#58a6ff;"
    "--wait:#c8742b;--start:#484f58}}"
    "text{font-size:13px;fill:var(--ink)}.head{font-size:16px;font-weight:600}.name{font-weight:600}"
    ".dim{fill:var(--dim);font-size:12px}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:var(--line)}"
    ".train{fill:var(--train)}.wait{fill:var(--wait)}.start{fill:var(--start)}.cut{stroke:var(--ground);stroke-width:1.5}"
)


def picture(result: Result) -> str:
    """How both runs spent their time, as SVG: start and test set, training, waiting for batches."""
    runs = (("plain: the GPU node alone", result.plain), ("with data workers", result.streamed))
    longest_s = max(run.elapsed_s for _, run in runs)
    per_px = longest_s / (_WIDTH - _LEFT - _RIGHT)
    bottom = _TOP + _ROW * len(runs) - 20
    parts = [
        f'<text class="head" x="{_LEFT}" y="28">The same program, plain and with data workers</text>',
        *_legend(54),
        *_seconds(longest_s, per_px, bottom),
    ]
    for number, (name, run) in enumerate(runs):
        y = _TOP + 22 + _ROW * number
        speed = f"{run.samples_per_s(result.num_samples):.0f} samples/s and {run.wait_share:.0%} of the time waiting"
        parts += [
            f'<text class="name" x="{_LEFT}" y="{y - 8}">{name}</text>',
            f'<text class="end" x="{_WIDTH - _RIGHT}" y="{y - 8}">{run.elapsed_s:.0f} s: {speed} after epoch 1</text>',
            *_bar(run, per_px, y),
        ]
    nodes = "one core of this machine for the GPU node, which computes the network too"
    others = f"{result.num_cores - 1} for data workers" if result.num_cores > 1 else "the same for data workers"
    parts.append(f'<text class="dim" x="{_LEFT}" y="{bottom + 44}">Emulated: {nodes}; {others}.</text>')
    height = bottom + 58
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'role="img" aria-label="Time of the training program, plain and with data workers: training, and waiting for '
        f'batches"><style>{_STYLE}</style><rect width="100%" height="100%" fill="var(--ground)" rx="6"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _bar(run: Run, per_px: float, y: float) -> Iterator[str]:
    """One run: its start, then each epoch's training and waiting, with the test set between them."""
    at_s = run.elapsed_s - run.training_s
    between_s = max(0.0, run.training_s - sum(epoch.elapsed_s for epoch in run.epochs)) / len(run.epochs)
    yield _piece("start", 0.0, run.elapsed_s, per_px, y, "start, end, test set")
    for number, epoch in enumerate(run.epochs, start=1):
        trained_s = epoch.elapsed_s - epoch.waited_s
        yield _piece("train", at_s, trained_s, per_px, y, f"epoch {number}: trained {trained_s:.1f} s")
        waited = f"epoch {number}: waited {epoch.waited_s:.1f} s"
        yield _piece("wait", at_s + trained_s, epoch.waited_s, per_px, y, waited)
        at_s += epoch.elapsed_s + between_s


def _piece(kind: str, begin_s: float, length_s: float, per_px: float, y: float, title: str) -> str:
    place = f'x="{_LEFT + begin_s / per_px:.1f}" y="{y}" width="{length_s / per_px:.1f}" height="{_BAR}"'
    return f'<rect class="{kind} cut" {place}><title>{title}</title></rect>'


def _legend(y: float) -> Iterator[str]:
    at = _LEFT
    kinds = {"train": "training", "wait": "waiting for batches", "start": "start, end, test set"}
    for kind, text in kinds.items():
        yield f'<rect class="{kind}" x="{at}" y="{y - 10}" width="12" height="12"/>'
        yield f'<text class="dim" x="{at + 18}" y="{y}">{text}</text>'
        at += 40 + 7 * len(text)


def _seconds(longest_s: float, per_px: float, bottom: float) -> Iterator[str]:
    """The axis of time."""
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if longest_s / size <= 8 or size == 1000)
    for at_s in range(0, int(longest_s) + 1, step):
        x = _LEFT + at_s / per_px
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="dim middle" x="{x:.1f}" y="{bottom + 18}">{at_s} s</text>'
