"""`make bench-cost`: what do data workers cost, and save? GoldMiner's table 3 and tf.data service's figures 8 and 9.

docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.harness import Row
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, Request, Scenario, WorkerOptions
from hetstream.slurm_plugin.simulate.traces import HEAVY
from hetstream.slurm_plugin.simulate.workload import build, parse

# GoldMiner: 8 GPUs in a machine of 64 CPUs, of which the trainers keep half; the price of it in machines of 64 CPUs
# alone. Model, such machines, and the paper's speedup and saving.
GPU_MACHINE_PRICE = 8.9
TABLE_3 = (("ResNet18", 1, 1.2, 0.09), ("DeepFM", 4, 12.1, 0.88))
# tf.data service, ResNet50: dollars an hour for a TPU v2-8 machine and an n2-standard-8; 16 workers and a dispatcher
# make it so much faster. The paper's saving, as cost before / cost after.
TPU_PRICE, CPU_PRICE, FIGURE_8_MACHINES, FIGURE_8_SPEEDUP, FIGURE_8_SAVING = 4.5, 0.08, 17, 2.57, 1.97
# The same, model M1: batches a second with so many workers, and the paper's figures; it does not tell its prices. Eight
# workers have as many CPUs as the trainers' own machines.
M1_COLOCATED, M1_IDEAL, M1_PER_WORKER = 0.55, 0.55 * 12.3, 0.3 / 8
FIGURE_9 = ((16, 0.64), (64, 2.3), (128, 4.77), (442, 6.47), (512, 0.55 * 12.3))
# Of M1's cost at its ideal speed, by the paper's two figures for 442 workers: 11.7 times as fast, 10.8 times cheaper.
M1_WORKERS_SHARE = 11.7 / 10.8 - 1
M1_SAVING_512 = 11.4
_WORK_S = 3600.0
_AT_ONCE = WorkerOptions(round_s=0.0, start_s=0.0, take_back_s=0.0)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("What data workers cost and save.", repeats=1).parse_args()
    rows: list[Row] = []
    for name, num_machines, speedup, saving in TABLE_3:
        case = f"GoldMiner's table 3, {name}, {num_machines} CPU machine(s)"
        model = next(model for model in HEAVY if model.name == name)
        alone = _speed(8, model.ideal_cpus, 4.0, model.overhead, "gpus=8,cpus=64", Request.HARDWARE)
        cluster = f"gpus=8,cpus=64;{num_machines}*cpus=64"
        faster = _speed(8, model.ideal_cpus, 4.0, model.overhead, cluster, Request.ELASTIC) / alone
        cost = (1 + num_machines / GPU_MACHINE_PRICE) / faster
        rows.append(Row(case, "hetstream / no data workers", faster, "x speed", note=f"paper {speedup}"))
        rows.append(Row(case, "cost saved", 100 * (1 - cost), "%", note=f"paper {100 * saving:.0f}"))
    price = (TPU_PRICE + FIGURE_8_MACHINES * CPU_PRICE) / TPU_PRICE
    case = "tf.data service's figure 8, ResNet50"
    rows.append(Row(case, "cost before / after", FIGURE_8_SPEEDUP / price, "x", note=f"paper {FIGURE_8_SAVING}"))
    for num_workers, batches in FIGURE_9:
        case = f"tf.data service's figure 9, M1, {num_workers} workers"
        demand = M1_IDEAL / M1_PER_WORKER
        speed = _speed(1, 1 + demand, 1.0, 0.0, f"gpus=1,cpus=1;{num_workers}*cpus=1", Request.ELASTIC)
        faster = speed * M1_IDEAL / M1_COLOCATED
        # Workers are charged for what they use, which is the same for each batch.
        cheaper = faster / (1 + M1_WORKERS_SHARE * speed)
        rows.append(Row(case, "workers / colocated", faster, "x speed", note=f"paper {batches / M1_COLOCATED:.2f}"))
        told = f"paper {M1_SAVING_512}" if num_workers == 512 else "paper 10.8, fitted" if num_workers == 442 else ""
        rows.append(Row(case, "cost before / after", cheaper, "x", note=told))
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("numpy"),
        "notes": [
            f"GoldMiner: a machine of 8 GPUs and 64 CPUs costs {GPU_MACHINE_PRICE} machines of 64 CPUs; CPUs per GPU "
            "as in docs/simulate.md; trainers keep 4 CPUs a GPU; without data workers all 64 CPUs make batches.",
            "The paper's DeepFM does not grow with the CPUs of one process, which this baseline does: it gains less "
            "here. Its ResNet18 gains less than CPUs say; the paper does not say why.",
            f"Figure 8: {TPU_PRICE} and {CPU_PRICE} dollars an hour; the speedup is the paper's. It does not tell the "
            "prices of M1 to M3: figure 9's is fitted at 442 workers, and its rate of one worker at 8.",
        ],
    }
    return harness.finish("cost", args.out, rows, {}, context, ("value", ""))


def _speed(
    units: int, ideal_cpus: float, trainer_cpus: float, overhead: float, cluster: str, request: Request
) -> float:
    """Of one job alone, as a share of its ideal speed."""
    load = build(
        ["job"],
        {
            "submit_s": [0.0],
            "work_s": [_WORK_S],
            "units": [units],
            "ideal_cpus": [ideal_cpus],
            "trainer_cpus": [trainer_cpus],
            "overhead": [overhead],
        },
    )
    policy = POLICIES["share"] if request is Request.ELASTIC else None
    hardware = parse(cluster)
    outcome = simulate(load, hardware, Scenario("job", request, Discipline.FIFO, policy, workers=_AT_ONCE))
    return _WORK_S / float(outcome.end_s[0] - outcome.start_s[0])


if __name__ == "__main__":
    sys.exit(main())
