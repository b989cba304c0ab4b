"""Boot a cluster: write its files, start its supervisor, wait until all nodes are idle. Called by the command line
and by the tests. Whatever fails or interrupts it, it removes what it made.
"""

from __future__ import annotations

import errno
import json
import os
import random
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.database import make_place
from hetstream.slurm_plugin.install.installation import HOOKS, LUA_DIR, hook_text, readable_by_all
from hetstream.slurm_plugin.submit.program import own_program
from tests.devcluster import cgroups, packing, render, site_setup, sites
from tests.devcluster.errors import BootFailed, ClusterExists
from tests.devcluster.lock import MACHINE, locked
from tests.devcluster.namespaces import free_subnet, make_network
from tests.devcluster.network import CONTROLLER, ClusterNetwork, plan_network
from tests.devcluster.processes import cluster_processes
from tests.devcluster.programs import SYSTEM_PATH, SlurmPrograms
from tests.devcluster.record import (
    MARKER_VARIABLE,
    ClusterRecord,
    read_daemons,
    read_record,
    write_record,
)
from tests.devcluster.spec import ClusterShape, ClusterSpec, RootPaths, ports_needed
from tests.devcluster.status import is_live, list_nodes
from tests.devcluster.teardown import SUPERVISOR_MODULE, remove_cluster, tear_down

# Idle after 1 s on a quiet machine; a loaded one with 64 nodes needs more, and a dead daemon is noticed at once.
READY_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
LOCK_TIMEOUT_S = READY_TIMEOUT_S + 30.0
EXIT_STATUS_TIMEOUT_S = 1.0
LOG_TAIL_LINES = 15

# Below the kernel's ephemeral ports, so that no outgoing connection takes one between the search and the daemons.
PORT_RANGE = (20000, 32000)
PORT_SEARCH_TRIES = 200

# Harmless to open, and never real hardware: /dev/zero, full, random, urandom. Not /dev/null, which tasks need.
FAKE_GPU_DEVICES = ((1, 5), (1, 7), (1, 8), (1, 9))

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BootRequest:
    """What the user asked for.

    Attributes:
        name: the cluster's name.
        state_dir: where its files shall be, absolute.
        shape: its nodes.
        tuned_scheduler: see ClusterSpec.
        lua_plugins: see ClusterSpec.
        network: give each host a network namespace with an address of its own, and shared memory of its own.
        cgroups: see ClusterSpec.
        packing: see ClusterSpec; the Lua plugins are loaded, too.
        sites: see ClusterSpec.
        settings: see ClusterSpec.
        own_cores: divide this machine's cores among the nodes, and tell Slurm of no more.
    """

    name: str
    state_dir: Path
    shape: ClusterShape
    tuned_scheduler: bool = True
    lua_plugins: bool = False
    network: bool = False
    cgroups: bool = False
    packing: bool = False
    sites: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    own_cores: bool = False


def plan_cluster(request: BootRequest, root: RootPaths | None) -> ClusterSpec:
    """Find free ports, and a free subnet if it is to have one; give the cluster a name that no other has."""
    spec = ClusterSpec(
        name=request.name,
        cluster_name=f"{request.name}-{secrets.token_hex(4)}",
        state_dir=request.state_dir,
        base_port=_free_ports(ports_needed(request.shape, accounting=sites.ACCOUNTING in request.sites)),
        shape=request.shape,
        tuned_scheduler=request.tuned_scheduler,
        lua_plugins=request.lua_plugins or request.packing,
        cgroups=request.cgroups,
        packing=request.packing,
        sites=request.sites,
        settings=request.settings,
        cores=tuple(sorted(os.sched_getaffinity(0))) if request.own_cores else (),
        root=root,
    )
    if not request.network:
        return spec
    return replace(spec, network=plan_network(spec.cluster_name, spec.nodes, free_subnet()))


