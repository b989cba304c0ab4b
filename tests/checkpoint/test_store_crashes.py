"""Trainers that are killed at every point of a save, at any byte of the copy and at any time: what the next one finds.

Always: the newest generation that was published, whole, and nothing that is mixed of two.
"""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.errors import FAULTS, POINTS
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity, WriterStatus
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.programs.store_reader import newest_unpersisted
from tests.checkpoint.programs.store_trainer import check, save, size_at
from tests.checkpoint.test_store import ROOT, identity, running, shared_memory, start, steps

__all__ = ["identity", "shared_memory"]

SIZE = 2_000_000
# Where a trainer dies before its store is, or has been, what it should be.
AT_THE_START = ("store.created",)
AT_THE_END = ("store.closing", "store.closed", "store.removing")
IN_A_SAVE = tuple(point for point in POINTS if point.startswith("slot."))


def last_saved(lines: str) -> int:
    """The last step that the program said it had published; 0 without."""
    whole = lines[: lines.rfind("\n") + 1].splitlines()
    return int(whole[-1].split()[1]) if whole else 0


def resume(identity: StoreIdentity, shared_memory: Path) -> int:
    """What the next trainer finds: its newest step, when all that it holds is whole and it can go on."""
    with Store.open(identity, shared_memory=shared_memory) as store:
        held = steps(store)
        newest = held[0] if held else 0
        save(store, newest + 1, SIZE)
        assert steps(store)[0] == newest + 1
        store.close(keep=True)
    return newest


def clean(shared_memory: Path) -> None:
    for found in find_stores([shared_memory]):
        with StoreView(found.path) as view:
            assert view.remove()


# Every slot has been used when the fifth save begins.
@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
@pytest.mark.parametrize("count", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)), 5])
@pytest.mark.parametrize("point", IN_A_SAVE)
def test_killed_at_a_point_of_a_save(
    identity: StoreIdentity, shared_memory: Path, tmp_path: Path, point: str, count: int
) -> None:
    # A slot is made only by the first saves, or when it grows.
    grows = ["--grows", "--saves", 20] if point in ("slot.allocated", "slot.placed") else []
    environment = {"HETSTREAM_CKPT_FAULT": f"{point}:{count}:kill:{tmp_path}/marker"}
    with start(identity.directory, shared_memory, *grows, environment=environment) as process:
        lines, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert (tmp_path / "marker").exists()
    is_published = point in ("slot.complete", "slot.published")
    assert resume(identity, shared_memory) == last_saved(lines) + is_published
    clean(shared_memory)


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
@pytest.mark.parametrize("point", [*AT_THE_START, *AT_THE_END])
def test_killed_while_the_store_is_made_or_given_up(
    identity: StoreIdentity, shared_memory: Path, tmp_path: Path, point: str
) -> None:
    environment = {"HETSTREAM_CKPT_FAULT": f"{point}:1:kill:{tmp_path}/marker"}
    with start(identity.directory, shared_memory, environment=environment) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    # What was deleted in part is nobody's store any more, and gc can delete the rest.
    assert resume(identity, shared_memory) == (5 if point in ("store.closing", "store.closed") else 0)
    assert len(find_stores([shared_memory])) == (2 if point == "store.removing" else 1)
    clean(shared_memory)


def test_killed_while_it_adopts(identity: StoreIdentity, shared_memory: Path, tmp_path: Path) -> None:
    with running(identity.directory, shared_memory, "--waits") as process:
        assert process.stdout
        while not process.stdout.readline().startswith("saved 5"):
            pass
    environment = {"HETSTREAM_CKPT_FAULT": f"store.adopted:1:kill:{tmp_path}/marker"}
    with start(identity.directory, shared_memory, environment=environment) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert resume(identity, shared_memory) == 5
    clean(shared_memory)


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
@pytest.mark.shows("a trainer that dies during the copy leaves no checkpoint without data")
def test_killed_at_any_byte_of_the_copy(identity: StoreIdentity, shared_memory: Path) -> None:
    chance = random.Random(7)
    newest = 0
    for end in (0, 1, SIZE - 1, SIZE, *(chance.randrange(SIZE) for _ in range(8))):
        saves = chance.randrange(1, 5)
        words = ("--size", SIZE, "--saves", saves, "--die-in", saves - 1, "--die-at", end)
        with start(identity.directory, shared_memory, *words) as process:
            lines, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, errors
        assert last_saved(lines) == newest + saves - 1
        newest = last_saved(lines)
        with Store.open(identity, shared_memory=shared_memory) as store:
            assert steps(store)[:1] == ([newest] if newest else [])
            store.close(keep=True)
    clean(shared_memory)


