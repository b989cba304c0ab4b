"""Lightning and the Hugging Face Trainer, killed and begun again, end with an undisturbed run's weights; Horovod."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.flash.ranks import Alone, communicator
from hetstream.checkpoint.integrations.horovod import HorovodCommunicator
from tests.checkpoint.processes import PYTHON_PATH

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
# With what each program imports first of all.
MODULES = {"lightning": "lightning.pytorch", "huggingface": "transformers.trainer"}
FRAMEWORKS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not importlib.util.find_spec(module.partition(".")[0]), reason=f"{module} is not installed"
        ),
    )
    for name, module in MODULES.items()
]


class Framework:
    """Starts the training program of one framework.

    Attributes:
        said: what the last run said.
    """

    def __init__(self, starter: subprocess.Popen[str], directory: Path) -> None:
        self._starter = starter
        self._variables = {"TMPDIR": str(directory), "PYTHONPATH": PYTHON_PATH}
        self.said = directory / "said"

    def train(self, directory: Path, *arguments: str, code: int = 0) -> list[str]:
        """Run it to its end, with this exit code; what it came to: digest, step, batches."""
        assert self._starter.stdin
        assert self._starter.stdout
        question = [[str(directory), *arguments], str(self.said), self._variables]
        print(json.dumps(question), file=self._starter.stdin, flush=True)
        ended = self._starter.stdout.readline()
        said = self.said.read_text()
        assert ended == f"{code}\n", said
        return next((line.split()[1:] for line in said.splitlines() if line.startswith("RESULT")), [])


@pytest.fixture(scope="module")
def starter(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported a framework, which takes seconds; see `programs/starts.py`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    with subprocess.Popen(
        [sys.executable, PROGRAMS / "starts.py", PROGRAMS / f"train_{request.param}.py", MODULES[request.param]],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def framework(starter: subprocess.Popen[str], equal_priority: None, tmp_path: Path) -> Framework:
    return Framework(starter, tmp_path)


def left_in(path: Path) -> list[str]:
    """Temporary folders that a start has left."""
    return [one.name for one in path.iterdir() if one.name.startswith("hetstream-")]


@pytest.mark.shows("Lightning, the Hugging Face Trainer and Horovod, killed and begun again, end with the same weights")
@pytest.mark.parametrize("starter", FRAMEWORKS, indirect=True)
def test_a_killed_training_goes_on_as_if_nothing_had_happened(framework: Framework, tmp_path: Path) -> None:
    whole = framework.train(tmp_path / "undisturbed", "--interval", "7")
    assert os.readlink(tmp_path / "undisturbed" / "latest") == "step-0000000030.1", "the last step is saved, too"
    assert framework.train(tmp_path / "undisturbed", "--interval", "7") == whole[:2], "and nothing is left to do"
    # In the second of three epochs of ten steps.
    framework.train(tmp_path / "killed", "--die-after", "14", code=-signal.SIGKILL)
    framework.train(tmp_path / "killed", "--die-after", "16", code=-signal.SIGKILL)
    assert left_in(tmp_path) == [], "of the size of the state, each time"
    resumed = framework.train(tmp_path / "killed")
    assert resumed[:2] == whole[:2] == [whole[0], "30"]
    assert resumed[2:] == whole[2 + 16 :], "the batches that the killed runs had not had"


@pytest.mark.parametrize("starter", FRAMEWORKS, indirect=True)
def test_how_much_is_planned_is_told_in_batches_also_after_a_restart(framework: Framework, tmp_path: Path) -> None:
    """Three epochs of ten batches, of which two make an update."""

    def planned() -> list[str]:
        lines = framework.said.read_text().splitlines()
        return next(line for line in lines if line.startswith("PLANNED")).split()[1:]

    framework.train(tmp_path / "killed", "--accumulate", "2", "--die-after", "7", code=-signal.SIGKILL)
    framework.train(tmp_path / "killed", "--accumulate", "2")
    told = planned()
    assert told[-1] == "None", "it is over"
    assert told[-2] == "30/30"
    assert {one.rpartition("/")[2] for one in told[:-1]} == {"30"}
    done = [int(one.partition("/")[0]) for one in told[:-1]]
    assert done == sorted(done)
    assert done[0] >= 14, "what was done before counts"


@pytest.mark.slow
@pytest.mark.parametrize("starter", FRAMEWORKS, indirect=True)
def test_a_training_that_is_told_to_end_saves_and_ends(framework: Framework, tmp_path: Path) -> None:
    framework.train(tmp_path / "told", "--interval", "1000", "--die-after", "7", "--number", str(int(signal.SIGTERM)))
    assert os.readlink(tmp_path / "told" / "latest") == "step-0000000008.1", "the signal comes behind step 7's look"
    resumed = framework.train(tmp_path / "told")
    assert resumed[1] == "30"
    assert len(resumed) == 2 + 30 - 8
    assert left_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("starter", FRAMEWORKS[:1], indirect=True)
def test_lightning_with_a_loader_that_has_no_state_is_told_so(framework: Framework, tmp_path: Path) -> None:
    words = "the loader of the training data has no state_dict"
    framework.train(tmp_path / "stateful")
    assert words not in framework.said.read_text()
    framework.train(tmp_path / "plain", "--plain")
    assert words in framework.said.read_text()


@pytest.mark.parametrize("starter", FRAMEWORKS[:1], indirect=True)
def test_lightnings_scaler_data_module_and_hooks_are_kept(framework: Framework, tmp_path: Path) -> None:
    def parts() -> str:
        return next(line for line in framework.said.read_text().splitlines() if line.startswith("PARTS"))

    whole = framework.train(tmp_path / "undisturbed", "--parts", "--interval", "7")
    assert parts() == "PARTS 8.0 None None None"
    framework.train(tmp_path / "killed", "--parts", "--die-after", "14", code=-signal.SIGKILL)
    assert framework.train(tmp_path / "killed", "--parts")[:2] == whole[:2]
    assert parts() == "PARTS 1024.0 14 14 14", "of Lightning, the data module, the module and a callback"


@pytest.mark.parametrize("starter", FRAMEWORKS[:1], indirect=True)
def test_a_model_of_another_width_is_refused_with_the_shapes(framework: Framework, tmp_path: Path) -> None:
    framework.train(tmp_path / "ckpt", "--die-after", "14", code=-signal.SIGKILL)
    framework.train(tmp_path / "ckpt", "--width", "16", code=1)
    said = framework.said.read_text()
    assert re.search(r"size mismatch for layers\.0\.weight.*\[8, 4\].*\[16, 4\]", said)
    assert re.search(r"size mismatch for layers\.2\.weight.*\[1, 8\].*\[1, 16\]", said)
    resumed = framework.train(tmp_path / "ckpt")
    assert (resumed[1], len(resumed)) == ("30", 2 + 16), "nothing was lost"


@pytest.mark.parametrize("starter", FRAMEWORKS[:1], indirect=True)
def test_a_strategy_of_lightning_that_shards_is_refused(framework: Framework, tmp_path: Path) -> None:
    framework.train(tmp_path / "ckpt", "--sharded", code=1)
    assert "keeps models that every rank has, and ModelParallelStrategy shards them" in framework.said.read_text()


@pytest.mark.parametrize("starter", FRAMEWORKS[1:], indirect=True)
def test_a_trainer_of_hugging_face_that_shards_is_refused(framework: Framework, tmp_path: Path) -> None:
    for who in ("FSDP", "DEEPSPEED", "tensor parallelism"):
        framework.train(tmp_path / "ckpt", "--sharded", who, code=1)
        said = framework.said.read_text()
        assert said.count(f"keeps models that every rank has, and {who} shards them. Use data parallel training") == 1
        assert CheckpointDirectory(tmp_path / "ckpt").checkpoints() == []


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.shows("Lightning, the Hugging Face Trainer and Horovod, killed and begun again, end with the same weights")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "launcher", "options"), [("huggingface", TORCHRUN, []), ("lightning", [], ["--devices", "2"])]
)
def test_two_ranks_go_on_from_the_step_they_were_killed_at(
    framework: str, launcher: list[str], options: list[str], tmp_path: Path
) -> None:
    if not importlib.util.find_spec(MODULES[framework].partition(".")[0]):
        pytest.skip(f"{framework} is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    more = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": PYTHON_PATH}

    def train(name: str, *arguments: str) -> list[list[str]]:
        argv = [sys.executable, *launcher, PROGRAMS / f"train_{framework}.py", tmp_path / name, *options, *arguments]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=140, env=environment | more)
        assert (run.returncode == 0) == (not arguments), run.stdout + run.stderr
        return sorted(line.split()[1:] for line in run.stdout.splitlines() if line.startswith("RESULT"))

    whole = train("undisturbed")
    assert train("killed", "--die-after", "7") == []
    resumed = train("killed")
    assert [words[:2] for words in resumed] == [words[:2] for words in whole] == [[whole[0][0], "15"]] * 2
    # Each rank's batches behind step 7, or 6 if one was killed before the other had saved.
    num_made = 15 + 2 - len(resumed[0])
    assert num_made in (6, 7)
    assert sorted(words[2:] for words in resumed) == sorted(words[2 + num_made :] for words in whole)


@pytest.mark.shows("Lightning, the Hugging Face Trainer and Horovod, killed and begun again, end with the same weights")
@pytest.mark.slow
@pytest.mark.parametrize("who", [["0", "1"], ["1"]], ids=["both", "rank 1 alone"])
@pytest.mark.parametrize(
    ("framework", "launcher", "options"), [("huggingface", TORCHRUN, []), ("lightning", [], ["--devices", "2"])]
)
def test_two_ranks_that_are_told_to_end_save_the_same_last_step(
    framework: str, launcher: list[str], options: list[str], who: list[str], tmp_path: Path
) -> None:
    if not importlib.util.find_spec(MODULES[framework].partition(".")[0]):
        pytest.skip(f"{framework} is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    more = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": PYTHON_PATH}
    program = [*launcher, PROGRAMS / f"train_{framework}.py", tmp_path / "told", *options, "--epochs=20"]

    def train(*arguments: str) -> list[list[str]]:
        argv = [sys.executable, *program, *arguments]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=140, env=environment | more)
        assert run.returncode == 0, run.stdout + run.stderr
        return sorted(line.split()[1:] for line in run.stdout.splitlines() if line.startswith("RESULT"))

    told = ["--die-after", "7", "--number", str(int(signal.SIGTERM)), "--die-ranks", *who]
    train("--interval", "1000", *told)
    newest = CheckpointDirectory(tmp_path / "told").checkpoints()[0]
    assert 7 < newest.generation.step < 100, "the last step, and not the end of training"
    assert newest.world_size == 2
    resumed = train()
    assert [(words[1], len(words)) for words in resumed] == [("100", 2 + 100 - newest.generation.step)] * 2


class StandIn(ModuleType):
    """What the adapter asks of `horovod.torch`: this is rank 1 of 2, and rank 0 has sent `other`."""

    def __init__(self, other: bytes, *, is_initialized: bool = True) -> None:
        super().__init__("horovod.torch")
        self.is_initialized = lambda: is_initialized
        self.rank = lambda: 1
        self.size = lambda: 2
        self.other = other

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        other = torch.tensor([len(self.other)] if name.endswith("sizes") else list(self.other), dtype=tensor.dtype)
        return torch.cat([other, tensor])


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], None]:
    """Has a stand-in taken for Horovod, which the program has imported."""
    for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda hvd: monkeypatch.setitem(sys.modules, "horovod.torch", hvd)


@pytest.mark.parametrize("other", [b"", b"x", bytes(range(256))])
def test_ranks_of_horovod_exchange_bytes(horovod: Callable[[StandIn], None], other: bytes) -> None:
    horovod(StandIn(other))
    for ranks in (communicator(), HorovodCommunicator()):
        assert (ranks.rank, ranks.world_size) == (1, 2)
        assert ranks.all_gather(b"mine") == [other, b"mine"]


@pytest.mark.parametrize("name", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_horovod_comes_first(horovod: Callable[[StandIn], None], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    horovod(StandIn(b"", is_initialized=False))
    with pytest.raises(OptionsError, match=r"call hvd\.init\(\) first"):
        HorovodCommunicator()
    monkeypatch.setenv(name, "2")
    with pytest.raises(OptionsError, match=rf"{name}=2, and neither .* is initialised.* hvd\.init\(\)"):
        communicator()
    monkeypatch.setenv(name, "1")
    assert isinstance(communicator(), Alone)


def test_sizes_of_mpi_are_no_ranks_of_a_program_without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    for name in ("WORLD_SIZE", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")  # Slurm tells it to each task of any job
    assert isinstance(communicator(), Alone)


HOROVOD = """
import os
import signal
import sys

