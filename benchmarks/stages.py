"""`make bench-stages`: one stage of data workers against two, on a throw-away Slurm cluster. All costs are sleeps.

The question of GoldMiner's Table 4: a model is trained on a machine of four GPUs. Part of its preprocessing is fast on
a GPU, the rest needs CPUs. Data workers of one stage bundle a GPU with a quarter of that machine's CPUs; those of two
have the GPU alone, and CPUs from anywhere. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.clients.elastic_job import ElasticJob
from benchmarks.clients.elastic_picture import stacked
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row
from benchmarks.processes import wait
from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.slurm_plugin.render.charts import Series, ticked

PROGRAM = Path(__file__).parent / "clients" / "stages_train.py"
# Of a step: the trainer, a GPU's part of the preprocessing, one CPU's. As the paper's figures imply: without data
# workers the GPU's part takes 0.43 of the trainer's time, and a quarter of the CPUs makes half of the steps needed.
STEP_S, GPU_S, CPU_S = 0.08, 0.034, 0.62
SLOW_GPU_S = 0.19
_CPUS, _GPUS = 16, 4
_COOLDOWN_S = 5
_LAST_S, _LONGEST_S = 10.0, 150.0
_EVERY_S = 0.5
# Table 4: performance and cost savings against four GPUs without data workers, by GPUs more.
PAPER: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "one stage": {1: (0.74, -0.70), 2: (1.13, -0.33), 4: (1.43, -0.40)},
    "two stages": {1: (1.43, 0.13), 2: (1.43, -0.049), 4: (1.43, -0.40)},
}
ALONE = "without data workers"


@dataclass(frozen=True)
class Sample:
    """One moment of a job with two stages.

    Attributes:
        at_s: since the first step.
        workers: data workers that are registered, by device.
        wait_share: of the last seconds that the training loop waited.
        steps_per_s: over the last seconds.
    """

    at_s: float
    workers: Mapping[str, int]
    wait_share: float
    steps_per_s: float


def main() -> int:
    """Run the benchmark."""
    args = harness.parser(
        "One stage of data workers against two, on a throw-away Slurm cluster.", repeats=1
    ).parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    failures: dict[str, str] = {}
    speeds: dict[tuple[str, int], float] = {}
    rows: list[Row] = []
    words = [word.strip() for word in args.systems.split(",") if word.strip()]

    def is_chosen(name: str) -> bool:
        return not words or any(word in name for word in words)

    with throw_away_cluster() as (directory, environ):
        bench = Bench(directory, environ, args.out, args.quick)
        parts: dict[str, Callable[[], None]] = {ALONE: lambda: speeds.update({(ALONE, 0): bench.alone()})}
        for gpus in PAPER["one stage"]:
            parts[f"one stage, {gpus} more"] = lambda gpus=gpus: speeds.update(  # type: ignore[misc]
                {("one stage", gpus): bench.one_stage(gpus)}
            )

        def two_stages() -> None:
            speed, found = bench.two_stages("two stages", GPU_S)
            speeds["two stages", 1] = speed
            rows.extend(found)

        def slow_gpu() -> None:
            rows.extend(bench.two_stages("slower GPU stage", SLOW_GPU_S)[1])

        parts |= {"two stages": two_stages, "slower GPU stage": slow_gpu}
        for name, part in parts.items():
            if is_chosen(name):
                try:
                    part()
                except (
                    TimeoutError,
                    HetstreamError,
                    subprocess.SubprocessError,
                    LookupError,
                    ZeroDivisionError,
                ) as error:
                    failures[name] = f"{type(error).__name__}: {error}"
                    harness.say(f"{name}: FAILED: {failures[name]}")
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"Emulation: a step is {STEP_S:g} s of sleep in the trainer, {GPU_S:g} s on a GPU that there is not, and "
            f"{CPU_S:g} s on a CPU. This measures leases, streams and controllers, not computing.",
            "The costs are chosen as the paper's figures imply them (no data workers, and one stage on one GPU more); "
            "all other rows follow from how the stages are divided.",
            f"Two stages: --data-workers=0-{_CPUS} of 1 CPU and --gpu-data-workers=0-{_GPUS}; the numbers are found by "
            "the controllers. One stage: as many data workers as GPUs more, each with 4 CPUs.",
            "Cost savings as in the paper: the price of a machine is that of its GPUs.",
        ],
    }
    return harness.finish("stages", args.out, [*table(speeds), *rows], failures, context)


class Bench:
    """A cluster, and jobs on it.

    Args:
        directory: of the jobs.
        environ: in which Slurm's commands reach the cluster.
        out: where pictures go.
        short: measure nothing, only show that it runs.
    """

    def __init__(self, directory: Path, environ: dict[str, str], out: Path, short: bool) -> None:
        self._directory, self._environ, self._out, self._short = directory, environ, out, short

    def alone(self) -> float:
        """Steps per second where the trainer's machine does it all: the GPU's part is a part of the training step."""
        harness.say(f"{ALONE}: processes of the trainer load, the training step has the GPU's part")
        out = self._directory / "alone"
        seconds = 4.0 if self._short else 20.0
        argv = [sys.executable, str(PROGRAM), str(out), "--mode=local", *_costs(GPU_S), f"--seconds={seconds:g}"]
        subprocess.run(argv, env=os.environ, check=True, timeout=120)
        times = [float(line.split()[0]) for line in out.read_text().splitlines()]
        return _rate([at for at in times if at > times[-1] - seconds / 2])

    def one_stage(self, gpus: int) -> float:
        """Steps per second of data workers that bundle a GPU and four CPUs."""
        with self._job(f"one-{gpus}", "single", f"--data-workers={gpus} --data-worker-cpus=4", GPU_S) as job:
            wait(lambda: len(job.steps()) > 0, "the first step")
            began = time.monotonic()
            wait(lambda: time.monotonic() - began > (2 if self._short else 20), "enough steps")
            return job.steps_per_s(_LAST_S)

    def two_stages(self, name: str, gpu_s: float) -> tuple[float, list[Row]]:
        """Steps per second of two stages, and rows about the sizes that their controllers find."""
        directives = f"--data-workers=0-{_CPUS} --data-worker-cpus=1 --data-worker-cooldown={_COOLDOWN_S}"
        directives += f" --gpu-data-workers=0-{_GPUS} --gpu-data-worker-cpus=1 --gpu-data-worker-mem=512M"
        with self._job(name.replace(" ", "-"), "multi", f"{directives} --gpu-data-worker-partition=gpu", gpu_s) as job:
            samples = self._watch(job)
            speed = job.steps_per_s(_LAST_S)
            waited = job.wait_share(_LAST_S)
            changes = {device: job.changes(device) for device in ("cpu", "gpu")}
        self._out.mkdir(parents=True, exist_ok=True)
        suffix = "" if name == "two stages" else "-slower-gpu"
        path = self._out / f"stages{suffix}.svg"
        path.write_text(picture(f"{name}: each finds its size (all costs emulated by sleeping)", samples, 1 / STEP_S))
        harness.say(f"wrote {path}; changes: {changes}")
        return speed, size_rows(name, gpu_s, samples[-1], waited)

    def _watch(self, job: ElasticJob) -> list[Sample]:
        """Look twice a second until the trainer was fed for ten seconds."""
        samples: list[Sample] = []
        wait(lambda: job.steps(), "the first step")
        began, first_s = time.monotonic(), job.steps()[0][0]
        with StatusClient(running_service(job.home / "address")) as client:
            while time.monotonic() - began < (8 if self._short else _LONGEST_S) and not _is_fed(samples):
                with suppress(HetstreamError):
                    status = client.fetch()
                    rows = [row for row in status.loaders if row.epoch >= 0]
                    devices = [row.device for row in status.data_workers]
                    samples.append(
                        Sample(
                            time.time() - first_s,
                            {"cpu": devices.count("cpu"), "gpu": devices.count("gpu")},
                            max((row.wait_share for row in rows), default=0.0),
                            sum(row.steps_per_s for row in rows),
                        )
                    )
                    if len(samples) % 20 == 0:
                        now = samples[-1]
                        harness.say(f"  {now.at_s:.0f} s: {now.steps_per_s:.1f} steps/s with {now.workers}")
                time.sleep(_EVERY_S)
        return samples

    @contextmanager
    def _job(self, name: str, mode: str, directives: str, gpu_s: float) -> Iterator[ElasticJob]:
        harness.say(f"{name}: {directives}")
        words = (f"--mode={mode}", *_costs(gpu_s), "--num-steps=8000")
        job = ElasticJob(self._directory / name, self._environ, directives, *words, program=PROGRAM)
        try:
            wait(lambda: (job.home / "address").exists(), "the job's dispatcher")
            yield job
        finally:
            job.cancel()
            wait(job.has_ended, "the end of the job")


def table(speeds: Mapping[tuple[str, int], float]) -> list[Row]:
    """Table 4 from steps per second by (system, GPUs more): performance, cost savings, and the paper's ordering."""
    rows = [Row(name, "steps", speed, "1/s") for (name, gpus), speed in speeds.items() if name == ALONE or gpus == 0]
    alone = speeds.get((ALONE, 0))
    if not alone:
        return rows
    # One GPU is all that two stages take, however many they may have.
    gains = {key: speed / alone for key, speed in speeds.items() if key[0] != ALONE}
    for (name, gpus), gain in gains.items():
        paper_gain, paper_savings = PAPER[name][gpus]
        rows.append(Row(f"4+{gpus} GPUs: performance", name, gain, "x", note=f"the paper: {paper_gain:.2f}"))
        savings = 1 - (4 + gpus) / 4 / gain
        rows.append(Row(f"4+{gpus} GPUs: cost savings", name, savings, "share", note=f"the paper: {paper_savings:.3g}"))
    one, two = {gpus: gain for (name, gpus), gain in gains.items() if name == "one stage"}, gains.get(("two stages", 1))
    ordering = []
    if 1 in one:
        ordering.append(_judged("one stage on one GPU more / without data workers", one[1], most=1.0))
    if two is not None:
        ordering.append(_judged("two stages on one GPU more / without data workers", two, least=1.36))
        if 2 in one:
            ordering.append(_judged("two stages on one GPU more / one stage on two", two / one[2], least=1.0))
        if 4 in one:
            ordering.append(_judged("two stages on one GPU more / one stage on four", two / one[4], least=0.95))
    return rows + ordering