def boot(request: BootRequest, programs: SlurmPrograms, progress: Progress) -> ClusterRecord:
    """Boot the cluster and return when all its nodes are idle.

    Raises:
        ClusterExists: a cluster or something else is in the state directory.
        UnsafePlace: somebody else than root could change what is there, or put another directory in its place.
        BootFailed: a daemon ended, the nodes were not idle in time, or there are no control groups where some were
            asked for; nothing is left behind.
        SlurmMissing: programs for its kind of site are not there.
        NetworkFailed: its network could not be made; likewise.
    """
    began = time.monotonic()
    with _interrupts_raise(), readable_by_all(), ExitStack() as undo:
        # Held until the daemons listen: nobody else finds their ports free, or this place half used.
        with locked(MACHINE, LOCK_TIMEOUT_S, f"starting cluster {request.name}"):
            site_setup.check(
                request.sites,
                programs,
                network=request.network,
                cgroups=request.cgroups,
                packing=request.packing,
            )
            _check_can_boot(request, programs.version)
            _warn(request, progress)
            spec = plan_cluster(request, programs.root)
            record = _new_record(spec, programs)
            undo.callback(tear_down, spec.state_dir)
            _make_files(spec, programs, record)
            if spec.network is not None:
                progress(f"making {len(spec.network.hosts)} network namespaces in {spec.network.subnet}")
                make_network(spec.network)
            names = [daemon["name"] for daemon in _daemons(spec, programs) if not daemon["name"].startswith("slurmd ")]
            daemons = f"{', '.join(names)} {programs.version} and {len(spec.nodes)} slurmd"
            progress(f"starting {daemons} in {spec.state_dir}")
            _start_supervisor(spec, programs)
            _wait_until_idle(spec, record, progress)
            site_setup.run_commands(spec, record)
            record = replace(record, ready=True, boot_s=round(time.monotonic() - began, 2))
            write_record(record)
        undo.pop_all()
    return record


def _warn(request: BootRequest, progress: Progress) -> None:
    """Say what will not stop the boot but hurt later."""
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        # Seen on 26.05: cancelling a step then blocks slurmctld for 8 to 10 s.
        progress(f"warning: the host name {host} does not resolve. Run: echo '127.0.0.1 {host}' >> /etc/hosts")
    closed = first_closed(request.state_dir)
    if closed is not None:
        progress(f"warning: only root may enter {closed}, so jobs of other users will fail. Give another --state-dir")


def first_closed(path: Path) -> Path | None:
    """The first directory on the way to `path` that other users may not enter."""
    return next(
        (parent for parent in reversed(path.parents) if parent.exists() and not parent.stat().st_mode & 0o001), None
    )


def _check_can_boot(request: BootRequest, version: str) -> None:
    if os.geteuid() != 0:
        raise BootFailed(
            f"user id {os.geteuid()} cannot boot a cluster: slurmd starts jobs of any user, which needs root. "
            "Run it as root, for example with sudo"
        )
    problem = cgroups.why_not(version) if request.cgroups else ""
    if problem:
        raise BootFailed(f"--cgroups cannot be had here: {problem}")
    record = read_record(request.state_dir)
    if record is not None:
        if record.ready and cluster_processes(record):
            raise ClusterExists(
                f"cluster {record.name} is up in {request.state_dir}. Use it, run "
                f"`devcluster down --state-dir {request.state_dir}` first, or give another --name"
            )
        # What a reboot or an `up` that was killed left behind.
        remove_cluster(request.state_dir)
    elif request.state_dir.exists() and any(request.state_dir.iterdir()):
        raise ClusterExists(
            f"--state-dir={request.state_dir} holds files that are no cluster's: give an empty directory or a new one"
        )
    existing = next(path for path in (request.state_dir, *request.state_dir.parents) if path.exists())
    if os.statvfs(existing).f_flag & os.ST_NOEXEC:
        raise BootFailed(
            f"{existing} is mounted noexec, but slurmd starts batch scripts from there. Give another --state-dir"
        )


def _new_record(spec: ClusterSpec, programs: SlurmPrograms) -> ClusterRecord:
    return ClusterRecord(
        name=spec.name,
        cluster_name=spec.cluster_name,
        state_dir=str(spec.state_dir),
        slurm_version=programs.version,
        nodes=spec.nodes,
        partitions=(*(group.name for group in spec.groups), *packing.partitions(spec), *sites.partitions(spec)),
        path_prefix=str(site_setup.commands_dir(spec, programs) or ""),
        ready=False,
        created_s=time.time(),
        boot_s=0.0,
        network=spec.network,
        configless=sites.CONFIGLESS in spec.sites,
        opportunistic=packing.PARTITION if spec.packing else "",
    )


