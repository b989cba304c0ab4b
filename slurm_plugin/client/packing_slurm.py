"""What the packer needs of Slurm beside the rest: its notes in jobs, what a job really got, requeueing, switches."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client import parse_text
from hetstream.slurm_plugin.client.accounting import has_accounting
from hetstream.slurm_plugin.client.model import Gres, Snapshot
from hetstream.slurm_plugin.client.read import parse_held, plain_environ
from hetstream.slurm_plugin.client.run import Failure, failure_of, run_slurm
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import expand, parse_gres, text_or_empty

_NODE_GRES = re.compile(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S+)")
_ENDED = ("FAILED", "COMPLETED")
_FIELDS = ("JobID", "State", "admin_comment", "requeue")
# Neither slurmctld nor a command may hold up the others for longer.
_COMMAND_S = 30.0


@dataclass(frozen=True, slots=True)
class JobNotes:
    """What a job's record says that `Job` does not have.

    Attributes:
        admin_comment: which administrators alone can change.
        can_be_requeued: `--requeue`, or the site's JobRequeue.
        has_ended: by itself, as far as Slurm knows: as FAILED or COMPLETED.
    """

    admin_comment: str
    can_be_requeued: bool
    has_ended: bool = False


class PackingSlurm(CommandSlurm):
    """Slurm's commands, for the packer. Its user needs an administrator's rights (decision 14)."""

    def notes(self, partitions: Collection[str]) -> dict[int, JobNotes]:
        """Return the notes in the jobs of these partitions, by the jobs' own numbers; also of jobs that have ended
        lately.
        """
        ends = parse_text.new_separators()
        argv = ["squeue", "--all", "--local", "--noheader", f"--partition={','.join(sorted(partitions))}"]
        said = self._ask(*argv, "--states=all", "-O", parse_text.job_format(_FIELDS, *ends))
        return {
            int(row["JobID"]): JobNotes(
                text_or_empty(row["admin_comment"]),
                row["requeue"].strip() in ("1", "yes"),
                row["State"].strip() in _ENDED,
            )
            for row in parse_text.parse_rows(said, _FIELDS, *ends)
        }

    def got(self, job_id: str) -> tuple[Gres, ...] | None:
        """Return the GRES that a running job was given, on all nodes together; None where that is in doubt.

        The request says nothing of it: 22.05 ignores some forms of it.
        """
        said = self._ask("scontrol", "--all", "--details", "--oneliner", "show", "job", job_id)
        found = list(parse_held(said).values())
        return found[0] if len(found) == 1 else None

    def gpu_spots(self, job_id: str) -> tuple[tuple[str, int], ...]:
        """Node and number of each GPU of a running job; empty where that is in doubt."""
        return parse_gpu_spots(self._ask("scontrol", "--all", "--details", "--oneliner", "show", "job", job_id))

    def accounts(self, snapshot: Snapshot) -> tuple[str, ...] | None:
        """Slurm's accounts; None where the cluster keeps no accounting, so that a job may name any."""
        if not has_accounting(snapshot):
            return None
        return tuple(self._ask("sacctmgr", "--noheader", "--parsable2", "show", "account", "format=account").split())

    def controller(self) -> str:
        """Return the host whose slurmctld answers: the first that is up, in the order in which they take over."""
        return parse_controller(self._ask("scontrol", "ping"))

    def submit_own(self, script: str, options: Sequence[str]) -> str:
        """Submit a job of this user; its number."""
        return self.submit(script, options)

    def hold(self, job_id: str) -> None:
        """Keep a pending job from starting, by the owner's hold in Slurm's books: one that is an operator's is his."""
        self._act(["scontrol", "uhold", job_id], job_id)

    def requeue_held(self, job_id: str) -> None:
        """End a running job, and keep it as a held one."""
        self._act(["scontrol", "requeuehold", job_id], job_id)

    def switches(self) -> dict[str, tuple[str, ...]]:
        """Return the switches above each node, the highest first; of no node where the cluster does not tell."""
        try:
            return parse_topology(self._ask("scontrol", "show", "topology"))
        except SlurmCommandError as error:
            if failure_of(error) is not Failure.REFUSED:  # nobody has said that there is none
                raise
            return {}  # there is no topology plugin: 26.05 says so with 1

    def _ask(self, *argv: str) -> str:
        environ = plain_environ(self._environ)
        return run_slurm(argv, env=environ, timeout_s=_COMMAND_S, hint="Check: scontrol ping").stdout


def parse_controller(text: str) -> str:
    """Return the first host that is up, from lines such as `Slurmctld(primary) at ctl1 is UP`; empty if none is."""
    found = re.search(r"^Slurmctld\(\S+\) at (\S+) is UP", text, re.MULTILINE)
    return found[1] if found else ""


def parse_gpu_spots(text: str) -> tuple[tuple[str, int], ...]:
    """Node and number of each GPU, from `scontrol --details --oneliner show job`; empty where there are two records."""
    records = [line for lines in parse_text.records_of_jobs(text).values() for line in lines]
    if len(records) != 1:
        return ()
    try:
        return tuple(
            (node, index)
            for nodes, gres in _NODE_GRES.findall(records[0])
            for node in expand(nodes)
            for held in parse_gres(gres)
            if held.name == "gpu"
            for index in held.indices
        )
    except ValueError:
        return ()


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """Return the switches above each node, from lines such as `SwitchName=s0 Level=0 LinkSpeed=1 Nodes=g[1-4]`."""
    above: dict[str, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        switch = re.match(r"SwitchName=(\S+) Level=(\d+) .*?Nodes=(\S+)", line)
        if switch:
            try:
                for node in expand(switch[3]):
                    above.setdefault(node, []).append((-int(switch[2]), switch[1]))
            except ValueError:
                continue
    return {node: tuple(name for _, name in sorted(switches)) for node, switches in above.items()}
