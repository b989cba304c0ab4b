"""Each call that reaches something by its name has a row that says why that is safe; what others may have prepared is
used in every kind of hostile place (`hostile_places.py`)."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.base.files import own_directory
from hetstream.base.locks import own_lock
from hetstream.base.unix_sockets import listen_at
from hetstream.hetjob.convert.sbatch_options import SbatchOptions
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.handshake import Introduction
from hetstream.hetjob.gpu.orders import VERSION, JobClass
from hetstream.hetjob.job.processes import temporary_place
from hetstream.hetjob.master.server import MasterConfig
from hetstream.hetjob.site.client import SiteSettings, UnixAddress, ask
from hetstream.hetjob.site.messages import LENGTH, AskStatus, GrantLimit, decode_request, encode_answer
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.cli.packer import alone
from hetstream.slurm_plugin.cli.report import write_whole
from hetstream.slurm_plugin.coordinator.admission import GrantedJobs, Peer
from hetstream.slurm_plugin.daemon.store import Store
from hetstream.slurm_plugin.insight.observation import History, Sample
from hetstream.slurm_plugin.install.installation import RECORD, install
from hetstream.slurm_plugin.submit.conversion import _surroundings
from tests.base.users import STRANGER, needs_root
from tests.devcluster import roots, site_setup
from tests.devcluster.__main__ import main as devcluster
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.programs import SlurmPrograms
from tests.devcluster.record import ClusterRecord, write_record
from tests.devcluster.spec import ClusterShape
from tests.hostile_places import EVIL, PRECIOUS, Dirt, Place, Scenario, made, refusal_of
from tests.hostile_trainings import TRAININGS
from tests.opened_by_name import ROOT, Sites, script_sites, sites, words_in
from tests.opened_by_name_rows import BY_RULE, HELD_BY, ROWS, SCRIPT_ROWS

CLUSTER = "production-0123abcd"

Runs = Callable[[str, Dirt], str]


def verb(line: str) -> str:
    """What a command says, by its exit code."""
    name, *words = line.split()
    code = devcluster(words) if name == "devcluster" else main([name, *words])
    if code:
        raise SystemExit(f"exit code {code}")
    return "done"


# Throw-away clusters


def forged_cluster(path: Path, place: Place) -> None:
    """A record that names programs of the stranger's, and processes and directories of others'."""
    record = ClusterRecord(
        "production", CLUSTER, str(place.target), "22.05.8", ("gpu0",), ("gpu",), str(place.target / "bin"), True, 1.0,
        1.0,
    )  # fmt: skip
    made(path / "cluster.json", json.dumps(record.__dict__))
    made(path / "daemons.json", json.dumps({"daemons": []}))
    for name in ("true", "sinfo"):
        made(path / "bin" / name, place.script(), 0o755)
    for number in range(20):
        made(path / "log" / f"{number}", EVIL)


def own_cluster(path: Path) -> None:
    path.mkdir()
    write_record(
        ClusterRecord("own", "own-0123abcd", str(path), "22.05.8", ("gpu0",), ("gpu",), "", False, time.time(), 0.0)
    )


def downs(path: Path) -> str:
    """Root's own process carries the name of the cluster that the stranger's record names."""
    environment = {"PATH": os.defpath, "SLURM_CLUSTER_NAME": CLUSTER}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        try:
            said = verb(f"devcluster down --state-dir {path}")
            return EVIL if process.poll() is not None else said
        finally:
            process.kill()


def boots(path: Path) -> str:
    """As far as daemons would be started: whose is the directory by then?"""

    def look(*_: object) -> None:
        raise SystemExit(EVIL if path.stat().st_uid == STRANGER else "")

    site_setup.make_files = look
    programs = SlurmPrograms("22.05.8", *[Path("/bin/false")] * 3)
    try:
        boot(BootRequest("hostile", path, ClusterShape(1, 1, 0, 1)), programs, lambda _: None)
    except SystemExit as error:
        return f"would be up {error}"
    return "up"


def own_cache(path: Path) -> None:
    made(path / "debian-trixie-slurm-24.11/commands/slurmctld", "#!/bin/sh\necho slurm-wlm 24.11.5\n", 0o755)


def caches(path: Path) -> object:
    """As far as packages would be fetched."""

    def look(*_: object) -> None:
        raise SystemExit(EVIL if path.stat().st_uid == STRANGER else "")

    roots._build = look  # type: ignore[assignment]
    try:
        return roots.prepare_root("24.11", path, lambda _: None).programs()
    except SystemExit as error:
        return f"would be fetched {error}"


def forged_cache(path: Path, place: Place) -> None:
    made(path / "debian-trixie-slurm-24.11/commands/slurmctld", place.script(), 0o755)


# Installations


def installs(path: Path) -> None:
    install(path, {path / "share/hetstream/lua/x.lua": "-- ours"}, {}, dry_run=False)


def own_prefix(path: Path) -> None:
    made(path / RECORD, json.dumps({"version": 1, "files": {}, "moved": {}, "directories": []}))


def forged_prefix(path: Path, place: Place) -> None:
    import hashlib

    digest = hashlib.sha256(PRECIOUS.encode()).hexdigest()
    stolen = str(place.loot / "cron")
    files, moved = {str(place.precious): digest, stolen: "00"}, {stolen: str(made(path / "evil", EVIL))}
    made(path / RECORD, json.dumps({"version": 1, "files": files, "moved": moved, "directories": []}))


def linked_prefix(path: Path, place: Place) -> None:
    path.mkdir()
    (path / "share").symlink_to(place.loot)


# Services


def listening(path: Path, place: Place) -> None:
    """A stranger's daemon, which says what it likes to whoever asks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(8)
    if os.fork():
        return
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0)
    listener.settimeout(2.0)
    try:
        while True:
            connection, _ = listener.accept()
            with connection:
                (length,) = LENGTH.unpack(connection.recv(LENGTH.size))
                request = decode_request(connection.recv(length))
                answer = encode_answer(GrantLimit(0, EVIL, 300.0), request.reply_key)
                connection.sendall(LENGTH.pack(len(answer)) + answer)
    except OSError:
        os._exit(0)