def _make_files(spec: ClusterSpec, programs: SlurmPrograms, record: ClusterRecord) -> None:
    directory = spec.state_dir
    make_place(directory)
    # It may have been there, with other permissions.
    directory.chmod(0o755)
    # First of all: from here on `down` knows what this directory is.
    write_record(record)
    for name in ("dev", "log", "run", "spool", "state"):
        (directory / name).mkdir()
    for node in spec.nodes:
        (directory / "spool" / node).mkdir()
    for number in range(max(group.gpus for group in spec.groups)):
        _make_fake_gpu(spec.gpu_device(number), number)
    spec.slurm_conf.write_text(render.slurm_conf(spec, programs.version))
    (directory / "gres.conf").write_text(render.gres_conf(spec))
    if spec.network is not None:
        spec.hosts_file.write_text(spec.network.hosts_file(socket.gethostname()))
    cgroup_conf = render.cgroup_conf(
        programs.version, cgroups=spec.cgroups, has_gpus=any(group.gpus for group in spec.groups)
    )
    if cgroup_conf is not None:
        (directory / "cgroup.conf").write_text(cgroup_conf)
    if spec.lua_plugins:
        policy = directory / "policy.lua"
        policy.write_text(packing.policy() if spec.packing else (LUA_DIR / "policy.lua").read_text())
        for name in HOOKS:
            (directory / name).write_text(hook_text(name, LUA_DIR, policy, own_program()[0], None))
    site_setup.make_files(spec, programs, _slurmd(spec, programs))
    # One for MUNGE, one for auth/slurm.
    for path in (directory / "run" / "munge.key", directory / "slurm.key"):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(1024))


def _make_fake_gpu(path: Path, number: int) -> None:
    major, minor = FAKE_GPU_DEVICES[number % len(FAKE_GPU_DEVICES)]
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    except PermissionError as exc:
        raise BootFailed(
            f"cannot make the device node {path}: this root may not mknod (a container without MKNOD?)"
        ) from exc
    path.chmod(0o666)


