"""Data workers run the Python environment of the program, or say why not; a program is never worse off than alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hetstream.hetjob.job import job
from hetstream.mpi_dataworkers.dispatcher import tables
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import Instruction, Send
from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.hook import environment as hook_environment
from hetstream.mpi_dataworkers.process import interpreter
from hetstream.mpi_dataworkers.process.config import (
    container_from_environment,
    environment_of_python,
    environment_with_hash_seed,
    hash_seed,
    python_environment,
)
from hetstream.mpi_dataworkers.process.interpreter import (
    EnvironmentWatch,
    PythonEnvironment,
    announce,
    announced,
    this_interpreter,
)
from hetstream.mpi_dataworkers.process.programs import why_unfit
from hetstream.mpi_dataworkers.wire.messages import (
    GrantLease,
    Interpreter,
    LoaderHeartbeat,
    LoaderStats,
    Membership,
    Notice,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    RegisterLoader,
    RegisterWorker,
    SessionSpec,
    WorkerHeartbeat,
)
from tests.base.users import STRANGER, needs_root
from tests.environment import make_environment

HETSTREAM = Path(sys.executable).with_name("hetstream")
PROGRAMS = Path(__file__).parent / "programs"
OURS = Interpreter("/env/bin/python", "3.12.1", "2.13.0+cu126", "0.1.0")


# --- what fits, pure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"executable": "/other/bin/python"}, ""),
        ({"python": "3.12.9"}, ""),
        ({"torch": "2.13.0+cpu"}, ""),
        ({"torch": "", "hetstream": ""}, ""),
        ({"python": "3.11.2"}, "another Python"),
        ({"torch": "2.12.0"}, "another torch"),
        ({"python": "3.11.2", "hetstream": "0.2.0"}, "another Python and hetstream"),
    ],
)
def test_which_python_can_make_the_batches_of_which(changes: Mapping[str, str], reason: str) -> None:
    fields = {name: getattr(OURS, name) for name in OURS.__struct_fields__}
    assert why_unfit(Interpreter(**{**fields, **changes}), OURS) == reason


def test_versions_are_compared_at_registration() -> None:
    state = DispatcherState(1, 0.0)
    told: list[Instruction] = []

    def handle(peer: str, message: object, now: float) -> None:
        told.extend(state.handle(peer, message, now))  # type: ignore[arg-type]

    def sent(kind: type) -> list[object]:
        return [one.message for one in told if isinstance(one, Send) and isinstance(one.message, kind)]

    other = Interpreter("/usr/bin/python3", "3.11.2", "2.13.0", "0.1.0")
    handle("w0", RegisterWorker("cpu0", 7, "", [], slot="a", interpreter=other), 0.0)
    handle("loader", RegisterLoader("job", 0, 0, 1, "gpu0", 1, "d", {}, interpreter=OURS), 0.0)
    handle("loader", ProvidePipeline("d", Program("/", []), b"", b"blob"), 0.0)
    session = SessionSpec("s", "d", 0, 1, PlannedOrder(8, 1, 1, 0, False, False, 0), ["r"])
    handle("loader", OpenSession(session, 8, 0, [], 8, None), 0.1)
    assert not sent(GrantLease), "its pickles are for another Python"
    assert state.status(1.0).loaders[0].num_data_workers == 0
    for now in (1.0, 2.0, 3.0, 4.0, 5.5, 6.0):
        assert not sent(Notice) or now > tables.UNFIT_AFTER_S
        handle("w0", WorkerHeartbeat([]), now)
        handle("loader", LoaderHeartbeat(LoaderStats()), now)
        told.extend(state.tick(now))
    (notice,) = sent(Notice)
    assert isinstance(notice, Notice)
    assert "run another Python than this program" in notice.text
    assert "/usr/bin/python3, Python 3.11.2, torch 2.13.0, hetstream 0.1.0 on cpu0" in notice.text
    assert "/env/bin/python, Python 3.12.1, torch 2.13.0+cu126, hetstream 0.1.0 on gpu0" in notice.text
    assert any("/env/bin/python" in event.happened for event in state.tables.story)
    # The data worker has started anew in the program's Python.
    handle("w1", RegisterWorker("cpu0", 7, "", [], slot="b", interpreter=OURS), 6.1)
    assert sent(GrantLease)
    assert sent(Membership) == [Membership(1)]


# --- which environment a data worker takes --------------------------------------------------------------------------


def test_the_variables_that_make_an_environment() -> None:
    hook = "/opt/hetstream/lib/mpi_dataworkers/hook/path"
    environ = {
        "PATH": "/env/bin:/usr/bin", "VIRTUAL_ENV": "/env", "CONDA_PREFIX": "/conda", "LOADEDMODULES": "cuda/12",
        "PYTHONPATH": f"{hook}:/mine", "HOME": "/home/u", "SLURM_JOB_ID": "7", "LD_LIBRARY_PATH": "/cuda/lib",
    }  # fmt: skip
    found = python_environment(environ)
    assert found == {
        "PATH": "/env/bin:/usr/bin", "VIRTUAL_ENV": "/env", "CONDA_PREFIX": "/conda", "LOADEDMODULES": "cuda/12",
        "PYTHONPATH": "/mine", "LD_LIBRARY_PATH": "/cuda/lib", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    assert "PYTHONPATH" not in python_environment({"PYTHONPATH": hook})
    commands = str(Path(job.__file__).parents[1] / "commands")  # which a converted job puts before all others
    assert python_environment({"PATH": f"{commands}:/bin"}) == python_environment({"PATH": "/bin"})
    here = {"PATH": "/usr/bin", "CONDA_PREFIX": "/base", "PYTHONPATH": hook, "SLURM_JOB_ID": "8", "HOME": "/home/u"}
    became = environment_of_python({"PATH": "/env/bin", "VIRTUAL_ENV": "/env"}, here)
    assert became == {"PATH": "/env/bin", "VIRTUAL_ENV": "/env", "SLURM_JOB_ID": "8", "HOME": "/home/u"}
    assert container_from_environment({"APPTAINER_CONTAINER": "/i.sif"}) == "/i.sif"
    assert container_from_environment({}) == ""


@pytest.fixture
def address_file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "address"


def write(address_file: Path, one: PythonEnvironment) -> None:
    fields = {name: getattr(one, name) for name in ("executable", "prefix", "container", "variables", "host")}
    file = address_file.with_name("program-python.json")
    file.write_text(json.dumps(fields))
    file.chmod(0o600)


def test_a_program_announces_where_it_runs(address_file: Path) -> None:
    assert announced(address_file) is None
    announce(address_file)
    found = announced(address_file)
    assert found == PythonEnvironment.here()
    assert (found.executable, found.prefix) == (sys.executable, sys.prefix)
    written = address_file.with_name("program-python.json").stat()
    assert written.st_mode & 0o777 == 0o600
    announce(address_file)
    assert address_file.with_name("program-python.json").stat().st_ino == written.st_ino, "nothing new to say"
    assert EnvironmentWatch(address_file).target() is None, "this is the Python"


def test_of_several_ranks_the_first_announces(address_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    announce(address_file)
    assert announced(address_file) is None
    monkeypatch.setenv("RANK", "one")
    announce(address_file)  # the first loader says it
    assert announced(address_file) is None
    monkeypatch.setenv("RANK", "0")
    announce(address_file)
    assert announced(address_file) is not None


def test_nobody_is_followed_from_where_others_can_write(address_file: Path) -> None:
    address_file.parent.chmod(0o777)
    announce(address_file)
    assert not address_file.with_name("program-python.json").exists()
    write(address_file, replace(PythonEnvironment.here(), prefix="/theirs"))
    assert announced(address_file) is None
    address_file.parent.chmod(0o700)
    assert announced(address_file) is not None
    address_file.with_name("program-python.json").write_text("{}")
    assert announced(address_file) is None


@needs_root
def test_a_note_of_another_owner_is_not_followed(address_file: Path) -> None:
    write(address_file, replace(PythonEnvironment.here(), prefix="/theirs"))
    note = address_file.with_name("program-python.json")
    os.chown(note, STRANGER, STRANGER)
    assert announced(address_file) is None
    os.chown(note, 0, 0)
    assert announced(address_file) is not None


def test_a_data_worker_follows_once_and_only_where_it_can(address_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = PythonEnvironment.here()
    other = replace(here, prefix="/env", variables={"PATH": "/env/bin"}, host="gpu0")
    write(address_file, other)
    follower = EnvironmentWatch(address_file)
    assert follower.target() == other
    assert follower.wants_change()
    assert follower.chosen == other
    assert not follower.wants_change(), "once a second"
    assert EnvironmentWatch(address_file, other.digest).target() is None, "it was started in that one"

    write(address_file, replace(other, executable="/no/such/python"))
    assert EnvironmentWatch(address_file).target() is None
    assert "the program on gpu0 runs /no/such/python" in caplog.text
    assert "no such program on this host" in caplog.text
    caplog.clear()
    write(address_file, replace(other, container="/images/train.sif"))
    follower = EnvironmentWatch(address_file)
    assert follower.target() is None
    assert follower.target() is None
    assert caplog.text.count("it is in the container /images/train.sif") == 1
    assert "--data-worker-python='apptainer exec IMAGE python'" in caplog.text


def test_a_python_without_torch_waits_for_the_programs(address_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the site's has none, where plain sbatch converts."""
    monkeypatch.setattr(interpreter, "find_spec", lambda _: None)
    monkeypatch.setattr(interpreter, "LOOK_S", 0.01)
    other = replace(PythonEnvironment.here(), prefix="/env")
    for happens in (lambda: write(address_file, other), address_file.unlink):
        address_file.touch()
        address_file.with_name("program-python.json").unlink(missing_ok=True)
        follower = EnvironmentWatch(address_file)
        waiting = threading.Thread(target=follower.wait_for_torch)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        happens()
        waiting.join(10)
        assert not waiting.is_alive()
        assert (follower.target() == other) == address_file.exists()


