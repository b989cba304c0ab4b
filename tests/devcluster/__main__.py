"""`devcluster install|up|down|status|exec`: a throw-away Slurm cluster on this machine.

`make venv` places the command beside `hetstream`; `python -m tests.devcluster` is the same from the checkout's root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetstream.base.errors import ConfigError, UsageError
from hetstream.slurm_plugin.cli import call
from hetstream.slurm_plugin.client.run import become
from tests.devcluster import install, render
from tests.devcluster.boot import BootRequest, boot, plan_cluster
from tests.devcluster.errors import NoCluster
from tests.devcluster.network import ClusterNetwork
from tests.devcluster.programs import SlurmPrograms
from tests.devcluster.record import ClusterRecord, read_record
from tests.devcluster.roots import (
    DEFAULT_CACHE_DIR,
    HOST,
    RELEASES,
    choose_programs,
    needs_root,
    root_of,
)
from tests.devcluster.sites import ACCOUNTING, SITES, commands, slurmdbd_conf
from tests.devcluster.spec import DEFAULT_NAME, DEFAULT_STATE_ROOT, ClusterShape, check_name
from tests.devcluster.status import observe
from tests.devcluster.teardown import plan_teardown, tear_down

EPILOG = """\
examples:
  devcluster up --install
  devcluster exec -- sbatch --wrap hostname
  devcluster down
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster",
        description="Boot real Slurm daemons with fake GPUs on this machine, beside any Slurm that is there already.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks on stderr")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    p = actions.add_parser("install", help="install Debian's Slurm packages, without starting any service")
    _add_slurm(p)
    _add_sites(p)
    _add_dry_run(p)
    _add_json(p)
    p.set_defaults(run=run, act=_install)

    p = actions.add_parser("up", help="boot a cluster and wait until all its nodes are idle")
    _add_place(p)
    _add_cluster(p)
    _add_sites(p)
    _add_slurm(p)
    p.add_argument("--install", action="store_true", help="first do what `devcluster install` does")
    _add_dry_run(p)
    _add_json(p)
    p.set_defaults(run=run, act=_up)

    p = actions.add_parser("down", help="kill everything of a cluster and remove its files")
    _add_place(p)
    _add_dry_run(p)
    _add_json(p)
    p.set_defaults(run=run, act=_down)

    p = actions.add_parser("status", help="show a cluster's version, nodes, partitions and daemons")
    _add_place(p)
    _add_json(p)
    p.set_defaults(run=run, act=_status)

    p = actions.add_parser("exec", help="run a command against a cluster", usage="%(prog)s [options] -- COMMAND ...")
    _add_place(p)
    p.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    p.set_defaults(run=run, act=_exec)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action and return its exit code."""
    return call("devcluster", build_parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Do what the user asked for; values that break a rule are errors of the command line."""
    try:
        return int(args.act(args))
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster, when there are several (%(default)s)")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help=f"where all its files are ({DEFAULT_STATE_ROOT}/NAME)"
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    shape = ClusterShape()
    parser.add_argument("--gpu-nodes", type=int, default=shape.gpu_nodes, metavar="N", help="GPU nodes (%(default)s)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=shape.gpus_per_node, metavar="N", help="fake GPUs of each (%(default)s)"
    )
    parser.add_argument("--cpu-nodes", type=int, default=shape.cpu_nodes, metavar="N", help="CPU nodes (%(default)s)")
    parser.add_argument(
        "--cpus-per-node", type=int, default=shape.cpus_per_node, metavar="N", help="of each node (%(default)s)"
    )
    parser.add_argument(
        "--own-cores",
        action="store_true",
        help="divide this machine's cores among the nodes, one for each GPU node; Slurm counts no more CPUs",
    )
    parser.add_argument(
        "--default-scheduler",
        action="store_true",
        help="keep Slurm's own scheduler timing: heterogeneous jobs then wait up to half a minute",
    )
    parser.add_argument(
        "--lua-plugins", action="store_true", help="plain sbatch converts scripts with #HETSTREAM lines (cli_filter)"
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="give each host a network namespace, an address and a /dev/shm of its own, to cut and lose it (needs ip)",
    )
    parser.add_argument(
        "--cgroups",
        action="store_true",
        help="proctrack/cgroup and task/cgroup with constrained devices, as sites have them (needs cgroup v1)",
    )
    parser.add_argument(
        "--packing",
        action="store_true",
        help="jobs of partition opp share emulated GPUs with those of partition gpu: GRES, preemption, Prolog, "
        "coordinators, and the Lua plugins with a guard",
    )


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slurm",
        choices=(HOST, *RELEASES),
        default=HOST,
        help="which Slurm: the one on this machine (%(default)s), or a release from a Debian root made once and cached",
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, metavar="DIR", help="where Debian roots are (%(default)s)"
    )