def _start_supervisor(spec: ClusterSpec, programs: SlurmPrograms) -> None:
    environment = {
        "PATH": SYSTEM_PATH,
        "HOME": "/root",
        "LANG": "C.UTF-8",
        MARKER_VARIABLE: spec.cluster_name,
        **site_setup.environment(spec),
    }
    plan = spec.state_dir / "run" / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "state_dir": str(spec.state_dir),
                "environment": environment,
                "hosts_file": str(spec.hosts_file),
                "cgroup": spec.cluster_name if spec.cgroups else "",
                "mounts": site_setup.mounts(spec),
                "daemons": list(_daemons(spec, programs)),
            },
            indent=1,
        )
    )
    with (spec.log_dir / "supervisor.log").open("ab") as log:
        started = subprocess.run(
            [sys.executable, "-m", SUPERVISOR_MODULE, str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd="/",
        )
    if started.returncode != 0:
        raise BootFailed(f"the supervisor ended with {started.returncode}. " + _log_tail(spec, "supervisor"))


def _daemons(spec: ClusterSpec, programs: SlurmPrograms) -> Iterator[dict[str, Any]]:
    run, log = spec.state_dir / "run", spec.log_dir
    conf = {"SLURM_CONF": str(spec.slurm_conf)}
    munged = [
        str(programs.munged),
        "--foreground",
        # munged refuses directories that it thinks others could write to; that this is root's own, `boot` has seen to.
        "--force",
        f"--key-file={run}/munge.key",
        f"--socket={spec.munge_socket}",
        f"--pid-file={run}/munged.pid",
        f"--log-file={log}/munged.log",
        f"--seed-file={run}/munged.seed",
    ]
    if sites.AUTH_SLURM not in spec.sites:
        yield _daemon("munged", munged, log, ready_file=str(spec.munge_socket))
    for name, argv, ready_file, ready_port in site_setup.daemons(spec, programs):
        yield _daemon(name, argv, log, ready_file=ready_file, ready_port=ready_port, environment=conf)
    argv = [str(programs.slurmctld), "-D", "-f", str(spec.slurm_conf)]
    slurmctld = _daemon("slurmctld", argv, log, environment=conf)
    yield _on_host(slurmctld, CONTROLLER, spec.network)
    slurmd = _slurmd(spec, programs)
    for node in spec.nodes:
        argv = [*slurmd, "-D", "-N", node]
        environment = {} if sites.CONFIGLESS in spec.sites else conf
        daemon = _on_host(_daemon(f"slurmd {node}", argv, log, environment=environment), node, spec.network)
        yield {**daemon, "cores": spec.cores_of.get(node, ())}


def _slurmd(spec: ClusterSpec, programs: SlurmPrograms) -> list[str]:
    """How a slurmd is started, without its node."""
    where = ["-f", str(spec.slurm_conf)]
    if sites.CONFIGLESS in spec.sites:
        where = ["--conf-server", f"127.0.0.1:{spec.base_port}"]
    slurmd = [str(programs.slurmd), *where]
    return slurmd if programs.root is None else [*slurmd, "-d", str(programs.root.commands_dir / "slurmstepd")]


def _daemon(
    name: str,
    argv: list[str],
    log: Path,
    ready_file: str = "",
    ready_port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    output = str(log / f"{_log_stem(name)}.out")
    ready = {"ready_file": ready_file, "ready_port": ready_port}
    where = {"host": None, "cores": ()}
    return {"name": name, "argv": argv, "output": output, **ready, **where, "environment": environment or {}}


def _on_host(daemon: dict[str, Any], name: str, network: ClusterNetwork | None) -> dict[str, Any]:
    return daemon if network is None else {**daemon, "host": asdict(network.host(name))}


def _log_stem(daemon: str) -> str:
    return daemon.replace(" ", "-")


def _wait_until_idle(spec: ClusterSpec, record: ClusterRecord, progress: Progress) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    reported = -1
    while True:
        _check_daemons_live(spec)
        num_idle = _count_idle(record)
        if num_idle != reported and num_idle is not None:
            reported = num_idle
            progress(f"{num_idle} of {len(spec.nodes)} nodes idle")
        if num_idle == len(spec.nodes):
            return
        if time.monotonic() > deadline:
            raise BootFailed(
                f"{max(reported, 0)} of {len(spec.nodes)} nodes were idle after {READY_TIMEOUT_S:g} s. "
                + _log_tail(spec, "slurmctld")
            )
        time.sleep(POLL_INTERVAL_S)


def _count_idle(record: ClusterRecord) -> int | None:
    """How many nodes are idle, or None while slurmctld does not answer."""
    try:
        nodes = list_nodes(record)
    except SlurmCommandError:
        return None
    # A node that has not been heard of yet is "idle*" or "unknown*".
    return len({node.node for node in nodes if node.state == "idle"})


def _check_daemons_live(spec: ClusterSpec) -> None:
    for index, daemon in enumerate(read_daemons(spec.state_dir)):
        if daemon.exit_status is not None or not is_live(daemon):
            how = _exit_text(spec, index)
            raise BootFailed(f"{daemon.name} ended{how}. " + _log_tail(spec, daemon.name))


def _exit_text(spec: ClusterSpec, index: int) -> str:
    """How a dead daemon ended; the supervisor writes that down a moment later."""
    deadline = time.monotonic() + EXIT_STATUS_TIMEOUT_S
    while time.monotonic() < deadline:
        status = read_daemons(spec.state_dir)[index].exit_status
        if status is not None:
            return f" with {status}"
        time.sleep(POLL_INTERVAL_S)
    return ""


def _log_tail(spec: ClusterSpec, daemon: str) -> str:
    """The last lines of what the daemon logged, or else printed."""
    stem = _log_stem(daemon)
    for path in (spec.log_dir / f"{stem}.log", spec.log_dir / f"{stem}.out"):
        if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
            return f"The end of {path.name}:\n" + "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
    return f"{daemon} logged nothing"


def _free_ports(count: int) -> int:
    """The first of `count` consecutive TCP ports that nobody listens on."""
    low, high = PORT_RANGE
    for _ in range(PORT_SEARCH_TRIES):
        first = random.randrange(low, high - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise BootFailed(f"no {count} consecutive free TCP ports between {low} and {high}: look at `ss -tln`")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise
    return True


@contextmanager
def _interrupts_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end `up` as Ctrl-C does: through the clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