def grant(path: Path, _: Place) -> None:
    made(path / "7.json", json.dumps({"uid": STRANGER, "job_class": "guaranteed", "gpus": ["GPU-1"]}))


def own_grant(path: Path) -> None:
    made(path / "7.json", json.dumps({"uid": 1, "job_class": "guaranteed", "gpus": ["GPU-1"]}))


def admits(path: Path) -> str:
    introduction = Introduction(VERSION, "7", JobClass.GUARANTEED, "GPU-1")
    try:
        GrantedJobs(path, lambda _: None).admit(Peer(1, STRANGER), introduction)
    except GpuJobRefused:
        return "refused"
    return EVIL


def locked(path: Path, _: Place) -> None:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.fork() == 0:
        os.setsid()
        signal.alarm(3)
        signal.pause()


def holds(path: Path) -> str:
    try:
        with own_lock(path, 0.05):
            return "held"
    except TimeoutError:
        return f"{EVIL}: a stranger holds it"


def writes_key(path: Path) -> str:
    with own_directory(path) as directory:
        directory.write_whole("key", b"secret")
        status = os.stat(path / "key")
    return "done" if status.st_uid == os.geteuid() else EVIL


def linked_files(*names: str) -> object:
    """A directory in which names that will be written to are links to what others may not write."""

    def plant(path: Path, place: Place) -> None:
        path.mkdir()
        for name in names:
            (path / name).symlink_to(place.precious)

    return plant


def packs(path: Path) -> None:
    with alone(path / "lock"):
        pass


def forged_spec(path: Path, _: Place) -> None:
    made(path / "spec.json", json.dumps({"program": [EVIL], "data_workers": 1, "data_worker_cpus": 1}))


def own_spec(path: Path) -> None:
    made(path / "spec.json", json.dumps({"program": ["/bin/true"], "data_workers": 1, "data_worker_cpus": 1}))


def forged_history(path: Path, _: Place) -> None:
    """Made by the stranger, with a number that nobody has measured, and open to all."""
    with History(path) as history:
        history.append(Sample(time.time(), 1, 0, 666666, 0, 1, 0, None, 0, 0, None, (0, 0, 0, 0, 0), 0, 0, 0.0, {}))
    path.chmod(0o666)


def shown_history(path: Path) -> object:
    with History(path) as history:
        return EVIL if any(sample.gpus == 666666 for sample in history.since(0.0)) else "a history"


