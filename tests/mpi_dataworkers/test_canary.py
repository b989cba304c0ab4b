"""What data workers make is compared with what the program makes, in each run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import hooked
from torch.utils.data import DataLoader as TorchLoader

from hetstream import DataLoader as OwnLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.hook import environment

PROGRAMS = Path(__file__).parent / "programs"
# What torch's own workers may say of another iterator that they have inherited, whenever they collect garbage.
UNRAISABLE = re.compile(r"Exception ignored in: .*__del__ .*\n(?:.+\n)*?.*can only test a child process\n")


@pytest.mark.shows("the first steps of an unmodified program are compared with torch's; a difference keeps it local")
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param("unsent.py", [], id="what it has set up"),
        pytest.param("left.py", [], id="how it reads"),
        pytest.param("between_passes.py", [], id="what it changes between passes"),
        pytest.param("left.py", ["spawn"], id="how it starts processes", marks=pytest.mark.slow),
    ],
)
def test_a_program_gets_its_own_batches_whatever_it_has_set_up(
    program: str, arguments: list[str], three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = (PROGRAMS / program).read_text()
    plain = run_program(source, tmp_path, *arguments)
    assert (plain.returncode, UNRAISABLE.sub("", plain.stderr)) == (0, "")
    found = run_program(source, tmp_path, *arguments, **environment(three.name, {}))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr
    assert "Traceback" not in UNRAISABLE.sub("", found.stderr)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param("file", ["6", "30"], id="a file, and the loader is not known yet"),
        pytest.param("empty file", ["6", "90"], id="a file without a byte"),
        pytest.param("directory", ["6", "90"], id="a directory", marks=pytest.mark.slow),
        pytest.param("link", ["6", "90"], id="a link", marks=pytest.mark.slow),
    ],
)
def test_samples_that_make_something_outside_make_no_more_of_it_than_with_torch(
    kind: str, steps: list[str], three: Any, tmp_path: Path, run_program: Any
) -> None:
    """A pass that ends early leaves what torch's workers would have left, and the next one finds that."""
    source, found = (PROGRAMS / "making.py").read_text(), {}
    for name, variables in {"plain": {}, "hooked": environment(three.name, {})}.items():
        place = tmp_path / name
        place.mkdir()
        found[name] = run_program(source, place, kind, *steps, **variables)
        assert found[name].returncode == 0, found[name].stderr
    assert found["hooked"].stdout.splitlines() == found["plain"].stdout.splitlines(), found["hooked"].stderr
    assert "local" not in found["hooked"].stderr
    assert "write to files" in found["hooked"].stderr


SELDOM = """
import torch
from torch.utils.data import DataLoader

class Seldom(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        if index % 400 == 399:
            with open("bad.txt", "a") as bad:
                bad.write(f"{index} ")
        return index

for step, batch in enumerate(DataLoader(Seldom(), 4, num_workers=2)):
    if step == 420:
        break
print(step, open("bad.txt").read())
"""


def test_samples_that_write_seldom_are_made_no_further_ahead_than_with_torch(
    three: Any, tmp_path: Path, run_program: Any
) -> None:
    found = run_program(SELDOM, tmp_path, **environment(three.name, {}))
    # A step that goes to an idle data worker as the other one begins it is made twice.
    assert [*dict.fromkeys(found.stdout.split())] == ["420", "399", "799", "1199", "1599"], found.stderr
    assert "local" not in found.stderr


