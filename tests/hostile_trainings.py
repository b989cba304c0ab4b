"""Scenarios of `test_opened_by_name.py` for what a training opens by name: checkpoints, stores in shared memory, the
files of a job, and what is made where temporary files are."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity, stores_prefix
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import Generation
from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.job.ended_job import SUMMARY_FILE, load_own_summary, load_summary, write_summary
from hetstream.hetjob.job.job import CONTROLLER_STATE_FILE
from hetstream.hetjob.master.controller_state_file import ControllerStateFile
from hetstream.mpi_dataworkers.dispatcher.events import EVENTS_FILE, DispatcherStopped, EventLog, read_events
from hetstream.mpi_dataworkers.features import native
from hetstream.mpi_dataworkers.process.interpreter import announce, announced
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, read_address_file, write_address_file
from hetstream.slurm_plugin.cli import filter as cli_filter
from hetstream.slurm_plugin.submit import conversion as submit_conversion
from tests.base.users import VICTIM
from tests.checkpoint.parts import write_checkpoint
from tests.hostile_places import EVIL, Dirt, Place, Scenario, made

NOTE, ADDRESS = "program-python.json", "dispatcher.json"
CHECKPOINTER = "hetstream.checkpoint.flash.checkpointer"
# Of what the user has saved, and of what a stranger says that he has.
OWN, FORGED = Generation(1, 5), Generation(1, 666)
# /dev/shm is root's, with a sticky bit, and a store in a checkpoint directory lies where that one was looked at.
_WHERE_STORES_ARE = (Dirt.LINKED, Dirt.SQUATTED, Dirt.SHARED, Dirt.OPEN)


def _never_waits() -> None:
    """Where a pipe has come in the place of a file, nobody would ever write."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for a pipe")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(2)


# Checkpoints


def forged_checkpoints(path: Path, place: Place) -> None:
    """A newer step than all, and links of every name that is written or removed to what the user keeps elsewhere."""
    path.mkdir()
    write_checkpoint(path, FORGED)
    for name in ("latest", ".commit", ".lock", "owner.json", "history.jsonl", ".lineage.json"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(place.precious)
    for name in ("step-0000000007.1.deleted", "step-0000000008.1.partial"):
        (path / name).symlink_to(place.loot)


def own_checkpoints(path: Path) -> None:
    path.mkdir(mode=0o700)
    write_checkpoint(path, OWN)


def trains(path: Path) -> str:
    """As rank 0 does: become the owner, take the newest checkpoint, save the next one and remove the older."""
    directory = CheckpointDirectory(path)
    attempt = directory.acquire(JobIdentity.of_this_process("7"))
    restored = directory.newest()
    if restored is not None:
        directory.read(restored, 0).close()
    write_checkpoint(path, Generation(attempt, 10))
    directory.retain(Retention(keep_last=1))
    directory.release()
    return EVIL if restored == FORGED else f"restored {restored}"


def collects(path: Path) -> str:
    """`hetstream ckpt gc`, as far as files are concerned."""
    directory = CheckpointDirectory(path)
    directory.check_own()
    commit.complete(path)
    directory.retain(Retention(keep_last=1))
    return "done"


# Stores in shared memory


def _identity() -> StoreIdentity:
    return StoreIdentity("77", 0, 0, Path("/ckpt"))


STORE_NAME = _identity().prefix.replace(stores_prefix(), f"hetstream-ckpt-{VICTIM}-", 1) + "0badbad0"


def _save(store: Store, generation: Generation) -> None:
    with store.begin(4096, 16) as slot:
        slot.publish(generation, b"{}", "ab" * 16)


def left_store(path: Path, generation: Generation = OWN) -> None:
    """Of a trainer that was killed: a slot with a generation, and who had it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        store = Store.open(_identity(), 2, Path(folder))
        _save(store, generation)
        store.path.rename(path)


def forged_store(path: Path, _: Place) -> None:
    """Which all may read and write."""
    left_store(path, FORGED)
    for entry in (path, *path.iterdir()):
        entry.chmod(0o777)


def adopts(path: Path) -> str:
    """A trainer that is started again looks for what the one before has left, and saves."""
    store = Store.open(_identity(), 2, path.parent)
    held = [content.header.generation for content in store.held()]
    _save(store, Generation(2, 700))
    return EVIL if FORGED in held else f"holds {held}"


# The files of a job


def _environment(executable: str) -> str:
    return json.dumps({"executable": executable, "prefix": "/usr", "container": "", "variables": {}})


def forged_note(path: Path, place: Place) -> None:
    """Where the program's Python is, for data workers to start in."""
    made(place.evil / "python", place.script(), 0o755)
    made(path / NOTE, _environment(str(place.evil / "python")))


def follows(path: Path) -> str:
    found = announced(path / ADDRESS)
    return EVIL if found and found.executable.endswith("evil/python") else f"follows {found}"


def linked_note(path: Path, place: Place) -> None:
    path.mkdir()
    (path / NOTE).symlink_to(place.precious)


def announces(path: Path) -> str:
    """It is never an error, and nothing else is written."""
    announce(path / ADDRESS)
    return "done"


def forged_state(path: Path, _: Place) -> None:
    _write_state(path / CONTROLLER_STATE_FILE, EVIL)


def _write_state(path: Path, reason: str) -> None:
    path.parent.mkdir(exist_ok=True)
    file = ControllerStateFile(path)
    file.changes.append({"reason": reason})
    file.write(ControllerState())


def goes_on(path: Path) -> str:
    """A job master that is started again in the place of one that was killed."""
    file = ControllerStateFile(path / CONTROLLER_STATE_FILE)
    known = str([*file.changes])
    file.changes.append({"reason": "one more"})
    file.write(ControllerState())
    return known


def linked_events(path: Path, place: Place) -> None:
    """In the place of the file, of the older one, and of the record."""
    path.mkdir()
    for name in (EVENTS_FILE, f"{EVENTS_FILE}.1", SUMMARY_FILE):
        (path / name).symlink_to(place.precious)


def pipes(path: Path, _: Place) -> None:
    path.mkdir()
    for name in (EVENTS_FILE, f"{EVENTS_FILE}.1", SUMMARY_FILE, ADDRESS):
        os.mkfifo(path / name, 0o666)


def own_record(path: Path) -> None:
    path.mkdir(mode=0o700)
    made(path / EVENTS_FILE, '{"time": 1.0}\n', 0o600)
    write_summary(path, {"job": "7"})


def logs_events(path: Path) -> str:
    """Past the size at which the file becomes the older one."""
    log = EventLog(path, 10)
    for _ in range(2):
        log.report([DispatcherStopped()])
    log.close()
    write_summary(path, {"job": "7"})
    return "done"


def reads_record(path: Path) -> str:
    """As `hetstream job --events` and `hetstream job --logs` do, of whomever it is; it does not wait for a pipe."""
    _never_waits()
    return f"{len([*read_events(path / EVENTS_FILE)])} events of {load_summary(path)[0]}"


def forged_record(path: Path, _: Place) -> None:
    path.mkdir()
    write_summary(path, {"job": EVIL})
    (path / SUMMARY_FILE).chmod(0o666)


def learns(path: Path) -> str:
    """As advice from past jobs does."""
    return str(load_own_summary(path)[0])


def _write_address(path: Path, address: str) -> None:
    write_address_file(path / ADDRESS, ServiceAddress(address, "a", "b", "c", "d"))


def connects(path: Path) -> str:
    _never_waits()
    return read_address_file(path / ADDRESS).address


# What is made where temporary files are


def _open_directory(path: Path, _: Place) -> None:
    made(path / "x").parent.chmod(0o777)


def _replace(module: Any, **attributes: Any) -> None:
    vars(module).update(attributes)


def _made_at(path: Path, place: Path) -> str:
    """Whether what is made and then run is in the hands of others."""
    return EVIL if place.resolve().is_relative_to(path.parent) else str(place)


def _use_tmpdir(path: Path) -> None:
    tempfile.tempdir, os.environ["TMPDIR"] = None, str(path)


def compiles(path: Path) -> str:
    """As far as the compiler would be called."""
    _use_tmpdir(path)
    _replace(native, compiler=lambda: "/bin/true", _compiled=lambda _, made: made)
    return _made_at(path, Path(native.library() or ""))


def filters(path: Path) -> str:
    """The script of plain sbatch: where it is left for the shell that submits it."""
    _use_tmpdir(path)
    plan = types.SimpleNamespace(sbatch_options=())
    conversion = types.SimpleNamespace(notes=(), plan=plan, script=b"#!/bin/sh\n", words_to_unset=lambda: [])
    _replace(submit_conversion, convert_script=lambda *_: conversion)
    os.environ[cli_filter.NONCE] = "abc"
    said, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO())
    try:
        cli_filter.run(argparse.Namespace(words=["--data-workers=1", __file__, __file__]))
        sys.stdout.seek(0)
        (left,) = re.findall(r"rmdir -- (\S+)", sys.stdout.read())
    finally:
        sys.stdout = said
    found = _made_at(path, Path(left))
    shutil.rmtree(left, ignore_errors=True)
    return found