import horovod.torch as hvd
import torch

from hetstream import FlashCheckpointer

directory, die_after = sys.argv[1], int(sys.argv[2])
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
with FlashCheckpointer(directory, shared=("model", "optimizer"), interval=2) as checkpointer:
    checkpointer.guard(optimizer)
    state = {"model": model, "optimizer": optimizer, "rank": {"number": hvd.rank()}}
    start = step = checkpointer.restore(state) or 0
    while step < 10:
        batch = torch.randn(6, 4)  # another one on each rank
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        if checkpointer.should_save(step) or step == 10:
            checkpointer.save_async(step, state)
        if step == die_after:
            checkpointer.fence()
            os.kill(os.getpid(), signal.SIGKILL)
    weights = [value.double().sum().item() for value in model.parameters()]
print("RESULT", hvd.rank(), start, state["rank"]["number"], *weights)
"""


@pytest.mark.shows("Lightning, the Hugging Face Trainer and Horovod, killed and begun again, end with the same weights")
@pytest.mark.mpi
def test_two_ranks_of_horovod_go_on_as_if_nobody_had_been_killed(tmp_path: Path) -> None:
    venv = Path(os.environ.get("HETSTREAM_HOROVOD_VENV", ROOT / ".venv-horovod"))
    if not (venv / "bin" / "horovodrun").exists():
        pytest.skip(f"{venv} has no Horovod: .ci/install-horovod builds it")
    (tmp_path / "train.py").write_text(HOROVOD)
    launch = [venv / "bin" / "horovodrun", "--gloo", "-np", "2", "-H", "localhost:2", venv / "bin" / "python"]

    def train(name: str, die_after: int = -1) -> list[list[str]]:
        argv = [*launch, tmp_path / "train.py", tmp_path / name, str(die_after)]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=200)
        assert (run.returncode == 0) == (die_after < 0), run.stdout + run.stderr
        found = sorted(line[line.index("RESULT") :].split()[1:] for line in run.stdout.splitlines() if "RESULT" in line)
        return found

    whole = train("whole")
    assert [words[:3] for words in whole] == [["0", "0", "0"], ["1", "0", "1"]]
    assert train("killed", 7) == []
    resumed = train("killed")
    assert [words[:3] for words in resumed] == [["0", "6", "0"], ["1", "6", "1"]]
    assert [words[3:] for words in resumed] == [words[3:] for words in whole] == [whole[0][3:]] * 2
