"""`make bench-nnunet`: what becomes of a step of nnU-Net when data workers draw its batches?

A public profile (MIC-DKFZ/nnUNet#3063: one A100, 8 CPUs): the accelerator's part of a step is 131 ms, a step took
302 ms, one sample's transforms take a second of one CPU. The accelerator is emulated by a sleep here. Two parts:

* transforms are emulated, too, each sample a sleep of one second, so that this machine has 8, 16 and 24 CPUs;
* nnU-Net's own transforms on real cores: the trainer's, and others.

Runs in the environment of peers' tests, which has nnU-Net. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.clients.nnunet import BATCH_SIZE
from benchmarks.harness import Metric, Row, System, Target

HETSTREAM, PLAIN = "data workers", "batchgenerators, processes of the trainer's node"
LIMIT = "limit: max(accelerator, CPU time of a batch / CPUs)"
STEP_S = 0.131
EMULATED = {f"{cpus} CPUs, emulated": cpus for cpus in (8, 16, 24)}
ONE, BOTH = "transforms, 1 process", "transforms, 2 processes"
_PATCH = 128


def _cases(quick: bool) -> dict[str, dict[str, Any]]:
    first, second = machine.two_cores()
    everywhere = {"cores": [first, second], "worker_cores": [first, second]}
    shape = {"edge": 32 if quick else _PATCH, "sample_s": 0.1 if quick else 1.0, "data_workers": 0}
    cases: dict[str, dict[str, Any]] = {
        case: {**shape, **everywhere, "processes": cpus, HETSTREAM: {"data_workers": cpus}}
        for case, cpus in (list(EMULATED.items())[:1] if quick else EMULATED.items())
    }
    real = {"edge": _PATCH, "sample_s": 0, "data_workers": 0, "cores": [first]}
    # The trainer's node has one core. Data workers have the other one, or both.
    cases[ONE] = {**real, "worker_cores": [second], "processes": 1, HETSTREAM: {"data_workers": 1}}
    cases[BOTH] = {**real, "worker_cores": [first, second], "processes": 2, HETSTREAM: {"data_workers": 2}}
    return cases


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("nnU-Net's batches by data workers.", repeats=3)
    parser.add_argument("--part", choices=("emulated", "transforms"), help="one of the two parts (default: both)")
    args = parser.parse_args()
    missing = "" if importlib.util.find_spec("nnunetv2") else "nnU-Net is not installed: make .venv-peers-tests/.ready"
    client = (sys.executable, "-m", "benchmarks.clients.nnunet")
    systems = [
        System(HETSTREAM, (*client, HETSTREAM), missing),
        System(PLAIN, (*client, PLAIN), missing),
        System(LIMIT, (*client, LIMIT), missing, (ONE, BOTH)),
    ]
    cases = _cases(args.quick)
    for case in (ONE, BOTH):
        cases[case][LIMIT] = {"processes": 0, "data_workers": 0}
    if args.part:
        cases = {
            case: options for case, options in cases.items() if bool(options["sample_s"]) == (args.part == "emulated")
        }
    described = machine.describe(trainer=machine.two_cores()[:1], data_workers=machine.two_cores())
    results = harness.collect(
        harness.chosen(systems, args.systems),
        cases,
        {"step_s": STEP_S, "steps": 30 if args.quick else 100},
        1 if args.quick else args.repeats,
        1200.0,
        lambda _case, sample: f"{sample.get('step_ms', sample.get('batch_cpu_ms', 0)):.0f} ms",
    )
    _bounds(results, cases)
    metrics = (
        Metric("step_ms", "ms a step", tuple(cases)),
        Metric("wait_ms", "ms a step that the trainer waits", tuple(cases)),
        Metric("steps_per_min", "steps/min", tuple(cases)),
    )
    targets = [Target(case, HETSTREAM, LIMIT, "step_ms", at_most=1.05) for case in cases]
    targets += [Target(case, HETSTREAM, PLAIN, "step_ms") for case in cases]
    context = {
        "machine": described,
        "versions": machine.versions("torch", "nnunetv2", "batchgenerators", "batchgeneratorsv2"),
        "notes": [
            f"EMULATED: the accelerator is a sleep of {1e3 * STEP_S:.0f} ms in every row.",
            f"EMULATED in rows that say so: a sample's transforms are a sleep of one second; {BATCH_SIZE} samples of "
            f"{_PATCH}^3 voxels and their labels in four scales, 26 MB a batch, go the real way. Its peer has as many "
            "processes as there are CPUs, on a trainer's node that would have them; the profile's node had 8.",
            f"Transforms: nnU-Net's own for 3d_fullres, patches of {_PATCH}^3, on cores of this machine. The "
            "trainer's node has one core; data workers have the other one (1 process) or both (2 processes).",
            "Measured when data workers have taken over; before, their batches are compared with torch's own.",
        ],
    }
    rows: list[Row] = harness.rows_of(results, systems, metrics, targets)
    return harness.finish("nnunet", args.out, rows, results.failures, context)


def _bounds(results: harness.Results, cases: dict[str, dict[str, Any]]) -> None:
    """Turn what a batch costs into the limit of a step."""
    repeats = {repeat for _, _, repeat in results.samples}
    for case, options in cases.items():
        for repeat in repeats:
            measured = results.samples.get((case, LIMIT, repeat), {}).get("batch_cpu_ms")
            batch_ms = 1e3 * options["sample_s"] * BATCH_SIZE or measured
            if batch_ms is not None:
                cpus = options["processes"] if options["sample_s"] else len(options["worker_cores"])
                step_ms = max(1e3 * STEP_S, batch_ms / cpus)
                bound = {"step_ms": step_ms, "wait_ms": step_ms - 1e3 * STEP_S, "steps_per_min": 6e4 / step_ms}
                results.samples[case, LIMIT, repeat] = bound


if __name__ == "__main__":
    sys.exit(main())
