"""Two scripts that run the same have the same digests, and others have not."""

from __future__ import annotations

import pytest

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.plan import HetPlan
from hetstream.hetjob.convert.render import WhatRuns, render, what_runs
from hetstream.hetjob.convert.spec import JobSpec
from hetstream.hetjob.ports import UNKNOWN_CLUSTER

SCRIPT = "#!/bin/bash\n#SBATCH --gpus=1\nmodule load cuda\nsrun python train.py --lr 0.1 --model resnet50 --seed=3\n"


@pytest.mark.parametrize(
    "same",
    [
        SCRIPT.replace("0.1", "3e-4").replace("=3", "=44"),
        SCRIPT.replace("--gpus=1", "--gpus=8 --time=3:00:00"),
        SCRIPT.replace("srun ", "# a word\n\n   srun   ").replace("python ", "python \\\n    "),
        SCRIPT.removesuffix("\n"),
    ],
)
def test_numbers_options_and_layout_do_not_count(same: str) -> None:
    assert what_runs(same) == what_runs(SCRIPT) != WhatRuns()


@pytest.mark.parametrize(
    ("other", "are_files_same"),
    [
        (SCRIPT.replace("resnet50", "resnet18"), True),
        (SCRIPT.replace("srun", "srun --mpi=pmix"), True),
        (SCRIPT.replace("train.py", "tiny_mnist.py"), False),
        (SCRIPT.replace("train.py", "/elsewhere/train.py"), True),
        (SCRIPT.replace("train.py", "-m lab.train"), False),
        (SCRIPT.replace("--seed=3", "--config=vit.yaml"), False),
    ],
)
def test_other_commands_are_told_apart_and_an_edit_names_the_same_files(other: str, are_files_same: bool) -> None:
    first, second = what_runs(SCRIPT), what_runs(other)
    assert first.commands != second.commands
    assert (first.files == second.files) == are_files_same


def test_a_converted_script_runs_what_its_original_runs() -> None:
    spec = JobSpec(data_workers_min=0, data_workers_max=4, data_worker_partition="cpu")
    plan: HetPlan = convert(spec, SCRIPT, "train.sbatch", cluster=UNKNOWN_CLUSTER)
    converted = render(SCRIPT, plan, ["/opt/hetstream"])
    assert "master start" in converted
    assert what_runs(converted) == what_runs(SCRIPT)


def test_any_text_has_digests() -> None:
    assert what_runs("") == what_runs("#!/bin/bash\n# nothing\n") == WhatRuns()
    assert what_runs("run \udce4.sh").commands
    assert what_runs("true").files == ""
