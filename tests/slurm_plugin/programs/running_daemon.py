"""A site daemon as a process of its own, for tests that ask it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from recorded import Recorded, job

from hetstream.hetjob.site.client import SiteSettings, TcpAddress, UnixAddress, ask, parse_address
from hetstream.hetjob.site.messages import (
    LENGTH,
    Answer,
    AskStatus,
    JobStatus,
    Question,
    ShowStatus,
    encode_request,
    new_request,
)
from hetstream.slurm_plugin.daemon.store import remembered_jobs

AS_USER = Path(__file__).with_name("as_user.py")
# Who asks is told by the socket, so the question of another user needs a process that has become him.
_ASK_AS_STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(54322); os.setuid(54322)
one = socket.socket(socket.AF_UNIX)
one.settimeout(30)
one.connect(sys.argv[1])
one.sendall(bytes.fromhex(sys.argv[2]))
data = b""
while part := one.recv(65536):
    data += part
sys.stdout.buffer.write(data[int(sys.argv[3]):])
"""
WaitUntil = Callable[..., None]


@dataclass
class RunningDaemon:
    """A daemon process and its log.

    Attributes:
        directory: its state and its log.
        address: where it is told to listen.
        env: its environment.
        words: more of its command line.
        uid: whom it runs as.
    """

    directory: Path
    address: str
    env: Mapping[str, str]
    words: Sequence[str] = ()
    uid: int = os.geteuid()
    munge_socket: Path | None = None
    settings: SiteSettings | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def start(self, wait_until: WaitUntil, **environ: str) -> None:
        argv = [
            sys.executable,
            str(AS_USER),
            str(self.uid),
            "site",
            "daemon",
            "--state-dir",
            str(self.directory / "state"),
        ]
        argv += ["--address", self.address, "--interval", "5", *self.words]
        env = {**self.env, **environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        before = self.log.count("listening at")
        with (self.directory / "log").open("a") as log:
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(lambda: self.log.count("listening at") > before or self.has_ended(), 60)
        assert self.log.count("listening at") > before, self.log
        address = parse_address(re.findall(r"listening at (\S+)", self.log)[-1])
        self.settings = SiteSettings(address, self.munge_socket)

    @property
    def where(self) -> UnixAddress | TcpAddress:
        assert self.settings
        assert self.settings.address
        return self.settings.address

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def has_ended(self) -> bool:
        assert self.process
        return self.process.poll() is not None

    def wishes_on_disk(self) -> dict[str, int]:
        """What each job wants, as the next life of the daemon will know it."""
        return {job.job: job.report.wanted for job in remembered_jobs(self.directory / "state")}

    def ask(self, question: Question) -> Answer:
        assert self.settings
        return ask(self.settings, question, 30)

    def status(self) -> ShowStatus:
        status = self.ask(AskStatus())
        assert isinstance(status, ShowStatus)
        return status

    def jobs(self) -> dict[str, JobStatus]:
        return {job.job: job for job in self.status().jobs}

    def wait_for_reading(self, wait_until: WaitUntil, after: int = 0) -> None:
        wait_until(lambda: self.status().num_readings > after, 60, f"reading {after + 1}")

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait(60)

    def end(self) -> int:
        """As systemd ends it."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def answer_to_stranger(path: Path, question: Question) -> bytes:
    """The text of the answer that a user gets who has no rights; only root can ask for him."""
    text = encode_request(new_request(question, time.time_ns()))
    argv = [sys.executable, "-c", _ASK_AS_STRANGER, str(path), (LENGTH.pack(len(text)) + text).hex()]
    argv.append(str(LENGTH.size + hashlib.sha256().digest_size))
    return subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout


@pytest.fixture
def slurm(tmp_path: Path) -> Recorded:
    """A Slurm of texts: root's jobs 1 and 2 with 4 GPUs and 1 GPU run, and alice's job 3."""
    directory = tmp_path / "bin"
    directory.mkdir()
    slurm = Recorded(directory)
    jobs = [("1", "root", "gres:gpu:4"), ("2", "root", "gres:gpu:1"), ("3", "alice", "gres:gpu:1")]
    slurm.write(
        "queue",
        "".join(job(name, "RUNNING", UserName=user, **{"tres-per-node": gres}) for name, user, gres in jobs),
    )
    return slurm


@pytest.fixture
def local(tmp_path: Path, slurm: Recorded) -> Iterator[RunningDaemon]:
    """A daemon at a Unix socket, not started yet, on that Slurm."""
    env = {**os.environ, "PATH": f"{slurm.directory}:{os.environ['PATH']}"}
    daemon = RunningDaemon(tmp_path, f"unix:{tmp_path}/socket", env, ("--allocate",))
    yield daemon
    daemon.kill()
