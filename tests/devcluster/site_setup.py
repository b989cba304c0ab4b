"""What kinds of sites need beside slurm.conf: files, daemons, and commands once all nodes are idle. Called by boot.py.

`sites.py` and `packing.py` say what; this does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.submit.program import own_program
from tests.devcluster import packing, render, sites
from tests.devcluster.errors import BootFailed, SlurmMissing
from tests.devcluster.private_run import command_text
from tests.devcluster.programs import (
    COMMANDS,
    MARIADB,
    SYSTEM_PATH,
    SlurmPrograms,
    missing_of,
    search_path,
)
from tests.devcluster.record import ClusterRecord
from tests.devcluster.render import version_tuple
from tests.devcluster.spec import ClusterSpec, RootPaths

# Small enough for a laptop; Slurm's jobs of a day need no more.
DATABASE_OPTIONS = (
    "--skip-networking",
    "--skip-log-bin",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=16M",
    "--performance-schema=OFF",
)
DATABASE_TIMEOUT_S = 60.0
# By these the client library of the database finds its socket; Slurm has no setting for it.
SOCKET_VARIABLES = ("MYSQL_UNIX_PORT", "MARIADB_UNIX_PORT")

FIRST_WITH_AUTH_SLURM = (23, 11)
MUNGE_SOCKET = "munge.socket.2"
CLIENTS = (*COMMANDS, "sacct", "sacctmgr", "sattach", "sdiag", "sprio", "sreport", "sshare", "sstat", "scrontab")


def check(
    kinds: Sequence[str],
    programs: SlurmPrograms,
    *,
    network: bool = False,
    cgroups: bool = False,
    packing: bool = False,
) -> None:
    """Refuse a kind of site that cannot be had.

    Args:
        kinds: of sites.
        programs: Slurm's.
        network: hosts have networks of their own.
        cgroups: Slurm uses them.
        packing: jobs share GPUs.

    Raises:
        SlurmMissing: programs of accounting are not there.
        BootFailed: this Slurm has no such authentication, or two things that do not go together.
    """
    if sites.GPU_KINDS in kinds and packing:
        raise BootFailed("--site gpu-kinds does not go with --packing, whose jobs share whole GPUs without a type")
    if sites.AUTH_SLURM in kinds and version_tuple(programs.version) < FIRST_WITH_AUTH_SLURM:
        raise BootFailed(f"Slurm {programs.version} has no auth/slurm: give --slurm 24.11 or 26.05")
    alone = [sites.CONFIGLESS in kinds, sites.AUTH_SLURM in kinds]
    if any(alone) and (all(alone) or network or cgroups or sites.POWER_SAVING in kinds):
        raise BootFailed(
            "--site configless and auth-slurm go neither together nor with --network, --cgroups or power-saving"
        )
    if sites.CONFIGLESS in kinds and programs.root and not _usual_plugin_dir(programs.root).is_dir():
        raise BootFailed(
            f"--site configless with a Slurm from a Debian root needs {_usual_plugin_dir(programs.root)}, to put its "
            "plugins there for this cluster alone. Run: devcluster install"
        )
    if sites.ACCOUNTING in kinds:
        missing = [*([] if programs.slurmdbd else ["slurmdbd"]), *missing_of(MARIADB)]
        if missing:
            raise SlurmMissing(
                f"not found on this machine: {', '.join(missing)}. "
                "Run: devcluster install --site accounting (as root on Debian)"
            )


def commands_dir(spec: ClusterSpec, programs: SlurmPrograms) -> Path | None:
    """Where Slurm's commands for this cluster are; None where they are on everybody's PATH."""
    if sites.needs_own_run(spec.sites):
        return spec.commands_dir
    return programs.root.commands_dir if programs.root else None


def mounts(spec: ClusterSpec) -> list[tuple[str, str]]:
    """What the cluster sees in the place of the machine's own: /run, and plugins before it knows its PluginDir."""
    found = [(str(spec.own_run), "/run")] if sites.needs_own_run(spec.sites) else []
    if sites.CONFIGLESS in spec.sites and spec.root is not None:
        found.append((str(spec.root.plugin_dir), str(_usual_plugin_dir(spec.root))))
    return found


def _usual_plugin_dir(root: RootPaths) -> Path:
    """Where a root's programs look for plugins as long as nobody has told them."""
    return "/" / root.plugin_dir.resolve().relative_to(root.plugin_dir.parent.resolve())


