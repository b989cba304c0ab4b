"""The checkpoint writer: the process that brings a trainer's generations from shared memory to disk, and outlives the
trainer.

    python -m hetstream.checkpoint.persist.writer --store /dev/shm/hetstream-ckpt-... --directory DIR   of one trainer
    hetstream internal writer --job                                                             of all trainers of a job
    here

What is done with one store is `store_writer.py`'s; here is the process: which stores it serves, what signals mean, and
when it ends. It never imports torch, and never holds a trainer up. When the trainer is gone the newest generation is
written and the process ends; the memory stays for a restart, unless the trainer closed its store.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.base.text import count_words
from hetstream.checkpoint.config import environment_of_writer
from hetstream.checkpoint.errors import StoreInUse, WriterError, reach
from hetstream.checkpoint.memory.store_files import SHARED_MEMORY, list_stores, stores_prefix
from hetstream.checkpoint.memory.view import StoreView
from hetstream.checkpoint.persist.store_writer import StoreWriter

_log = logging.getLogger(__name__)

# The least weight there is: a loop on one of two cores loses 1 to 4 %, one on both 8 to 18 % (28 % at niceness 10).
_NICENESS = 19
_AUTOGROUP = Path("/proc/self/autogroup")
# Sent to all processes of a step (sbatch --signal, scancel --signal), and meant for trainers.
_NOT_MEANT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Python takes a moment to start: a signal that comes meanwhile waits until the checkpoint writer can do what it means.
_BLOCKED_AT_START = (signal.SIGTERM, signal.SIGINT, *_NOT_MEANT)
# How often to see whether trainers live, and whether other ranks have written their parts.
_IDLE_S = 0.5
_WAITING_S, _WAITING_LIMIT_S = 0.1, 2.0


@dataclass(frozen=True)
class Options:
    """How a checkpoint writer behaves.

    Attributes:
        linger_s: how long to wait at the end for other ranks' parts while nobody writes one.
        stays: serve stores of dead trainers on, for the next ones; it is a job's checkpoint writer and ends by SIGTERM.
    """

    linger_s: float = 20.0
    stays: bool = False


class Writer:
    """Serves stores until there is nothing more to do.

    Args:
        find: the directories of the stores that there are now.
        directory: of the checkpoints; None: each store says its own.
        options: how.
        stop_reason: why trainers are to save once more and to end; "" as long as they are not.
        is_running: whether a job's signal was a warning only; asked after SIGTERM.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        directory: Path | None,
        options: Options,
        stop_reason: Callable[[], str] = str,
        is_running: Callable[[], bool] = bool,
    ) -> None:
        self._find = find
        self._directory = directory
        self._options = options
        self._stores: dict[Path, StoreWriter] = {}
        self._stop_reason = stop_reason
        self._is_running = is_running
        self._stopping = self._is_asked = False
        self._told_by = ""
        self._patience_s = _WAITING_S

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until all trainers are gone, or in a job's checkpoint writer until SIGTERM; then what is newest goes to
        disk.

        Args:
            on_ready: called once, when the stores that are there are served.

        Raises:
            StoreInUse: the only store has a checkpoint writer already.
        """
        handlers: dict[int, Callable[[int], None]] = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop}
        if self._options.stays:
            handlers[signal.SIGUSR1] = self._warn
        with _awake_by_signals(handlers) as signals:
            try:
                self._take_up()
                on_ready()
                reach("writer.ready")
                has_said = False
                while self._stores or self._options.stays:
                    if self._is_asked:
                        self._is_asked = False
                        self._stopping = self._stopping or not self._is_running()
                    if self._stopping and not has_said:
                        has_said = True
                        self._begin_to_end()
                    for store in list(self._stores.values()):
                        self._serve(store)
                    self._ask_to_stop()
                    if has_said:
                        for store in self._stores.values():
                            store.tell_waiting()
                    if has_said and not any(map(self._is_needed, self._stores.values())):
                        for store in list(self._stores.values()):
                            self._drop(store)
                        if not self._stores:
                            break
                    self._wait(signals)
                    if self._options.stays and not self._stopping:
                        self._take_up()
            finally:
                for store in self._stores.values():
                    store.tell_missing()
                    store.let_go()
                    store.view.close()

    def _stop(self, number: int) -> None:
        # In a signal handler: nothing that could be under way just now, such as logging.
        self._told_by = self._told_by or signal.Signals(number).name
        self._is_asked = True

    def _warn(self, number: int) -> None:
        # In a signal handler, too.
        self._told_by = self._told_by or signal.Signals(number).name

    def _ask_to_stop(self) -> None:
        """Ask trainers to save once more and to end, those too that have come since.

        Slurm's signals reach a job's checkpoint writer, which is a task of its own. Below a wrapper, or with
        proctrack/cgroup, they may not reach trainers.
        """
        told_by = self._told_by if self._options.stays else ""
        reason = self._stop_reason() or (f"{told_by} came to the job's checkpoint writer" if told_by else "")
        if not reason:
            return
        for store in self._stores.values():
            if store.view.trainer_alive() and not store.view.files.stop_reason():
                _log.info("%s: the trainer is asked to stop: %s", store, reason)
                with contextlib.suppress(OSError):  # the store's memory is full
                    store.view.ask_to_stop(reason)

    def _begin_to_end(self) -> None:
        if self._options.stays:
            self._take_up()  # a trainer may have come since the last look, and Slurm ends it too
        _log.info(
            "told to end: what is newest in the memory of %s goes to disk first",
            count_words(len(self._stores), "store"),
        )
        for store in self._stores.values():
            store.hurry()

    def _take_up(self) -> None:
        """Become the checkpoint writer of stores that have come."""
        for path in self._find():
            if path in self._stores:
                continue
            try:
                self._take(path)
            except (OSError, HetstreamError) as error:
                if not self._options.stays:
                    raise
                _log.debug("%s is not served: %s", path, error)

    def _take(self, path: Path) -> None:
        view = StoreView(path)
        try:
            view.become_writer()
            directory = self._directory or Path(view.holder.directory)
            if not directory.is_absolute():
                raise WriterError(f"{path} does not say what its checkpoint directory is: --directory")
            view.fileno()
            self._stores[path] = StoreWriter(view, directory, lambda: self._stopping or self._is_asked)
        except BaseException:
            view.close()
            raise
        _log.info("%s: checkpoint writer of %s", self._stores[path], path)

    def _serve(self, store: StoreWriter) -> None:
        """Write what there is to write; let go of the store if there is nothing more to come."""
        view = store.view
        if not view.path.exists():
            # Somebody has deleted it; a trainer that lives makes another.
            self._drop(store)
            return
        view.drain()
        ended = view.closed or not view.trainer_alive()
        if not ended and not self._stopping:
            store.since_s = time.monotonic()
        store.replicas.advance()
        while store.advance(last_chance=ended or self._stopping):
            pass
        if len(self._stores) > 1:
            # With all of them mapped it would be the largest process, which the kernel ends when memory runs out.
            store.unmap()
        if not ended or self._is_unfinished(store):
            return
        is_over = view.closed or (self._stopping and self._options.stays)
        if is_over and store.unsaved() is None:
            store.let_go()
            # Who only looks at its lock may be in the way for a moment: then again.
            if view.remove() or not view.path.exists():
                self._drop(store)
        elif not self._options.stays:
            self._drop(store)

    def _is_unfinished(self, store: StoreWriter) -> bool:
        """Whether there is still something to write, or to wait for."""
        return store.unsaved() is not None and not store.is_hopeless(self._options.linger_s)

    def _is_needed(self, store: StoreWriter) -> bool:
        """Whether a checkpoint writer that was told to end has still something to do.

        Who ends a job's checkpoint writer ends its trainers, and a trainer that is told to end saves once more; then
        its memory is freed, if all is on disk.
        """
        if self._is_unfinished(store):
            return True
        is_over = self._options.stays or store.view.closed
        return is_over and (store.view.trainer_alive() or store.unsaved() is None)

    def _drop(self, store: StoreWriter) -> None:
        """End as a store's writer, unless a trainer relies on this one: a new one, or one that has just saved."""
        reach("ending.looked")
        store.let_go()
        store.view.close()
        # From here on a trainer sees that it has no checkpoint writer. What came before that has to be seen here.
        is_relied_on = store.has_more() or (not self._stopping and store.view.trainer_alive())
        if store.view.path.exists() and is_relied_on:
            with contextlib.suppress(StoreInUse, OSError):
                store.view.become_writer()
                return
        store.tell_missing()
        del self._stores[store.view.path]

    def _wait(self, signals: int) -> None:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        for store in self._stores.values():
            poll.register(store.view.fileno(), select.POLLIN)
        if not any(store.is_waiting for store in self._stores.values()):
            self._patience_s = _WAITING_S
            poll.poll(1000 * _IDLE_S)
        elif poll.poll(1000 * self._patience_s):
            self._patience_s = _WAITING_S
        else:
            # Every look lists a directory that many ranks share; the last to come commits for all of them.
            self._patience_s = min(_WAITING_LIMIT_S, 1.5 * self._patience_s)
        with contextlib.suppress(BlockingIOError):
            os.read(signals, 4096)


