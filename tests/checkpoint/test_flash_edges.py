"""What programs, shells and hosts do to a checkpointer beside killing it: children, Ctrl-C, odd paths, broken disks."""

from __future__ import annotations

import errno
import linecache
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream import CheckpointOptions, FlashCheckpointer, LoadedCheckpoint
from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import environment_of_writer, job_and_component
from hetstream.checkpoint.disk import ownership, rank_file
from hetstream.checkpoint.errors import CheckpointError, DirectoryInUse, StateMismatch, UnsupportedState
from hetstream.checkpoint.flash.saving import Capture, Copier, Saving
from hetstream.checkpoint.flash.sources import MemorySource
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.tensors import copy_plan
from tests.checkpoint.processes import PYTHON_PATH

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": PYTHON_PATH}


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


# Children


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_children_that_outlive_a_killed_trainer_hold_nothing(make: Any, memory: Path, tmp_path: Path) -> None:
    program = """
        import os, signal, subprocess, sys, torch
        from pathlib import Path
        from hetstream import FlashCheckpointer
        from hetstream.checkpoint.flash.options import CheckpointOptions
        checkpointer = FlashCheckpointer(sys.argv[1], options=CheckpointOptions(shared_memory=Path(sys.argv[2])))
        checkpointer.save(1, {"w": torch.ones(3)})
        children = [subprocess.Popen(["sleep", "600"], close_fds=False).pid, os.fork()]
        if children[1] == 0:
            signal.pause()
        checkpointer.save(2, {"w": torch.ones(3)})
        print(*children, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "ckpt"), str(memory)]
    with subprocess.Popen(argv, env=ENVIRON, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        children = [int(word) for word in trainer.stdout.readline().split()]
        assert trainer.wait(60) == -signal.SIGKILL
    try:
        with make() as checkpointer:
            loaded = checkpointer.load()
            assert (loaded.step, loaded.sources) == (2, ("memory",))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.shows("no lock is freed by a process that does not own it")
def test_a_lock_that_is_given_up_is_free_though_a_child_has_a_copy(tmp_path: Path) -> None:
    lock = FileLock.try_exclusive(tmp_path / "lock")
    assert lock
    copy = os.dup(lock._descriptor)  # as a child has that was forked while it was taken
    lock.release()
    again = FileLock.try_exclusive(tmp_path / "lock")
    os.close(copy)
    assert again
    again.release()


def test_a_forked_child_is_told_that_it_has_no_checkpointer(make: Any) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        child = os.fork()
        if child == 0:
            num_refused = 0
            for act in (lambda: checkpointer.restore(state_of(0)), lambda: checkpointer.save(2, state_of(0))):
                try:
                    act()
                except OptionsError as error:
                    num_refused += "a forked child" in str(error)
            os._exit(num_refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert checkpointer.load().step == 1


@pytest.mark.shows("no lock is freed by a process that does not own it")
def test_who_looks_whether_a_writer_lives_keeps_none_from_becoming_it(make: Any, memory: Path) -> None:
    with make() as checkpointer:
        checkpointer.close()
    store = memory / "hetstream-ckpt-0-local-0-0-00000000-00000000"
    store.mkdir(mode=0o700)
    with StoreView(store) as view:
        FileLock.try_exclusive(view.files.writer_lock).release()  # type: ignore[union-attr]
        looking = FileLock.try_shared(view.files.writer_lock)
        assert looking
        timer = threading.Timer(0.02, looking.release)
        timer.start()
        view.become_writer()
        timer.join()
        (store / "writer.lock").unlink()
        store.rmdir()


# Interrupted at a bad moment


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """SIGINT raises; what is started in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_while_the_fence_is_waited_for_loses_no_save(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, copy = threading.Event(), Copier.copy

    def late(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(60)
        copy(*args)

    monkeypatch.setattr(Copier, "copy", late)
    with make() as checkpointer:
        model = torch.nn.Linear(3, 3)
        assert checkpointer.save_async(1, {"model": model})
        ring = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        ring.start()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.fence()
        ring.join()
        later = threading.Timer(0.2, go_on.set)
        later.start()
        assert checkpointer.save(2, {"model": model})
        later.join()
        assert checkpointer.stats().num_saves == 2


def test_an_error_at_any_part_of_a_save_leaves_the_next_one_possible(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError("mine")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1))
        with pytest.raises(ZeroDivisionError, match="mine"):
            checkpointer.save(2, {"broken": Broken()})
        for name in ("begin", "copy"):
            with monkeypatch.context() as patch:
                patch.setattr(Copier, name, interrupted)
                for save in (checkpointer.save, checkpointer.save_async):
                    with pytest.raises(KeyboardInterrupt):
                        save(2, state_of(2))
            assert checkpointer.load().step == 1
        assert checkpointer.save(3, state_of(3))


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_an_interrupt_at_any_line_of_a_save_leaves_no_torn_generation(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Raised at each line in turn, as Ctrl-C and handlers of signals raise; the next save is that of the exception's
    handler, of other values, and no thread of the save before may write into it."""
    monkeypatch.setattr(copy_plan, "_SHARED_BYTES", 1 << 10)
    monkeypatch.setattr(copy_plan, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(copy_plan, "_THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    traced = tuple(
        f"checkpoint/{name}.py"
        for name in ("flash/save/saving", "flash/save/device", "tensors/copying", "memory/store", "memory/segment")
    )
    num_elements = 1 << 14
    with Store.open(StoreIdentity("local", 0, 0, tmp_path), 3, memory) as store:
        saving = Saving(store, Capture((), 0, 1, CheckpointOptions()), check_async=False)
        for step in (1, 2, 3):
            assert saving.save(Generation(1, step), {"w": torch.zeros(num_elements)}, {})
        step, at = 4, 0
        is_over = False
        while not is_over:
            at += 1
            left = at

            def count(frame: Any, event: str, _: Any) -> Any:
                nonlocal left
                if not frame.f_code.co_filename.endswith(traced):
                    return None
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                # The tracer comes between a block and its __exit__, which no signal does.
                left -= event == "line" and not text.startswith("with ")
                if left == 0:
                    raise KeyboardInterrupt
                return count

            former = sys.gettrace()
            sys.settrace(count)
            try:
                getattr(saving, method)(Generation(1, step), {"w": torch.full((num_elements,), -1.0)}, {})
                is_over = left > 0
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(former)
            assert saving.save(Generation(1, step + 1), {"w": torch.full((num_elements,), float(step))}, {}), at
            newest = store.held()[0]
            assert newest.header.generation == (1, step + 1, 0), at
            with store.read(newest) as segment:
                assert struct.pack("<f", step) * num_elements in bytes(segment.payload), at
            step += 2
        assert at > 50
        saving.close()


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
def test_a_signal_after_the_end_goes_where_it_went_before(make: Any) -> None:
    seen: list[str] = []
    former = signal.signal(signal.SIGTERM, lambda *_: seen.append("the program's first"))
    try:
        with make() as checkpointer:
            assert not checkpointer.stopping
            ours = signal.getsignal(signal.SIGTERM)

            def chained(number: int, frame: Any) -> None:
                seen.append("a library's")
                ours(number, frame)  # type: ignore[operator, misc]

            signal.signal(signal.SIGTERM, chained)
            thread = threading.Thread(target=checkpointer.close)
            thread.start()
            thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["a library's", "the program's first"]
    finally:
        signal.signal(signal.SIGTERM, former)


class Pair:
    """Two ranks in two threads."""

    world_size = 2

    def __init__(self, rank: int, said: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._said = said
        self._barrier = barrier

    def all_gather(self, mine: bytes) -> list[bytes]:
        self._said[self.rank] = mine
        self._barrier.wait(60)
        every = [self._said[rank] for rank in range(2)]
        self._barrier.wait(60)
        return every


class Loader:
    """An object of the program's, which may refuse what it is given."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("this loader has another data set")


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_an_error_in_one_ranks_program_while_it_restores_reaches_the_others(make: Any) -> None:
    said: dict[int, bytes] = {}
    barrier = threading.Barrier(2)
    ended: dict[int, Exception | None] = {}

    def run(rank: int) -> None:
        try:
            with make(ranks=Pair(rank, said, barrier)) as checkpointer:
                checkpointer.save(1, {"loader": Loader()})
                checkpointer.restore({"loader": Loader(refuses=rank == 1)})
        except Exception as error:  # noqa: BLE001, looked at below
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert isinstance(ended[1], StateMismatch)
    assert isinstance(ended[1].__cause__, RuntimeError)
    assert isinstance(ended[0], CheckpointError)
    # This loader refuses also what it had before.
    what = "loader refused its state: this loader has another data set. loader may be half restored"
    assert [str(ended[rank]) for rank in (0, 1)] == [f"rank 1: {what}", what]


class Collective:
    """An object that meets the other rank when it is asked for its state, as sharded optimizers do."""

    def __init__(self, value: int, meeting: threading.Barrier) -> None:
        self.value = value
        self._meeting = meeting

    def state_dict(self) -> dict[str, Any]:
        self._meeting.wait(20)
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_a_rank_that_cannot_open_its_memory_leaves_no_other_waiting_in_a_collective_state_dict(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[int, bytes] = {}
    barrier, meeting = threading.Barrier(2), threading.Barrier(2)
    ended: dict[int, Any] = {}
    opened = MemorySource.open

    def fail_on_rank_1(source: MemorySource, *arguments: Any) -> Any:
        if threading.current_thread().name == "1":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(source, *arguments)

    def run(rank: int) -> None:
        try:
            with make(ranks=Pair(rank, said, barrier)) as checkpointer:
                item = Collective(7, meeting)
                checkpointer.save(1, {"item": item})
                assert checkpointer.wait(60)
                item.value = 0
                ended[rank] = checkpointer.restore({"item": item}), item.value
        except Exception as error:  # noqa: BLE001, looked at below
            ended[rank] = error

    monkeypatch.setattr(MemorySource, "open", fail_on_rank_1)
    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert ended == {0: (1, 7), 1: (1, 7)}, "both go on from disk"


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_a_step_that_is_saved_again_is_newer_everywhere_and_on_all_ranks(make: Any, memory: Path) -> None:
    said: dict[int, bytes] = {}
    barrier = threading.Barrier(2)
    found: dict[int, list[LoadedCheckpoint | None]] = {0: [], 1: []}

    def run(rank: int) -> None:
        ranks = Pair(rank, said, barrier)
        with make(ranks=ranks) as checkpointer:
            checkpointer.save(7, state_of(1))
            assert checkpointer.wait(60)
            checkpointer.save(7, state_of(2))
            assert checkpointer.stats().saved == Generation(1, 7, repeat=1)
            found[rank].append(checkpointer.load())
            checkpointer.close(keep_memory=True)
        barrier.wait()
        if rank == 1:
            for one in find_stores([memory]):
                if one.holder.rank == 1:
                    shutil.rmtree(one.path)
        barrier.wait()
        with make(ranks=ranks) as checkpointer:
            found[rank].append(checkpointer.load())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for rank in range(2):
        assert [(one.step, float(one.state["w"][0])) for one in found[rank] if one] == [(7, 2), (7, 2)]
    assert found[0][0] is not None
    assert found[0][1] is not None
    assert (found[0][0].sources, found[0][1].sources) == (("memory", "memory"), ("memory", "disk"))


# Disks and directories


def test_a_disk_that_is_full_at_the_end_ends_no_training(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        monkeypatch.setattr(ownership, "end", full)
    assert "the end of attempt 1 could not be written down: [Errno 28] No space left on device" in caplog.text
    with make() as checkpointer:
        assert checkpointer.load().step == 1


@pytest.mark.shows("a damaged or missing file: the checkpoint before is used, and a warning says why")
@pytest.mark.shows("a flipped bit is found, its tensors are named, and the checkpoint before is used")
@pytest.mark.parametrize("what", ["manifest", "shard"])
def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
            assert checkpointer.wait(60)
    path = tmp_path / "ckpt" / "step-0000000002.1"
    file = next(path.glob("rank-*.json" if what == "manifest" else "rank-*.safetensors"))
    if what == "manifest":
        file.unlink()
        file.symlink_to(file.name)
    else:
        read = os.pread

        def broken(descriptor: int, size: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, size, offset)

        monkeypatch.setattr(os, "pread", broken)
        monkeypatch.setattr(rank_file, "populate", lambda *_: False)  # as the kernel answers for such a disk
    with make() as checkpointer:
        assert checkpointer.load().step == 1
    words = "a link, which is not followed" if what == "manifest" else "Input/output error"
    assert words in caplog.text


def test_relative_paths_are_those_of_the_beginning(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = CheckpointOptions(shared_memory=Path(os.path.relpath(memory)), fallback=Path("fallback"))
    Path("fallback").mkdir()
    with FlashCheckpointer("ckpt", options=options) as checkpointer:
        monkeypatch.chdir(tmp_path / "there")
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        os.kill(checkpointer.stats().writer_pid, signal.SIGKILL)
        checkpointer._storage.writer.process.wait()  # type: ignore[union-attr]
        checkpointer.save(2, state_of(2))
        assert checkpointer.wait(60)
    assert (tmp_path / "here" / "ckpt" / "latest").readlink() == Path("step-0000000002.1")
    assert not list((tmp_path / "there").iterdir())


ODD_NAMES = [
    *(pytest.param(one, marks=pytest.mark.slow) for one in (b"two words", "Prüfpunkte-检查点".encode(), b"100%s{}")),
    *(b"a\nline", b"-rf", b"\xff\xfe no text", b"link"),
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_of_a_directory_will_do(tmp_path: Path, memory: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    if name == b"link":
        (tmp_path / "target").mkdir()
        path.symlink_to("target")
    with FlashCheckpointer(path, options=CheckpointOptions(shared_memory=memory)) as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        assert checkpointer.load().step == 1
    assert (path / "latest").readlink() == Path("step-0000000001.1")


@pytest.fixture
def no_umask() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


@pytest.mark.shows("jobs do not collide, and what others can read does not depend on the umask")
@pytest.mark.shows("jobs, components, ranks and directories have stores of their own, mode 0700")
@pytest.mark.usefixtures("no_umask")
def test_nothing_is_open_to_others_whatever_the_umask(make: Any, memory: Path, tmp_path: Path) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        for path in (tmp_path / "ckpt", memory):
            for found in (one for one in path.rglob("*") if not one.is_symlink()):
                inside_private = found.parent.name.startswith("hetstream-ckpt")
                assert inside_private or not stat.S_IMODE(found.stat().st_mode) & 0o077, found


def test_modules_in_the_programs_directory_do_not_hide_the_writers(tmp_path: Path, memory: Path) -> None:
    program = """
        import sys, torch
        from pathlib import Path
        from hetstream import FlashCheckpointer
        from hetstream.checkpoint.flash.options import CheckpointOptions
        with FlashCheckpointer("ckpt", options=CheckpointOptions(shared_memory=Path(sys.argv[1]))) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(3)})
            sys.exit(0 if checkpointer.wait(60) else 5)
    """
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text(textwrap.dedent(program))
    for name in ("checkpoint.py", "select.py", "msgspec.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    argv = [sys.executable, "program/train.py", str(memory)]
    assert subprocess.run(argv, cwd=tmp_path, env=ENVIRON, timeout=120).returncode == 0
    assert (tmp_path / "ckpt" / "latest").is_symlink()


# Jobs


@pytest.mark.shows("a restarted step adopts what the killed one held in memory; a requeued job resumes from disk")
def test_a_requeued_job_waits_for_the_lock_of_its_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ownership.Retention()
    earlier = ownership.JobIdentity("8123", "gpu01", 7)
    lock, attempt = ownership.take(tmp_path, earlier, keep, [], 0.0)
    assert attempt == 1
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_PATIENCE_S", 0.1)
        with pytest.raises(DirectoryInUse, match="job 8123 on gpu01"):
            ownership.take(tmp_path, ownership.JobIdentity("8123", "gpu02", 9), keep, [], 0.0)
    timer = threading.Timer(0.2, lock.release)
    timer.start()
    lock, attempt = ownership.take(tmp_path, ownership.JobIdentity("8123", "gpu02", 9), keep, [], 0.0)
    timer.join()
    lock.release()
    assert attempt == 2
    assert "is still locked by an earlier start of this job (job 8123 on gpu01, process 7)" in caplog.text


def test_odd_variables_of_slurm_and_paths() -> None:
    assert job_and_component({"SLURM_JOB_ID": "", "SLURM_HET_GROUP_ID": "x"}) == ("local", 0)
    assert job_and_component({"SLURM_JOB_ID": "7", "SLURM_HET_GROUP_ID": "²"}) == ("7", 0)
    step = {"SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_HET_GROUP_ID": "1"}
    assert job_and_component(step | {"SLURM_JOB_ID": "8"}) == ("7", 1)
    # What a heterogeneous job leaves in the environment of a job that is submitted from it.
    assert job_and_component(step | {"SLURM_JOB_ID": "9"}) == ("9", 0)
    paths = environment_of_writer({"PYTHONPATH": "src:/abs:"})["PYTHONPATH"].split(":")
    assert paths == [str(ROOT), os.path.abspath("src"), "/abs"]
    assert not find_stores([Path("/nowhere")])


# Lazy modules


def lazy_state(*more: torch.nn.Module) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), *more, torch.nn.Linear(4, 2))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(5, 3)).square().sum().backward()
    state["optimizer"].step()


@pytest.mark.shows("lazy modules without shapes are restored, and refused by `save`")
@pytest.mark.parametrize("more", [(), (torch.nn.LazyBatchNorm1d,)], ids=["", "buffers"])
def test_a_lazy_module_gets_its_shapes_and_values_when_it_is_restored(make: Any, more: Any) -> None:
    def fresh() -> dict[str, Any]:
        return lazy_state(*(module() for module in more))

    saved = fresh()
    with make(interval=1) as checkpointer:
        assert checkpointer.restore(saved) is None
        for save in (checkpointer.save, checkpointer.save_async):
            with pytest.raises(UnsupportedState, match=r"model\.0\.weight has no shape yet"):
                save(1, saved)
        train(saved)
        assert checkpointer.save(1, saved)
    restored = fresh()
    with make(interval=1) as checkpointer:
        assert checkpointer.restore(restored) == 1
        for state in (saved, restored):
            state["optimizer"].zero_grad()
            train(state)
        assert checkpointer.save(2, restored)
    expected, found = saved["model"].state_dict(), restored["model"].state_dict()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


class Refusing(torch.nn.Linear):
    """Refuses what it is given, as a module's own code may; some also what they had themselves."""

    def __init__(self, num_refusals: int) -> None:
        super().__init__(2, 2)
        self.num_refusals = num_refusals

    def load_state_dict(self, *given: Any, **how: Any) -> Any:
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            raise ValueError("not today")
        return super().load_state_dict(*given, **how)


@pytest.mark.shows("lazy modules without shapes are restored, and refused by `save`")
@pytest.mark.parametrize(("num_refusals", "result"), [(1, "Nothing was restored"), (2, "other may be half restored")])
def test_what_a_module_refuses_is_taken_back_from_a_lazy_one_before_it(
    make: Any, num_refusals: int, result: str
) -> None:
    saved, restored = lazy_state(torch.nn.LazyBatchNorm1d()), lazy_state(torch.nn.LazyBatchNorm1d())
    train(saved)
    with make() as checkpointer:
        assert checkpointer.save(1, {**saved, "other": torch.nn.Linear(2, 2)})
    bias = restored["model"][2].bias.clone()
    refusal = pytest.raises(StateMismatch, match=f"other refused its state: not today. {result}")
    with make() as checkpointer, refusal:
        checkpointer.restore({**restored, "other": Refusing(num_refusals)})
    assert torch.equal(restored["model"][2].bias, bias)