def make_files(spec: ClusterSpec, programs: SlurmPrograms, slurmd: Sequence[str]) -> None:
    """Write what daemons read, and make an empty database.

    Args:
        spec: the cluster.
        programs: its Slurm.
        slurmd: how a slurmd is started in the background, without its node.
    """
    if sites.ACCOUNTING in spec.sites:
        conf = spec.state_dir / "slurmdbd.conf"
        conf.touch(0o600)  # slurmdbd refuses one that others may read
        conf.write_text(sites.slurmdbd_conf(spec))
        _make_database(spec.database_dir)
    if sites.POWER_SAVING in spec.sites:
        path = f"{programs.root.commands_dir}:{SYSTEM_PATH}" if programs.root else SYSTEM_PATH
        for script, text in (
            (spec.suspend_program, sites.suspend_program(spec, path)),
            (spec.resume_program, sites.resume_program(spec, path, slurmd)),
        ):
            _write_script(script, text)
    _make_node_scripts(spec)
    if spec.packing:
        _make_shared_gpus(spec)
    if sites.needs_own_run(spec.sites):
        _make_own_run(spec, programs)


def _make_node_scripts(spec: ClusterSpec) -> None:
    """Prolog, Epilog and TaskProlog, as far as there are any. A Debian root has lines of its own in the last one."""
    texts = packing.scripts(spec) if spec.packing else {}
    if spec.root is not None:
        texts[spec.task_prolog] = render.task_prolog(spec.root.commands_dir) + texts.get(spec.task_prolog, "")
    for script, text in texts.items():
        _write_script(script, text)


def _make_shared_gpus(spec: ClusterSpec) -> None:
    spec.packing_settings.write_text(packing.environment(spec))
    for number in range(spec.shape.gpus_per_node):
        for link in packing.links(spec, number):
            link.symlink_to(spec.gpu_device(number))
    cores = sorted(os.sched_getaffinity(0))
    for node in packing.sharing_nodes(spec):
        for directory in (node.directory, node.grants, node.environment):
            directory.mkdir(parents=True)
        for number in range(node.num_gpus):
            EmulatedGpuFile.create(
                node.gpu_file(number),
                capacity_bytes=packing.GPU_MEMORY_MIB * 2**20,
                core=cores[number % len(cores)],
                segment_bytes=packing.GPU_SEGMENT_KIB * 2**10,
                bus_bytes_per_s=packing.GPU_BUS_MIB_PER_S * 2**20,
            )
            node.gpu_file(number).chmod(0o666)  # jobs of every user


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _make_own_run(spec: ClusterSpec, programs: SlurmPrograms) -> None:
    """What is in the cluster's /run at first, and the commands that reach it."""
    for name in ("", "munge", "slurm", "slurmctld", "slurmdbd", "netns", "lock"):
        (spec.own_run / name).mkdir()
    (spec.own_run / spec.cluster_name).touch()
    # Who has no slurm.conf yet asks for it with MUNGE's default socket.
    (spec.own_run / "munge" / MUNGE_SOCKET).symlink_to(spec.munge_socket)
    spec.commands_dir.mkdir()
    path = str(programs.root.commands_dir) if programs.root else search_path()
    for name in CLIENTS:
        program = shutil.which(name, path=path)
        if program is not None:
            script = spec.commands_dir / name
            pid_file = spec.state_dir / "run" / "slurmctld.pid"
            _write_script(script, command_text(Path(program), spec.cluster_name, pid_file))


def daemons(spec: ClusterSpec, programs: SlurmPrograms) -> Iterator[tuple[str, list[str], str, int]]:
    """Daemons that run before slurmctld: name, command, and the file or port by which they are known to be ready."""
    if sites.ACCOUNTING in spec.sites:
        directory = spec.database_dir
        place = ("--no-defaults", "--user=root", f"--datadir={directory}/data", f"--socket={spec.database_socket}")
        pid_file = f"--pid-file={directory}/pid"
        yield "mariadbd", [_mariadb(0), *place, pid_file, *DATABASE_OPTIONS], str(spec.database_socket), 0
        yield "slurmdbd", [str(programs.slurmdbd), "-D"], "", spec.dbd_port
    for node in packing.sharing_nodes(spec):
        yield f"coordinator {node.name}", [*own_program(), *node.coordinator], str(node.socket), 0


def environment(spec: ClusterSpec) -> dict[str, str]:
    """What the daemons have in their environment."""
    return dict.fromkeys(SOCKET_VARIABLES, str(spec.database_socket)) if sites.ACCOUNTING in spec.sites else {}


def run_commands(spec: ClusterSpec, record: ClusterRecord) -> None:
    """Run what makes a cluster like its sites, once all its nodes are idle.

    Raises:
        SlurmCommandError: one of them failed.
    """
    for command in sites.commands(spec):
        run_slurm(command, env=record.environment(os.environ))


def _make_database(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    argv = [
        _mariadb(1), "--no-defaults", "--user=root", f"--datadir={directory}/data", "--skip-test-db",
        "--skip-name-resolve", "--auth-root-authentication-method=socket", "--auth-root-socket-user=root",
        *DATABASE_OPTIONS,
    ]  # fmt: skip
    made = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=DATABASE_TIMEOUT_S
    )
    if made.returncode != 0:
        raise BootFailed(f"{argv[0]} exited with {made.returncode}: {made.stdout}{made.stderr}".strip())


def _mariadb(number: int) -> str:
    return shutil.which(MARIADB[number], path=search_path()) or MARIADB[number]
