"""Hidden partitions and those of whole nodes. cpu3 is in `hidden` alone; `hidden` and `whole` have both GPU nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import EXCLUSIVE, HIDDEN

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (HIDDEN, EXCLUSIVE)
SMALL = ("--mem=1000", "--time=60")


def test_whole_nodes_count_whole_and_hidden_jobs_count(site: Any) -> None:
    """By hand: the job in `whole` asks for 1 CPU and 1 GPU and has all 16 and 4 of gpu0. gpu1 has 4 and 2 in use, in
    `hidden`, and cpu3 all 16. Free: 12 + 3 * 16 = 60 CPUs and 2 GPUs.

    The pending job of `whole` can use nothing of gpu1, the pending one of `hidden` needs 16 CPUs: 2 GPUs and 12 CPUs
    are stranded. The same is true for a user to whom Slurm's commands do not show hidden partitions by themselves.
    """
    whole = site.submit("--partition=whole", "--gpus=1", "-c1", *SMALL)
    site.settle(**{whole: "RUNNING"})
    beside = site.submit("--partition=hidden", "--gpus=2", "-c4", *SMALL)
    only = site.submit("--partition=hidden", "-wcpu3", "-c16", *SMALL)
    site.settle(**{beside: "RUNNING", only: "RUNNING"})
    second_whole = site.submit("--partition=whole", "--gpus=1", "-c1", *SMALL)
    second = site.submit("--partition=hidden", "-wcpu3", "-c16", *SMALL)
    site.settle(**{second_whole: "PENDING Resources", second: "PENDING Resources"})

    for nobody in (False, True):
        names = ("cpus", "cpus_free", "gpus", "gpus_free", "stranded_gpus", "stranded_cpus")
        assert site.totals(*names, nobody=nobody) == [96, 60, 8, 2, 2, 12]
        assert site.blockers(second_whole, nobody=nobody) == [
            ("whole nodes", "it gets whole nodes (OverSubscribe=EXCLUSIVE), 1 of them: of 2 0 are idle")
        ]
        ((kind, text),) = site.blockers(second, nobody=nobody)
        assert (kind, text) == ("CPUs", "it needs 16 CPUs on a node; of 1 node with enough memory the most free is "
                                "0 (cpu3)")  # fmt: skip
        assert site.told("advise", nobody=nobody)["advice"] == []
        util = {one["partition"]: one for one in site.told("util", nobody=nobody)["groups"]}
        # GPUs and CPUs held in the same time: 4 with 16, 2 with 20 in two jobs of about the same age.
        assert util["whole"]["num_jobs"] == 1
        assert util["hidden"]["num_jobs"] == 2
        assert util["whole"]["gpu_hours"] > 0


def test_the_gpus_of_a_whole_node_are_in_the_utilisation(site: Any, wait_until: Any) -> None:
    """A job of `whole` that asked for 1 GPU and 1 CPU holds 4 and 16: a quarter. So did those that have ended."""
    job = site.submit("--partition=whole", "--gpus=1", "-c1", *SMALL)
    site.settle(**{job: "RUNNING"})

    def hours() -> tuple[float, float]:
        (one,) = (one for one in site.told("util", "-S", "now-1minute")["groups"] if one["partition"] == "whole")
        return one["gpu_hours"], one["cpu_hours"]

    # Four decimals of an hour are a third of a second of one CPU.
    wait_until(lambda: hours()[1] > 0.02, 60, "twenty CPU seconds on record")
    gpu_hours, cpu_hours = hours()
    assert gpu_hours / cpu_hours == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("nobody", [False, True])
def test_who_names_a_hidden_partition_is_converted(site: Any, tmp_path: Path, nobody: bool) -> None:
    """Both as trainers' and as data workers' place."""
    script = tmp_path / "train.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --partition=hidden --gpus=1 --cpus-per-task=8\n#HETSTREAM --data-workers=2\ntrue\n"
    )
    converted = site.told("convert", "--data-worker-partition=hidden", str(script), nobody=nobody)
    assert "--partition=hidden" in converted["components"][1]["options"]
    assert not converted["notes"]
    # sbatch would take it; a partition that is not there it refuses.
    (tmp_path / "converted.sbatch").write_text(converted["script"])
    site.run("sbatch", "--test-only", str(tmp_path / "converted.sbatch"))


def test_a_trainer_keeps_its_cpus_where_it_gets_whole_nodes(site: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gpus=1 -c8\n#HETSTREAM --data-workers=2\nsrun true\n")
    for partition, mem, why in (
        ("gpu", "1000", ""),
        ("whole", "1000", "xclusive"),
        ("gpu,whole", "1000", "xclusive"),
        ("gpu", "0", "--mem=0"),
    ):
        options = (f"--partition={partition}", f"--mem={mem}", "--data-worker-partition=cpu")
        told = site.told("convert", *options, str(script))
        assert ("--cpus-per-task=2" in told["components"][0]["options"]) is (not why)
        assert why.lower() in told["changes"][0]["why"].lower()


def test_an_ended_exclusive_job_has_its_gpus_in_the_utilisation(site: Any) -> None:
    """In a partition that gives parts of nodes, and without slurmdbd: 4 GPUs beside 16 CPUs, asked for or not."""
    job = site.submit("--partition=gpu", "--exclusive", *SMALL, command="sleep 4")
    site.settle(**{job: "COMPLETED"})
    told = site.told("util", "-S", "now-1minute")
    (one,) = (one for one in told["groups"] if one["partition"] == "gpu")
    assert one["gpu_hours"] == pytest.approx(one["cpu_hours"] / 4, abs=1e-4)
    assert one["gpu_hours"] > 0
    assert told["summary"]["num_gpus_unknown"] == 0
