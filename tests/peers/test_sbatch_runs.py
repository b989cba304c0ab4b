"""Scripts of the styles that users have, run to their ends plain and converted: the same exit codes, the same ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.peers.sbatch_gate import parse_jobs

SCRIPTS = sorted((Path(__file__).parent / "sbatch_scripts").glob("run_*.sbatch"))
PROGRAM = Path(__file__).parent / "programs" / "train.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
OURS = ("--data-worker-cpus=1", "--data-worker-partition=cpu")
# Variables of Slurm that may be others than in the plain job.
MAY_DIFFER = {
    r"SLURM(D|_STEP)?_(JOB_?ID|JOB_SLUID|STEP_?ID|NODE_?LIST|JOB_NODELIST|NODENAME|LAUNCHER_PORT|SRUN_COMM_\w+|TASK_PID"
    r"|TOPOLOGY_ADDR\w*|STEP_NODELIST|ARRAY_JOB_ID|LAUNCH_NODE_IPADDR|JOB_(START|END)_TIME)": "it is another job",
    r"SLURM_(SUBMIT_DIR|CONF\w*)|SRUN_DEBUG": "it is submitted from another directory",
    r"SLURM_(CPUS_PER_TASK|CPUS_ON_NODE|JOB_CPUS_PER_NODE\w*|CPUS_PER_GPU|TRES_PER_TASK|CPU_BIND\w*|STEP_RESV_PORTS)"
    r"|SRUN_CPUS_PER_TASK": "the trainer has fewer CPUs",
    r"SLURM_MEM_PER_CPU": "fewer CPUs have the same memory",
    r"(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES|SLURM_(JOB|STEP)_GPUS)": "other GPUs were free",
    r"MASTER_ADDR": "other nodes were free",
}
SEEN = re.compile(r"(SLURM|SRUN|CUDA|GPU|ROCR|MASTER|WORLD|OMP)")

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


def submit(cluster: Any, directory: Path, script: Path, *command: str) -> str:
    """Submit a script from a directory of its own; the job's number."""
    directory.mkdir(parents=True)
    for path in (script, PROGRAM):
        shutil.copy(path, directory)
    done = subprocess.run(
        [*command, "--parsable", "--output=out.%A_%a" if "array" in script.name else "--output=out", script.name],
        cwd=directory, env=dict(cluster.env), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def finished(cluster: Any, wait_until: Callable[..., None], jobs: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What slurmctld has of each script's job when all are over."""
    active = ["squeue", "--noheader", "--states=PD,CF,R,CG", f"--jobs={','.join(jobs.values())}"]
    wait_until(lambda: not cluster.run(*active), timeout_s=240, what="the end of the jobs")
    shown = parse_jobs(cluster.run("scontrol", "show", "job"))
    return {name: shown.get(f"{job_id}+0") or shown[job_id] for name, job_id in jobs.items()}


def ranks(directory: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """What each rank saw, by its arguments, number and array task."""
    found = {}
    for path in directory.glob("rank-*.json"):
        rank = json.loads(path.read_text())
        environ = {name: value for name, value in rank["environ"].items() if SEEN.match(name)}
        task = environ.get("SLURM_ARRAY_TASK_ID", "")
        found[(*rank["arguments"], f"rank {environ['SLURM_PROCID']}", f"task {task}")] = environ
    return found


def different(plain: Mapping[str, str], converted: Mapping[str, str]) -> Iterator[str]:
    """The variables that a rank sees otherwise; those that only a heterogeneous job has are no difference."""
    for name, value in plain.items():
        if name not in converted:
            yield f"{name}={value} is gone"
        elif value != converted[name] and not any(re.fullmatch(pattern, name) for pattern in MAY_DIFFER):
            yield f"{name}: {value} -> {converted[name]}"
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_NODELIST"):
        if plain.get(name, "").count(",") != converted.get(name, "").count(","):
            yield f"{name}: {plain.get(name)} -> {converted.get(name)}"


def test_scripts_end_converted_as_they_end_plain(devcluster: Any, wait_until: Callable[..., None]) -> None:
    assert len(SCRIPTS) >= 10
    place = devcluster.out_dir / "runs"
    plain = {path.stem: submit(devcluster, place / "plain" / path.stem, path, "sbatch") for path in SCRIPTS}
    before = finished(devcluster, wait_until, plain)
    converted = {}
    for path in SCRIPTS:
        number = "--data-workers=0-1" if "array" in path.stem else "--data-workers=1"
        command = (str(HETSTREAM), "sbatch", number, *OURS)
        converted[path.stem] = submit(devcluster, place / "converted" / path.stem, path, *command)
    after = finished(devcluster, wait_until, converted)
    problems: list[str] = []
    for name in plain:
        ends = [job[name]["JobState"] + " " + job[name]["ExitCode"] for job in (before, after)]
        seen, seen_converted = (ranks(place / how / name) for how in ("plain", "converted"))
        assert seen, f"{name} runs ranks"
        if ends[0] != ends[1] or seen.keys() != seen_converted.keys():
            said = "\n".join(path.read_text() for path in (place / "converted" / name).glob("out*"))
            problems.append(f"{name}: {ends[0]} -> {ends[1]}, {sorted(seen)} -> {sorted(seen_converted)}\n{said}")
        for rank in seen.keys() & seen_converted.keys():
            problems += [f"{name} {rank}: {text}" for text in different(seen[rank], seen_converted[rank])]
    assert problems == [], "\n".join(problems)