def uses_tmpdir(path: Path) -> object:
    """Where TMPDIR leads to, or is in, a stranger's hands: scripts that this user will run are made elsewhere."""
    tempfile.tempdir, os.environ["TMPDIR"] = None, str(path)
    place = temporary_place()
    return EVIL if place.resolve().is_relative_to(path.parent) else place


def linked_page(path: Path, place: Place) -> None:
    path.symlink_to(place.precious)


def reads_for_conversion(path: Path) -> str:
    """What a script that is converted reads: where a pipe has come in the place of a file, nobody would ever write."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for a pipe")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(2)
    return str(_surroundings({}, SbatchOptions(())).read(str(path)))


SCENARIOS = {
    "devcluster exec": Scenario(
        forged_cluster, lambda path: verb(f"devcluster exec --state-dir {path} -- true"), own_cluster, 0
    ),
    "devcluster status": Scenario(
        forged_cluster, lambda path: verb(f"devcluster status --state-dir {path}"), own_cluster, 0, works=False
    ),
    "devcluster down": Scenario(forged_cluster, downs, own_cluster, 0, must_refuse=True),
    "devcluster up": Scenario(forged_cluster, boots, Path.mkdir, 0, must_refuse=True),
    "devcluster cache": Scenario(forged_cache, caches, own_cache, 0),
    "uninstall": Scenario(forged_prefix, lambda path: verb(f"site uninstall --prefix {path}"), own_prefix, 0),
    "install": Scenario(linked_prefix, installs, lambda path: path.mkdir(), 0, must_refuse=True),
    "service": Scenario(
        listening, lambda path: listen_at(path, socket.SOCK_STREAM, 0o666, 1).close(), must_refuse=True
    ),
    "client": Scenario(
        listening, lambda path: ask(SiteSettings(UnixAddress(path), None), AskStatus(), 2.0), works=False
    ),
    "grants": Scenario(grant, admits, own_grant, 0),
    "lock": Scenario(locked, holds),
    "own directory": Scenario(linked_files("key"), writes_key, must_refuse=True),
    "daemon state": Scenario(
        linked_files("lock", "state.sqlite"), lambda path: Store(path).close(), Path.mkdir, 0, must_refuse=True
    ),
    "page": Scenario(linked_page, lambda path: write_whole(path, "a page"), uid=0),
    "page to a pipe": Scenario(
        lambda path, _: os.mkfifo(path, 0o666), lambda path: write_whole(path, "a page"), lambda path: made(path), 0
    ),
    "job directory": Scenario(forged_spec, lambda path: MasterConfig.read(path / "spec.json"), own_spec),
    "history": Scenario(forged_history, shown_history),
    "temporary": Scenario(lambda path, _: made(path / "x").parent.chmod(0o777), uses_tmpdir, Path.mkdir, works=False),
    "what a script reads": Scenario(
        lambda path, _: os.mkfifo(path, 0o666), reads_for_conversion, lambda path: made(path, "srun -c 4 python")
    ),
    "packer": Scenario(linked_files("lock"), packs, uid=0),
    **TRAININGS,
}


def rows() -> dict[str, Counter[str]]:
    """The table, as `sites` has the syntax trees."""
    found: dict[str, Counter[str]] = {}
    for files in ROWS.values():
        for file, functions in files.items():
            for function in functions.split():
                name, _, count = function.partition("*")
                found.setdefault(file, Counter())[name.removeprefix("-")] += int(count or 1)
    return found


@pytest.mark.shows("a new call that reaches something by its name fails a test until somebody has given it a row")
def test_each_call_that_reaches_something_by_its_name_has_a_row() -> None:
    """A new one has somebody think of who else could have a hand in what it reaches."""
    found, listed = sites(), rows()
    amiss = [
        f"{file} {function or '-'}: {found.get(file, Counter())[function]} such calls, and "
        f"{listed.get(file, Counter())[function]} in tests/opened_by_name_rows.py"
        for file in sorted({*found, *listed})
        for function in sorted({*found.get(file, ()), *listed.get(file, ())})
        if found.get(file, Counter())[function] != listed.get(file, Counter())[function]
    ]
    assert not amiss, "\n".join(amiss)


def test_each_kind_of_row_says_why_it_is_safe() -> None:
    assert ROWS.keys() == {*BY_RULE, *HELD_BY}
    evidence = {held for names in HELD_BY.values() for held in names}
    assert {name for name in evidence if not name.endswith(".py")} == SCENARIOS.keys()
    assert all((ROOT / name).exists() for name in evidence if name.endswith(".py"))
    lacking = [kind for kind, names in HELD_BY.items() if not SCENARIOS.keys() & set(names)]
    assert lacking == [], "a kind of what somebody may have prepared is tried in hostile places"


@pytest.mark.shows("a new call that reaches something by its name fails a test until somebody has given it a row")
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("import os\nos.open('x', 0)", 1),
        ("import os as o\no.open('x', 0)", 1),
        ("from os import open as start\nstart('x', 0)", 1),
        ("from pathlib import Path\nPath('x').read_text()\nPath('x').open()", 2),
        ("import os\nmap(os.unlink, [])\nundo.callback(path.unlink)", 2),
        ("from hetstream.base.files import Directory\nDirectory.open('x').enter('y')", 1),
        ("from hetstream.x import SITE_FILE\nSITE_FILE.read_text()", 1),
        ("import subprocess, sqlite3\nsubprocess.run([])\nsqlite3.connect('x')", 2),
        ("import os\nos.mkdir('x', dir_fd=3)\ndirectory.unlink('x')\ndirectory.rename('x', 'y')", 0),
        ("'a'.replace('b', 'c')\nsignature.bind(*words)", 0),
    ],
)
def test_calls_are_found_however_they_are_written(text: str, number: int) -> None:
    assert sum(Sites(ast.parse(text)).found.values()) == number


def test_each_word_of_a_script_that_reaches_something_by_its_name_has_a_row() -> None:
    """Shell scripts that Slurm runs as root, and Lua that it loads, are no Python: a pattern finds what they reach."""
    listed = {file: {word: count for word, (count, why) in words.items() if why} for file, words in SCRIPT_ROWS.items()}
    assert {file: dict(found) for file, found in script_sites().items()} == listed, "see tests/opened_by_name_rows.py"


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (".sh", 'echo x >"$run/y"', [">"]),
        (".sh", 'echo x >> log; cat <"$given"', [">>", "cat", "<"]),
        (".sh", '[ -e x ] && . "$settings"', ["."]),
        (".sh", "  rm -f x || mv y z", ["rm", "mv"]),
        (".sh", "# rm x\nexit 0  # cat", []),
        (".sh", "logged 2>/dev/null 2>&1 </dev/null; format=x.rm", []),
        (".lua", 'local f = io.open("x") -- io.popen', ["io.open"]),
        (".lua", 'os.execute("x"); require("y"); loadfile("z")()', ["os.execute", "require", "loadfile"]),
        (".lua", "local open, execute = 1, job.os", []),
    ],
)
def test_words_of_scripts_are_found(kind: str, text: str, words: list[str]) -> None:
    assert [*words_in(text, kind)] == words


@pytest.mark.shows("what root starts in a place that a stranger has made does no harm")
@needs_root
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.works])
def test_it_works_where_nobody_else_has_a_hand_in(name: str) -> None:
    """So what is refused elsewhere is refused for that."""
    assert not refusal_of(SCENARIOS[name])


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """A function from a scenario and a kind of dirt to the harm that was done; see `hostile_runs.py`."""
    argv = [sys.executable, "-m", "tests.hostile_runs"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout

        def run(name: str, dirt: Dirt) -> str:
            print(json.dumps([name, dirt.name]), file=process.stdin, flush=True)
            return str(json.loads(process.stdout.readline()))  # type: ignore[union-attr]

        yield run


@pytest.mark.shows("what root starts in a place that a stranger has made does no harm")
@needs_root
@pytest.mark.parametrize(
    ("name", "dirt"),
    [
        pytest.param(
            name,
            dirt,
            id=f"{name}-{dirt.name.lower()}",
            marks=[pytest.mark.slow] if name in TRAININGS and dirt not in (Dirt.FOREIGN, Dirt.LINKED) else [],
        )
        for name, scenario in SCENARIOS.items()
        for dirt in scenario.tried_in()
    ],
)
def test_what_a_stranger_prepares_or_swaps_does_no_harm(runs: Runs, name: str, dirt: Dirt) -> None:
    assert not (harm := runs(name, dirt)), harm