@contextlib.contextmanager
def _awake_by_signals(handlers: Mapping[int, Callable[[int], None]]) -> Iterator[int]:
    """Call the handlers of signals, also of those that came while they were blocked; yields a descriptor that is
    readable then."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    former = {number: signal.signal(number, lambda number, _: handlers[number](number)) for number in handlers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_AT_START)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def serve_job(
    job: str,
    on_ready: Callable[[], None] = lambda: None,
    roots: Sequence[Path] = (SHARED_MEMORY,),
    stop_reason: Callable[[], str] = str,
    is_running: Callable[[], bool] = bool,
) -> None:
    """Serve all stores of a job on this host, until SIGTERM. For a job step of its own.

    At SIGTERM, at SIGUSR1, and when `stop_reason` says so, trainers are asked to save once more and to end. After
    SIGTERM it ends when no trainer lives and what is newest is on disk; the end of a step gives `KillWait` for that.

    Args:
        job: Slurm's id; the leader's in a heterogeneous job.
        on_ready: called once, when it serves.
        roots: where stores are.
        stop_reason: why trainers are to stop; "" as long as they are not. Asked again and again.
        is_running: whether SIGTERM was only a warning, because the job goes on.
    """
    _be_modest(0, has_session=True)
    prefix = f"{stores_prefix()}{job}-"

    def find() -> list[Path]:
        files = [store for root in roots for store in list_stores(root, prefix)]
        return [store.path for store in files if not store.path.name.startswith(".")]

    Writer(find, None, Options(stays=True), stop_reason, is_running).run(on_ready)


def spawn_writer(store: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Start the checkpoint writer of a store, in a session of its own: neither Ctrl-C nor the trainer's death ends it.

    It leaves at once if the store has a checkpoint writer. What went wrong it logs to this process's stderr.

    Args:
        store: the store's directory.
        directory: of the checkpoints.

    Raises:
        WriterError: it cannot be started.
    """
    argv = [
        sys.executable,
        "-m",
        "hetstream.checkpoint.persist.writer",
        f"--store={store}",
        f"--directory={directory}",
        "--quiet",
    ]
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_AT_START)  # which the checkpoint writer inherits
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Python looks for modules there first: the program's directory may hold a checkpoint.py or a select.py.
            cwd="/",
            env=environment_of_writer(),
            start_new_session=True,
        )
    except OSError as error:
        raise WriterError(f"the checkpoint writer cannot be started: {error}; argv={argv}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one store."""
    parser = argparse.ArgumentParser(
        prog="python -m hetstream.checkpoint.persist.writer", description="Bring generations to disk."
    )
    parser.add_argument("--store", type=Path, required=True, help="the store's directory")
    parser.add_argument("--directory", type=Path, required=True, help="of the checkpoints")
    parser.add_argument(
        "--linger", type=float, default=Options.linger_s, metavar="S", help="for other ranks, at the end"
    )
    parser.add_argument("--quiet", action="store_true", help="log only what went wrong")
    args = parser.parse_args(argv)
    level = logging.WARNING if args.quiet else logging.INFO
    logging.basicConfig(format="%(asctime)s hetstream checkpoint writer: %(message)s", level=level)
    try:
        _be_modest(StoreView(args.store).holder.rank, has_session=os.getsid(0) == os.getpid())
        Writer(lambda: [args.store], args.directory.absolute(), Options(args.linger)).run()
    except StoreInUse as error:
        _log.info("%s", error)
        return 0
    except (OSError, HetstreamError) as error:
        if not args.store.exists():
            return 0  # its trainer has ended meanwhile, with nothing left to write
        _log.error("%s", error)
        return 1
    return 0


def _be_modest(number: int, *, has_session: bool) -> None:
    """Give way to trainers: low priority, and one core, another for each rank. Stay when signals for them come.

    Args:
        number: which core.
        has_session: nobody else is in this process's session. Elsewhere all of it, such as a shell, would give way.
    """
    for signum in _NOT_MEANT:
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICENESS)
    # Linux may share cores among sessions before it does among their processes.
    if has_session:
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(str(_NICENESS))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1 - number % len(cores)]})


if __name__ == "__main__":
    sys.exit(main())