def _add_sites(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {text}" for name, text in SITES.items())
    parser.add_argument(
        "--site", type=_sites, default=(), metavar="KIND[,KIND]", help=f"be like such a site, or several. {kinds}"
    )


def _sites(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in SITES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: must be of {', '.join(SITES)}")
    return tuple(name for name in SITES if name in chosen)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--dry-run", action="store_true", help="print what would be done, change nothing")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def _state_dir(args: argparse.Namespace) -> Path:
    check_name(args.name)
    given: Path | None = args.state_dir
    return DEFAULT_STATE_ROOT / args.name if given is None else given.absolute()


def _note(text: str) -> None:
    print(f"devcluster: {text}", file=sys.stderr)


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps({"meta": {"version": 1}, **facts}, indent=1))


def _install(args: argparse.Namespace) -> int:
    missing, would = _needs(args)
    if args.dry_run:
        if args.json:
            _print_json({"missing": missing, "would": would})
        else:
            print(would or "nothing to install")
        return 0
    for wanted in _wanted(args):
        install.install(_note, wanted)
    programs = _programs(args)
    if args.json:
        _print_json({"changed": bool(missing), "slurm_version": programs.version})
    else:
        print(f"Slurm {programs.version} {'was installed' if missing else 'is there already'}")
    return 0


def _needs(args: argparse.Namespace) -> tuple[list[str], str]:
    """What the wanted Slurm lacks, and what installing would do about it."""
    missing, would = [], []
    if needs_root(args.slurm):
        root = root_of(args.slurm, args.cache_dir.absolute(), accounting=ACCOUNTING in args.site)
        if not root.directory.exists():
            missing.append(str(root.directory))
            would.append(f"would unpack Slurm {args.slurm} for Debian into {root.directory}")
    for wanted in _wanted(args):
        if names := wanted.missing():
            missing += names
            argv = " ".join((*install.APT_INSTALL, *wanted.packages))
            would.append(f"not found: {', '.join(names)}; would run: {argv}")
    return missing, "; ".join(would)


def _wanted(args: argparse.Namespace) -> list[install.Wanted]:
    """What must be on the host: Slurm, if it is the host's own, and for accounting a database."""
    own = [] if needs_root(args.slurm) else [install.SLURM]
    if ACCOUNTING not in args.site:
        return own
    return [*own, *([install.SLURMDBD] if own else []), install.MARIADB]


def _programs(args: argparse.Namespace) -> SlurmPrograms:
    return choose_programs(args.slurm, args.cache_dir.absolute(), _note, accounting=ACCOUNTING in args.site)


def _up(args: argparse.Namespace) -> int:
    request = BootRequest(
        name=args.name,
        state_dir=_state_dir(args),
        shape=ClusterShape(args.gpu_nodes, args.gpus_per_node, args.cpu_nodes, args.cpus_per_node),
        tuned_scheduler=not args.default_scheduler,
        lua_plugins=args.lua_plugins,
        network=args.network,
        cgroups=args.cgroups,
        packing=args.packing,
        sites=args.site,
        own_cores=args.own_cores,
    )
    if args.dry_run:
        return _up_dry_run(request, args)
    for wanted in _wanted(args) if args.install else ():
        install.install(_note, wanted)
    record = boot(request, _programs(args), _note)
    if args.json:
        _print_json(_facts(record))
        return 0
    print(f"Slurm {record.slurm_version} is up after {record.boot_s:.1f} s: {len(record.nodes)} nodes, ", end="")
    print(f"partitions {', '.join(record.partitions)} (the first is the default)")
    if not record.configless:
        print(f"  export SLURM_CONF={record.slurm_conf}")
    if record.path_prefix:
        print(f"  export PATH={record.path_prefix}:$PATH")
    place = _place_options(args)
    print(f"  devcluster exec{place} -- sbatch --gpus=1 --wrap 'echo $CUDA_VISIBLE_DEVICES'")
    print(f"  devcluster down{place}")
    return 0


def _place_options(args: argparse.Namespace) -> str:
    """The options that lead a later command to the same cluster."""
    if args.state_dir is not None:
        return f" --state-dir {args.state_dir.absolute()}"
    return "" if args.name == DEFAULT_NAME else f" --name {args.name}"


def _up_dry_run(request: BootRequest, args: argparse.Namespace) -> int:
    root = root_of(args.slurm, args.cache_dir.absolute()).paths if needs_root(args.slurm) else None
    spec = plan_cluster(request, root)
    texts = {"slurm.conf": render.slurm_conf(spec, args.slurm if root else ""), "gres.conf": render.gres_conf(spec)}
    if ACCOUNTING in spec.sites:
        texts["slurmdbd.conf"] = slurmdbd_conf(spec)
    then = [" ".join(command) for command in commands(spec)]
    missing, would = _needs(args)
    if args.json:
        facts = {"state_dir": str(spec.state_dir), "nodes": spec.nodes, "missing": missing, "files": texts}
        _print_json({**facts, "network": _network_facts(spec.network), "commands": then})
        return 0
    if would:
        print(f"# {would}")
    print(f"# would start munged, slurmctld and {len(spec.nodes)} slurmd in {spec.state_dir}")
    if spec.network is not None:
        hosts = f"{len(spec.network.hosts)} network namespaces"
        print(f"# would make {hosts} on the bridge {spec.network.bridge} in {spec.network.subnet}")
    for name, text in texts.items():
        print(f"# {spec.state_dir}/{name}")
        print(text)
    if then:
        print("# would then run")
        print("\n".join(then))
    return 0


def _down(args: argparse.Namespace) -> int:
    state_dir = _state_dir(args)
    plan = plan_teardown(state_dir) if args.dry_run else tear_down(state_dir)
    if args.json:
        processes = [{"pid": process.pid, "command": process.command} for process in plan.processes] if plan else []
        network = [{"kind": kind, "name": name} for kind, name in plan.network] if plan else []
        groups = [str(path) for path in plan.cgroups] if plan else []
        found = {"state_dir": str(state_dir), "found": plan is not None}
        _print_json({**found, "processes": processes, "network": network, "cgroups": groups})
    elif plan is None:
        print(f"no cluster in {state_dir}: nothing to do")
    elif args.dry_run:
        for process in plan.processes:
            print(f"would kill {process.pid} {process.command}")
        for kind, name in plan.network:
            print(f"would remove {kind} {name}")
        for path in plan.cgroups:
            print(f"would remove {path}")
        print(f"would remove {state_dir}")
    else:
        also = f" and {len(plan.network)} parts of its network" if plan.network else ""
        print(f"removed {state_dir} and {len(plan.processes)} processes{also}")
    return 0


def _record(args: argparse.Namespace) -> ClusterRecord:
    state_dir = _state_dir(args)
    record = read_record(state_dir)
    if record is None:
        raise NoCluster(f"no cluster in {state_dir}. Run: devcluster up{_place_options(args)}")
    return record


def _network_facts(network: ClusterNetwork | None) -> dict[str, Any] | None:
    return None if network is None else asdict(network)


def _facts(record: ClusterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "state_dir": record.state_dir,
        "slurm_conf": record.slurm_conf,
        "slurm_version": record.slurm_version,
        "nodes": list(record.nodes),
        "partitions": list(record.partitions),
        "boot_s": record.boot_s,
        "path_prefix": record.path_prefix,
        "network": _network_facts(record.network),
        "configless": record.configless,
    }


def _status(args: argparse.Namespace) -> int:
    record = _record(args)
    status = observe(record)
    healthy = record.ready and status.healthy
    uptime_s = round(time.time() - record.created_s, 1)
    if args.json:
        _print_json(
            {
                **_facts(record),
                "healthy": healthy,
                "uptime_s": uptime_s,
                "daemons": [vars(daemon) for daemon in status.daemons],
                "node_states": [vars(node) for node in status.nodes],
                "problem": status.problem,
            }
        )
        return 0 if healthy else 1
    print(f"cluster     {record.name} (Slurm {record.slurm_version}){'' if record.ready else ', not fully up'}")
    print(f"SLURM_CONF  {record.slurm_conf}")
    print(f"uptime      {uptime_s:.0f} s")
    for daemon in status.daemons:
        how = "running" if daemon.running else "powered down" if daemon.powered_down else "DEAD"
        print(f"{daemon.name:<15} pid {daemon.pid:<8} {how}")
    for node in status.nodes:
        print(f"{node.node:<15} {node.partition:<6} {node.state:<10} CPUs A/I/O/T {node.cpus:<14} {node.gres}")
    for host in record.network.hosts if record.network is not None else ():
        print(f"{host.name:<15} {host.address:<15} namespace {host.namespace} link {host.link}")
    if status.problem:
        print(f"devcluster: {status.problem}", file=sys.stderr)
    return 0 if healthy else 1


def _exec(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("devcluster exec: no command given. Write: devcluster exec -- sinfo")
    become(command, env=_record(args).environment(os.environ))


if __name__ == "__main__":
    sys.exit(main())