def test_a_python_without_torch_does_not_wait_for_a_service_that_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda _: None)
    monkeypatch.setattr(interpreter, "LOOK_S", 0.01)
    monkeypatch.setattr(interpreter, "SERVICE_TIMEOUT_S", 0.05)
    with pytest.raises(ServiceUnavailable, match=r"address file .*address did not appear within 0\.05 s"):
        EnvironmentWatch(tmp_path / "address").wait_for_torch()


# --- with real processes --------------------------------------------------------------------------------------------


def run(directory: Path, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HETSTREAM), "run", "--data-workers", "1", "--json", "summary.json", "--", *words],
        cwd=directory, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_data_workers_run_the_environment_that_the_script_activates(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment")
    program = PROGRAMS / "train_in_environment.py"
    (tmp_path / "train.sh").write_text(f". {environment}/bin/activate\nexec python {program} out.json\n")
    done = run(tmp_path, "bash", "train.sh")
    assert done.returncode == 0, done.stderr
    place = json.loads((tmp_path / "out.json").read_text())
    assert place["prefix"] == str(environment)
    assert place["path"] == f"{environment}/bin", "programs that the dataset starts are the environment's too"


def test_under_the_hook_what_data_workers_cannot_import_is_made_in_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "needs_hook.py").write_text(
        "import os, torch\n"
        "if 'HETSTREAM_HOOK' not in os.environ:\n"
        "    raise ModuleNotFoundError(\"No module named 'compiled_for_gpu_nodes'\")\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, index): return torch.tensor(index)\n"
    )
    program = (PROGRAMS / "train_missing_module.py").read_text()
    (tmp_path / "train.py").write_text(program)
    done = run(tmp_path, sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, "sum 780\n"), done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "stays local: step 0 of data workers" in line]
    assert "the step: PipelineError: " in said
    assert "No module named 'compiled_for_gpu_nodes'" in said
    assert said.endswith(" in place of 4 samples")
    assert f"on {os.uname().nodename}, {sys.prefix}/bin/python" in said
    assert str(this_interpreter()).partition(", ")[2] in said, "the versions"
    assert "1 step compared with the program's own, 1 differed" in done.stderr
    (loader,) = json.loads((tmp_path / "summary.json").read_text())["loaders"]
    line = next(number for number, text in enumerate(program.splitlines(), 1) if text.startswith("for batch in"))
    assert loader["title"] == f"Numbers train.py:{line}", "where the program iterates, not where torch does"