def kill_at_random(identity: StoreIdentity, shared_memory: Path, kills: int, seed: int) -> None:
    """Trainers that save as fast as they can, killed at any time; with a reader that is killed too."""
    chance = random.Random(seed)
    newest = 0
    for _ in range(kills):
        words = ("--size", SIZE, "--saves", 1 << 20, *(["--grows"] if chance.random() < 0.5 else []))
        with running(identity.directory, shared_memory, *words) as process:
            assert process.stdout
            path = Path(process.stdout.readline().split()[2])
            reader = subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.programs.store_reader", str(path)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert reader.stdout
            assert reader.stdout.readline() == "reading\n"
            time.sleep(chance.uniform(0, 0.1))  # the moment of death is what is drawn here
            for victim in chance.sample((process, reader), 2):
                victim.kill()
            lines, errors = process.communicate(timeout=60)
            reader.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, errors
        # -9: killed while it read. A mixture would have ended it with 1.
        assert reader.returncode == -signal.SIGKILL
        said = last_saved(lines) or newest
        with Store.open(identity, shared_memory=shared_memory) as store:
            held = steps(store)
            # One that was published and not said yet.
            assert held[:1] in ([said], [said + 1]) or said == 0
            newest = held[0] if held else 0
            store.close(keep=True)
    clean(shared_memory)


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
def test_killed_at_any_time(identity: StoreIdentity, shared_memory: Path) -> None:
    kill_at_random(identity, shared_memory, 6, seed=1)


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_five_hundred_times(identity: StoreIdentity, shared_memory: Path) -> None:
    kill_at_random(identity, shared_memory, 500, seed=2)


@pytest.mark.shows("with three slots a save never waits; with two it waits and says how long")
def test_a_stopped_writer_keeps_its_generation_and_holds_up_no_save(
    identity: StoreIdentity, shared_memory: Path
) -> None:
    with Store.open(identity, shared_memory=shared_memory) as store:
        save(store, 1, SIZE)
        reader = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.programs.store_reader", str(store.path), "--stops"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout
        assert reader.stdout.readline() == "reading\n"
        os.waitpid(reader.pid, os.WUNTRACED)
        for step in range(2, 20):
            assert save(store, step, size_at(step, SIZE, grows=step % 2 == 0)) < 60
            assert steps(store)[0] == step
        reader.send_signal(signal.SIGCONT)
        assert reader.stdout.readline() == "read 1\n"
        reader.communicate(timeout=60)


def test_a_writer_takes_up_what_a_dead_trainer_held(identity: StoreIdentity, shared_memory: Path) -> None:
    with running(identity.directory, shared_memory, "--waits") as process:
        assert process.stdout
        while not process.stdout.readline().startswith("saved 5"):
            pass
        (found,) = find_stores([shared_memory])
        with StoreView(found.path) as view:
            assert view.trainer_alive()
    with StoreView(found.path) as view:
        assert not view.trainer_alive()
        assert not view.closed
        with newest_unpersisted(view) as segment:
            assert segment is not None
            assert check(segment) == 5
        view.report(WriterStatus(pid=os.getpid(), persisted=Generation(1, 5)))
        assert view.remove()


# --- faults ---------------------------------------------------------------------------------------------------------


def test_every_point_is_passed_somewhere_and_no_other() -> None:
    passed = set()
    for path in (ROOT / "checkpoint").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reach":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
                passed.add(node.args[0].value)
    # Those of the checkpoint writer are passed when there is one.
    assert passed | {point for point in POINTS if point.startswith("writer.")} == set(POINTS)


@pytest.mark.parametrize(
    "text", ["slot.begun", "slot.begun:0:kill:/x", "slot.begun:1:explode:/x", "nowhere:1:kill:/x", "slot.begun:1:kill:"]
)
def test_malformed_faults_are_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="HETSTREAM_CKPT_FAULT"):
        FAULTS.request(text)