def _judged(system: str, value: float, *, least: float | None = None, most: float | None = None) -> Row:
    met = value >= least if least is not None else value < (most or 0.0)
    target = f">= {least:g}" if least is not None else f"< {most:g}"
    return Row("the paper's ordering", system, value, "x", target=target, met=met)


def size_rows(name: str, gpu_s: float, last: Sample, waited: float) -> list[Row]:
    """What the controllers found, beside what the costs ask for; up to 1.3 times of it is what they keep."""
    rows = [
        Row(
            f"{name}: the trainer waits at the end", "two stages", waited, "share", target="<= 0.05", met=waited <= 0.05
        )
    ]
    for device, cost_s in (("cpu", CPU_S), ("gpu", gpu_s)):
        need = cost_s / STEP_S
        least, most = -(-need // 1), -(-need * 1.3 // 1) + 1
        found = last.workers[device]
        rows.append(
            Row(
                f"{name}: data workers at the end", device, float(found), "", target=f"{least:g} to {most:g}",
                met=least <= found <= most, note=f"{need:.1f} make just what the trainer takes",
            )
        )  # fmt: skip
    return rows


def picture(title: str, samples: Sequence[Sample], ideal_per_s: float) -> str:
    """Data workers of each stage, and speed, over time."""
    end = max((one.at_s for one in samples), default=1.0)
    most = max((max(one.workers.values()) for one in samples), default=1)
    fast = max([one.steps_per_s for one in samples] + [ideal_per_s])
    of_device = [
        Series(f"on {device.upper()}s", number, [(one.at_s, one.workers[device]) for one in samples], steps=True)
        for number, device in enumerate(("cpu", "gpu"))
    ]
    speed = [
        Series("steps/s", 0, [(one.at_s, one.steps_per_s) for one in samples]),
        Series("ideal", 2, [(0.0, ideal_per_s), (end, ideal_per_s)]),
    ]
    x = ticked(0.0, end, 7, lambda value: f"{value:.0f} s")
    charts = [
        (
            "Data workers of each stage",
            of_device,
            ticked(0.0, float(most), min(most, 8) + 1, lambda value: f"{value:.0f}"),
        ),
        (
            "Share of its time that the trainer waits for data",
            [Series("waits", 0, [(one.at_s, one.wait_share) for one in samples])],
            ticked(0.0, 1.0, 5, lambda value: f"{value:.0%}"),
        ),
        ("Steps per second", speed, ticked(0.0, fast * 1.05, 5, lambda value: f"{value:.0f}")),
    ]
    return stacked(title, x, charts)


def _costs(gpu_s: float) -> tuple[str, ...]:
    return (f"--cpu-s={CPU_S:g}", f"--gpu-s={gpu_s:g}", f"--step-s={STEP_S:g}")


def _is_fed(samples: Sequence[Sample]) -> bool:
    recent = [one for one in samples if one.at_s > samples[-1].at_s - _LAST_S] if samples else []
    fed = all(one.wait_share < 0.05 and one.workers["gpu"] and one.workers["cpu"] for one in recent)
    return bool(recent) and samples[-1].at_s - samples[0].at_s > _LAST_S and fed


def _rate(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    sys.exit(main())