HASHES = """
from torch.utils.data import DataLoader, Dataset

class Hashes(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return hash(f"word {index}")

loader = DataLoader(Hashes(), 4, collate_fn=list, num_workers=1)
print([batch for batch in loader] == [[Hashes()[index] for index in range(4)]])
"""


def test_hash_and_sets_of_text_are_alike_in_all_processes_that_make_samples(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HASHES)
    done = run(tmp_path, sys.executable, "train.py", environ={"PYTHONHASHSEED": ""})
    assert done.stdout == "True\n", done.stderr
    assert ", 0 steps made in the trainer" in done.stderr


@pytest.mark.parametrize(
    ("named", "of_data_workers", "of_the_program"),
    [(None, "0", "0"), ("", "0", "0"), ("random", "0", None), ("7", "7", None)],
)
def test_the_programs_hash_seed_is_that_of_data_workers(
    named: str | None, of_data_workers: str, of_the_program: str | None
) -> None:
    environ = {} if named is None else {"PYTHONHASHSEED": named}
    assert python_environment(environ)["PYTHONHASHSEED"] == hash_seed(environ) == of_data_workers
    assert hook_environment(None, environ).get("PYTHONHASHSEED") == of_the_program
    anew = environment_with_hash_seed(environ)
    assert anew == (None if named == "7" else {"PYTHONHASHSEED": "0"})
