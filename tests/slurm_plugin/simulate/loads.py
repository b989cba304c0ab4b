"""Jobs that several tests of the simulator run."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hetstream.slurm_plugin.simulate.scenario import QueueOptions, WorkerOptions
from hetstream.slurm_plugin.simulate.workload import Workload, build

AT_ONCE = WorkerOptions(round_s=0.0, start_s=0.0, take_back_s=0.0)
NO_CYCLES = QueueOptions(interval_s=0.0)


def jobs(*rows: tuple[float, float, int], **columns: Sequence[float]) -> Workload:
    """Jobs of (submission, work, GPUs), one unit a GPU; CPUs are 1 for each unit unless given."""
    submit_s, work_s, units = zip(*rows, strict=True)
    names = [str(place) for place in range(len(rows))]
    return build(names, {"submit_s": submit_s, "work_s": work_s, "units": units, **columns})


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(1, 14))
    number = st.integers(0, 200)
    rows = [(float(draw(number)), float(draw(st.integers(1, 300))), draw(st.integers(1, 6))) for _ in range(size)]
    trainer = [float(draw(st.integers(1, 3))) for _ in rows]
    ideal = [own + draw(st.integers(0, 9)) for own in trainer]
    overhead = [draw(st.sampled_from([0.0, 0.1])) for _ in rows]
    return jobs(*rows, trainer_cpus=trainer, ideal_cpus=ideal, overhead=overhead)