def resumes(path: Path) -> str:
    """With stand-ins for the packages: to fork a process that has loaded torch takes long."""
    _use_tmpdir(path)
    for name in ("torch", "accelerate", "accelerate.state", "accelerate.utils", "transformers", CHECKPOINTER):
        sys.modules[name] = MagicMock()
    loaded = types.SimpleNamespace(state=dict.fromkeys(("trainer", "model", "optimizer", "scheduler", "generators")))
    _replace(sys.modules["transformers"], TrainerCallback=object)
    _replace(sys.modules[CHECKPOINTER], FlashCheckpointer=lambda *_, **__: types.SimpleNamespace(load=lambda: loaded))
    from hetstream.checkpoint.integrations.huggingface import FlashCheckpointCallback

    callback = FlashCheckpointCallback("ckpt")
    return _made_at(path, Path(callback.resume_folder() or ""))


TRAININGS = {
    "checkpoint": Scenario(forged_checkpoints, trains, own_checkpoints),
    "checkpoint cleaning": Scenario(forged_checkpoints, collects, own_checkpoints),
    "store": Scenario(forged_store, adopts, left_store, name=STORE_NAME, dirts=_WHERE_STORES_ARE),
    "program's Python": Scenario(forged_note, follows, lambda path: made(path / NOTE, _environment("/usr/bin/python"))),
    "note of the program's Python": Scenario(linked_note, announces, Path.mkdir),
    "controller state": Scenario(forged_state, goes_on, lambda path: _write_state(path / CONTROLLER_STATE_FILE, "own")),
    "events": Scenario(linked_events, logs_events, own_record),
    "record": Scenario(pipes, reads_record, own_record),
    "past jobs": Scenario(forged_record, learns, own_record),
    "address file": Scenario(
        lambda path, _: _write_address(path, EVIL), connects, lambda path: _write_address(path, "tcp://h:1")
    ),
    "address file's pipe": Scenario(pipes, connects, lambda path: _write_address(path, "tcp://h:1")),
    "compiled features": Scenario(_open_directory, compiles, Path.mkdir, works=False),
    "script of plain sbatch": Scenario(_open_directory, filters, Path.mkdir, works=False),
    "resume folder": Scenario(_open_directory, resumes, Path.mkdir, works=False),
}