@pytest.mark.parametrize(
    ("num_workers", "begins"),
    [
        pytest.param(1, 0, id="one worker", marks=pytest.mark.slow),
        pytest.param(3, 0, id="three workers"),
        pytest.param(2, 1, id="from the second pass on"),
    ],
)
def test_samples_that_depend_on_those_before_them_are_torchs_own_though_nobody_sees_by_what(
    num_workers: int, begins: int, three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = (PROGRAMS / "unseen.py").read_text()
    plain = run_program(source, tmp_path, str(num_workers), str(begins))
    assert plain.returncode == 0, plain.stderr
    found = run_program(source, tmp_path, str(num_workers), str(begins), **environment(three.name, {}))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr


def test_what_a_program_changes_between_passes_shows_before_it_has_a_batch(
    three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = (PROGRAMS / "later.py").read_text()
    plain = run_program(source, tmp_path)
    assert plain.returncode == 0, plain.stderr
    found = run_program(source, tmp_path, **environment(three.name, {}))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert found.stderr.count("step 0 of data workers is not the program's own") == 3, found.stderr
    assert "Those of earlier passes may have been others, too" in found.stderr
    assert "Those from step 0 on" not in found.stderr, "it was not given"


def test_a_sample_that_is_another_one_the_second_time_keeps_its_loader_local(
    three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = (PROGRAMS / "repeated.py").read_text()
    plain = run_program(source, tmp_path)
    found = run_program(source, tmp_path, **environment(three.name, {}))
    assert (found.returncode, found.stdout) == (plain.returncode, plain.stdout) == (0, plain.stdout), found.stderr
    assert "over InPlace stays local: a sample is another one when its process makes it a second time" in found.stderr
    assert "over Stamped stays local" not in found.stderr, "what another process makes is another one, too"


def test_a_program_finds_its_own_objects_where_its_samples_note_their_ids(
    three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = (PROGRAMS / "noted_ids.py").read_text()
    plain = run_program(source, tmp_path)
    assert (plain.returncode, plain.stdout.count(" 12 True\n")) == (0, 12), plain.stdout + plain.stderr
    found = run_program(source, tmp_path, **environment(three.name, {}))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    # Of a hash or a text by address, and of a class's id. Those of objects are the program's.
    assert found.stderr.count("step 0 of data workers is not the program's own: batch[0][1]") == 3, found.stderr


class Sound:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index) + torch.rand(())


class Forgetful(Sound):
    """Its pickle is another one."""

    factor = 3

    def __getstate__(self) -> dict[str, Any]:
        return {"factor": 1}

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(index * self.factor)}


class Timed(Sound):
    """No process makes its samples twice."""

    def __getitem__(self, index: int) -> Any:
        return {"at": time.time_ns(), "x": index}


class Unfinished(Sound):
    """One of torch's own worker processes of this trainer ends of it."""

    def __init__(self) -> None:
        self.trainer = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if os.getppid() == self.trainer and multiprocessing.parent_process() is not None:
            os._exit(3)
        return index


def test_a_loader_whose_steps_cannot_be_compared_is_the_programs_own(
    three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked(three.name, monkeypatch):
        loader: Any = TorchLoader(Unfinished(), 2, num_workers=1)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):  # as without data workers
            list(loader)
        assert vars(loader)["_hetstream"].connection is None
    lines = [message for message in caplog.messages if "stays local" in message]
    assert len(lines) == 1
    said = "step 0 cannot be compared with the program's own: torch's own worker process ended with exit code 3"
    assert said in lines[0]


@pytest.mark.shows("`verify=` compares steps of hetstream's own loader, and raises")
def test_verify_of_our_own_loader_names_what_differs(three: Any) -> None:
    with OwnLoader(Forgetful(), batch_size=4, service=three.name, verify=True) as loader:
        steps = iter(loader)
        for _ in range(2):  # no other step comes in its place
            with pytest.raises(PipelineError, match="step 0 of data workers is not the program's own") as raised:
                next(steps)
        assert str(raised.value).endswith("batch['x'].flatten()[1]: 1 in place of 3 (3 of 4 elements differ)")
        assert loader.stats()["differing_steps"] == 1


@pytest.mark.shows("the first steps of an unmodified program are compared with torch's; a difference keeps it local")
@pytest.mark.parametrize(
    ("dataset", "said", "num_compared"),
    [
        (Timed(), "batch['at'][0] is another one each time that torch's own worker makes it", 2),
        (Unfinished(), "torch's own worker process ended with exit code 3", 0),
    ],
)
def test_what_cannot_be_compared_is_said_once_and_harms_nobody(
    dataset: Any, said: str, num_compared: int, three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with OwnLoader(dataset, batch_size=2, service=three.name, verify=True, collate_fn=as_they_are) as loader:
        assert [len(list(loader)) for _ in range(3)] == [6, 6, 6]
        assert loader.stats()["differing_steps"] == 0
        assert loader.stats()["compared_steps"] >= num_compared
    lines = [message for message in caplog.messages if "not all of a step can be compared" in message]
    assert len(lines) == 1
    assert said in lines[0]


def as_they_are(samples: list[Any]) -> Any:
    return samples if isinstance(samples[0], int) else {"at": [sample["at"] for sample in samples]}


@pytest.mark.shows("`verify=` compares steps of hetstream's own loader, and raises")
def test_verify_compares_some_steps_of_the_first_pass_and_up_to_two_of_each_later_one(three: Any) -> None:
    with OwnLoader(Sound(), batch_size=2, service=three.name, verify=True, shuffle=True) as loader:
        for pass_number in range(4):
            assert len([*loader]) == 6
            stats = loader.stats()
            streamed = stats["steps"] - stats["local_steps"]
            if streamed == 6 * (pass_number + 1):  # else the first were made here, and there was nothing to compare
                assert stats["differing_steps"] == 0
                assert 2 + pass_number <= stats["compared_steps"] <= 3 + 2 * pass_number


class Interrupting(Sound):
    """Somebody presses Ctrl-C while it is sent for the first time."""

    met = 0

    def __len__(self) -> int:  # asked before it is pickled
        Interrupting.met += 1
        if Interrupting.met == 1:
            raise KeyboardInterrupt
        return super().__len__()


def test_a_loader_that_was_interrupted_when_it_began_streams_when_it_begins_again(
    three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(three.name, monkeypatch):
        loader: Any = TorchLoader(Interrupting(), 4, num_workers=1)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        assert len(list(loader)) == 3
        assert vars(loader)["_hetstream"].connection is not None


@pytest.mark.parametrize("keywords", [{"sharing": "lossless"}, {"in_order": False}, {"gpu_stage": abs}])
def test_verify_is_refused_where_no_step_can_be_made_alone(keywords: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="verify with an IterableDataset"):
        OwnLoader(Sound(), batch_size=2, verify=True, **keywords)


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_pass_that_is_over_is_freed_by_reference_counts_alone(
    ends_early: bool, three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(three.name, monkeypatch):
        loader: Any = TorchLoader(Sound(), 2, num_workers=1)
        gc.disable()
        try:
            passing = iter(loader)
            source = passing._streamed._source
            held = [
                weakref.ref(each) for each in (passing, source, source._compared, source._compared._witness._answers)
            ]
            del source
            for batch in passing:
                held.append(weakref.ref(batch))
                if ends_early:
                    break
            del passing, batch
            assert [each() for each in held if each() is not None] == []
        finally:
            gc.enable()
