"""Read a cluster with Slurm's commands: one snapshot of jobs, nodes, partitions and configuration.

Called by `CommandSlurm`. Five commands whatever the size of the cluster, none of which changes anything; a sixth while
jobs wait, before 24.05 for the nodes that they exclude, and with 26.05 for which of them want whole nodes; one more
while jobs with licenses wait, one where what jobs hold on each of their nodes decides a figure, and one where nothing
else tells a job with `--mem=0` from one that gets DefMemPerGPU. Jobs come from `squeue -O`: 0.5 kB each, against 4 kB
(22.05) and 13 kB (24.11 on) in JSON, which only says more about running jobs: what they hold on each node. Nodes come
as JSON where `scontrol` has it, from 23.02 on. Where pyslurm is installed and of slurmctld's release, it reads jobs and
nodes instead; see `pyslurm_backend.py`.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.ports import MarkedJob
from hetstream.hetjob.sbatch_options import time_limit_s
from hetstream.slurm_plugin.client import parse_json, parse_text, pyslurm_backend
from hetstream.slurm_plugin.client.gpu_defaults import GpuDefaults
from hetstream.slurm_plugin.client.held import (
    held_in_shares,
    in_question,
    parse_held,
    parts_of_cores_in_question,
    spread_in_question,
    with_closed_partitions,
    with_gpu_shares,
    with_held_gpus,
    with_shared_cpus,
    with_shares,
    with_told_gpus,
)
from hetstream.slurm_plugin.client.hidden import hidden_by, hidden_from_me
from hetstream.slurm_plugin.client.hostlist import expand
from hetstream.slurm_plugin.client.licenses import parse_licenses, with_short_licenses
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Reservation, Snapshot
from hetstream.slurm_plugin.client.parse_text import JOB_FIELDS, exclusive_of, parse_exclusive
from hetstream.slurm_plugin.client.partitions import with_open_partitions
from hetstream.slurm_plugin.client.reservations import parse_reservations, with_reservations
from hetstream.slurm_plugin.client.retry import is_denied
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.users import with_allowed_members, with_members
from hetstream.slurm_plugin.client.values import NONE_WORDS, moment, whole
from hetstream.slurm_plugin.errors import NodesHidden, UnsupportedSlurm

OLDEST = (22, 5)
SUBMISSION_FIELDS = ("JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "UserID", "Comment")
_JSON_IN_SCONTROL = (23, 2)
# squeue then says NO of all jobs that do not oversubscribe, and scontrol alone says Exclusive=NODE.
_OWN_FIELD_FOR_EXCLUSIVE = (26, 5)
# `squeue -O` knows no field for --exclude before, and `-o` does.
_FIELD_FOR_EXCLUDED = (24, 5)
# What slurmctld says of nodes that a job needs, here or in the place of blanks with underscores.
_UNAVAILABLE = re.compile(r"ReqNodeNotAvail,[ _](?:UnavailableNodes:(\S+)$|May[ _]be[ _]reserved)")
logger = logging.getLogger(__name__)


class CommandReader:
    """Reads with squeue and scontrol.

    Args:
        environ: the environment to run them in.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = plain_environ(environ)
        self._pyslurm_failed = False

    def snapshot(self, *, details: bool = False, without_nodes: bool = False) -> Snapshot:
        """The cluster now.

        Args:
            details: also what each running job holds on each of its nodes, which costs JSON of all jobs.
            without_nodes: ask for none, as Slurm keeps them from this user.

        Raises:
            SlurmCommandError: a command failed.
            NodesHidden: Slurm keeps them from this user.
            UnsupportedSlurm: slurmctld is older than 22.05.
            UnreadableAnswer: a command printed what no known version prints.
        """
        config = parse_text.parse_config(self._run("scontrol", "show", "config"))
        version = config.get("SLURM_VERSION", "")
        release = release_of(version)
        if release < OLDEST:
            raise UnsupportedSlurm(
                f"slurmctld is Slurm {version or 'of an unknown version'}: hetstream reads 22.05 and newer. "
                "Check: scontrol show config | grep SLURM_VERSION"
            )
        answer = None if details or without_nodes else self._by_pyslurm(release)
        if answer:
            source, jobs, nodes = "pyslurm", answer.jobs, answer.nodes
        else:
            source, nodes = "commands", () if without_nodes else self._nodes(release)
            jobs = self._with_sharing(release, self._with_excluded(release, self.jobs(details=details), details))
        partitions = with_allowed_members(self._partitions(), jobs)
        jobs = with_times_to_come(with_open_partitions(jobs, partitions), time.time())
        jobs = self._with_gpu_defaults(jobs, GpuDefaults(partitions, nodes, config, release))
        hidden = hidden_by(config) if without_nodes else hidden_from_me(config, self._environ)
        jobs = self._with_licenses(jobs)
        seen = Snapshot(time.time(), version, source, jobs, nodes, (), config, (), hidden, without_nodes)
        records = functools.cache(self._records)
        jobs = self._with_told_gpus(seen, records)
        reservations = with_members(self._reservations(), jobs)
        # It decides figures of nodes, and of their records scontrol then shows none.
        asked = frozenset() if without_nodes else spread_in_question(jobs, nodes, partitions, reservations)
        jobs = self._with_shares(jobs, asked, parts_of_cores_in_question(jobs, nodes, config), records)
        jobs = with_labels(with_shared_cpus(jobs, nodes, partitions), config)
        nodes = with_closed_partitions(nodes, partitions)
        jobs = with_gpu_shares(jobs, nodes)
        nodes = with_reservations(nodes, reservations, jobs)
        return Snapshot(
            taken_s=time.time(),
            version=version,
            source=source,
            jobs=with_turns(jobs, nodes, reservations, hidden),
            nodes=nodes,
            partitions=partitions,
            config=config,
            reservations=reservations,
            hidden=hidden,
            without_nodes=without_nodes,
        )

    def jobs(self, *, details: bool = False, ended: bool = False) -> tuple[Job, ...]:
        """Pending and running jobs of all partitions, hidden ones too; with `ended` also those still remembered."""
        if details:
            found = parse_json.parse_jobs(self._run("squeue", "--all", "--json"))
            # JSON has jobs that have ended, too, and what 22.05 shows of a state does not always say which.
            listed = set(self._run("squeue", "--all", "--noheader", "--format=%A").split())
            return tuple(job for job in found if str(job.job_id) in listed)
        states = ["--states=all"] if ended else []
        ends = parse_text.new_separators()
        said = self._run("squeue", "--all", *states, "--noheader", "-O", parse_text.job_format(JOB_FIELDS, *ends))
        return parse_text.parse_jobs(said, JOB_FIELDS, *ends)

    def _with_excluded(self, release: tuple[int, int], jobs: tuple[Job, ...], details: bool) -> tuple[Job, ...]:
        """The jobs, with the nodes that pending ones exclude."""
        if details or release >= _FIELD_FOR_EXCLUDED or not any(job.is_pending for job in jobs):
            return jobs
        said = self._run("squeue", "--all", "--noheader", "--states=PENDING", "--format=%A %x")
        excluded = parse_text.parse_excluded(said)
        return tuple(replace(job, excluded_nodes=excluded.get(job.job_id, ())) for job in jobs)

    def _with_sharing(self, release: tuple[int, int], jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """Pending and running jobs, with which of the pending ones want whole nodes."""
        if release < _OWN_FIELD_FOR_EXCLUSIVE:
            return tuple(replace(job, exclusive=exclusive_of(job.exclusive)) for job in jobs)
        said: dict[int, str] = {}
        if any(job.waits_for_resources for job in jobs):
            try:
                said = parse_exclusive(self._run("scontrol", "--all", "--oneliner", "show", "job"))
            except SlurmCommandError as exc:  # all other figures are known
                logger.warning("which pending jobs want whole nodes (--exclusive) is not known: %s", exc)
        return tuple(replace(job, exclusive=said.get(job.job_id, "")) for job in jobs)

    def _with_gpu_defaults(self, jobs: tuple[Job, ...], defaults: GpuDefaults) -> tuple[Job, ...]:
        """The jobs, pending ones with what their partitions give for each GPU."""
        asks_itself: dict[int, bool | None] = {}
        if defaults.in_doubt(jobs):
            try:
                asks_itself = {job.job_id: job.own_memory for job in self.jobs(details=True)}
            except SlurmCommandError as exc:  # they count as jobs that ask for no memory
                logger.warning("which pending jobs want all memory (--mem=0) is not known: %s", exc)
        return defaults.with_defaults(jobs, asks_itself)

    def _with_licenses(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """The jobs, with which licenses are too few for those that wait for resources or their turn."""
        if not any(job.waits_for_resources and job.licenses for job in jobs):
            return jobs
        return with_short_licenses(jobs, parse_licenses(self._run("scontrol", "--oneliner", "show", "licenses")))

    def _with_shares(
        self, jobs: tuple[Job, ...], asked: frozenset[int], parts_of_cores: frozenset[int], records: Callable[[], str]
    ) -> tuple[Job, ...]:
        """The jobs, those that were asked about with what they hold on each node."""
        asked |= parts_of_cores
        try:
            return with_shares(jobs, asked, records() if asked else "", parts_of_cores)
        except SlurmCommandError as exc:  # they count as if they were spread evenly
            logger.warning("what %d job(s) hold on each of their nodes is not known: %s", len(asked), exc)
            return jobs

    def _with_told_gpus(self, seen: Snapshot, records: Callable[[], str]) -> tuple[Job, ...]:
        """The jobs, with what Slurm gave to running ones where neither their requests nor their nodes say it."""
        jobs = with_held_gpus(seen.jobs, seen.nodes, others_are_hidden=seen.hides_jobs)
        nodes = None if seen.without_nodes else seen.nodes
        asked = in_question(jobs, nodes, others_are_hidden=seen.hides_jobs)
        if not asked:
            return jobs
        try:
            if nodes is None:  # scontrol --details then fails (24.11, 26.05) or crashes (22.05)
                return with_told_gpus(jobs, asked, held_in_shares(self.jobs(details=True)), nodes)[0]
            return with_told_gpus(jobs, asked, parse_held(records()), nodes)[0]
        except SlurmCommandError as exc:  # they count as in doubt, and all other figures are known
            logger.warning("what %d job(s) hold is not known, and they count as they asked: %s", len(asked), exc)
            return jobs

    def held_gpus(self) -> dict[int, tuple[Gres, ...] | None]:
        """What jobs hold and held that slurmctld remembers, by their numbers; None where that is in doubt."""
        return parse_held(self._records())

    def _records(self) -> str:
        return self._run("scontrol", "--all", "--details", "--oneliner", "show", "job")

    def living_jobs(self, uid: int) -> dict[str, str]:
        """Jobs of a user that are not over: id of each (of array tasks and components, their own) and state."""
        return {row["JobID"]: row["State"] for row in self._rows(uid, "JobID", "State")}

    def marked_jobs(self, mark: str, uid: int) -> list[MarkedJob]:
        """Jobs of a user that are not over and have this word in their comment, whatever else stands there."""
        rows = self._rows(uid, "JobID", "State", "NumCPUs", "TimeUsed", "TimeLeft", "Comment")
        return [
            MarkedJob(
                row["JobID"],
                row["State"],
                whole(row["NumCPUs"].split("-")[0]),
                time_limit_s(row["TimeUsed"]) or 0.0,
                time_limit_s(
                    row["TimeLeft"]
                ),  # None of UNLIMITED; and of INVALID: a limit that is over, or above a year
            )
            for row in rows
            if mark in row["Comment"].split()
        ]

    def job_with(self, token: str, uid: int) -> str | None:
        """The id, of an array or heterogeneous job as a whole, of this user's living job with a word in its comment."""
        for row in self._rows(uid, *SUBMISSION_FIELDS):
            if row["UserID"] == str(uid) and token in row["Comment"].split():
                if whole(row["HetJobID"]):
                    return row["HetJobID"]
                return row["JobID"] if row["ArrayTaskID"] in NONE_WORDS else row["ArrayJobID"]
        return None

    def _rows(self, uid: int, *fields: str) -> Iterator[dict[str, str]]:
        ends = parse_text.new_separators()
        asked = "-O", parse_text.job_format(fields, *ends)
        said = self._run("squeue", "--all", "--noheader", f"--user={uid}", *asked)
        return parse_text.parse_rows(said, fields, *ends)

    def end_s(self, job_id: str) -> float | None:
        """When a running job's time limit ends it, in seconds since 1970; None if Slurm does not say."""
        said = self._run("squeue", "--all", "--noheader", f"--jobs={job_id}", "--format=%e").split()
        return moment(said[0]) if said else None

    def _by_pyslurm(self, release: tuple[int, int]) -> pyslurm_backend.Answer | None:
        """What pyslurm reads; None if it is not there, of another release, or has failed this reader before."""
        if self._pyslurm_failed or not pyslurm_backend.matches(release):
            return None
        try:
            return pyslurm_backend.read(self._environ)
        except HetstreamError as exc:
            self._pyslurm_failed = True
            logger.warning("pyslurm did not read the cluster, Slurm's commands do from now on: %s", exc)
            return None

    def _nodes(self, release: tuple[int, int]) -> tuple[Node, ...]:
        argv = ["scontrol", "--all", "--details", "show", "node"]
        try:
            if release >= _JSON_IN_SCONTROL:
                return parse_json.parse_nodes(self._run(*argv, "--json"))
            return parse_text.parse_nodes(self._run(*argv, "--oneliner"))
        except SlurmCommandError as exc:
            if not is_denied(exc):
                raise
            raise NodesHidden(
                "Slurm tells this user nothing of nodes (PrivateData=nodes), and without them no figure is right. Run "
                "it as an operator or SlurmUser; what is known of jobs: hetstream jobs, hetstream why JOBID"
            ) from exc

    def _reservations(self) -> tuple[Reservation, ...]:
        return parse_reservations(self._run("scontrol", "--oneliner", "show", "reservation"))

    def _partitions(self) -> tuple[Partition, ...]:
        return parse_text.parse_partitions(self._run("scontrol", "--all", "--oneliner", "show", "partition"))

    def _run(self, *argv: str) -> str:
        # SLURM_CLUSTERS may name several clusters, of which scontrol reads none.
        named = [f"{name}={value}" for name in ("SLURM_CONF", "SLURM_CLUSTERS") if (value := self._environ.get(name))]
        hint = ", and ".join(["Check: scontrol ping", *named])
        return run_slurm(argv, env=self._environ, hint=hint).stdout


def with_turns(
    jobs: Iterable[Job], nodes: Iterable[Node], reservations: Iterable[Reservation] = (), hidden: str = ""
) -> tuple[Job, ...]:
    """The jobs, with which of them Slurm says that nodes are not available which it keeps for jobs ahead.

    Behind a job that finds no room slurmctld takes all nodes of its partition for unavailable, and says of those that a
    job asks for by name that they are, or that they may be reserved for another job (schedule in job_scheduler.c,
    select_nodes in node_scheduler.c; seen on 22.05, 24.11 and 26.05).

    Args:
        jobs: any.
        nodes: all that are shown, as jobs without a reservation see them.
        reservations: all that are shown.
        hidden: a setting by which there may be others.
    """
    start_jobs = {node.name for node in nodes if node.starts_jobs}
    of_nobody = start_jobs.difference(*(reservation.all_nodes for reservation in reservations))

    def is_of_turn(job: Job) -> bool:
        found = _UNAVAILABLE.match(job.reason) if job.is_pending else None
        if found is None:
            return False
        if found[1] is None:
            return not hidden and bool(job.required_nodes) and of_nobody.issuperset(job.required_nodes)
        try:
            return start_jobs.issuperset(expand(found[1]))
        except ValueError:
            return False

    return tuple(replace(job, reason_is_of_turn=True) if is_of_turn(job) else job for job in jobs)


def with_times_to_come(jobs: Iterable[Job], now_s: float) -> tuple[Job, ...]:
    """The jobs, with when pending ones may begin for which Slurm still names resources or turns.

    A time that is set later (`scontrol update StartTime`) becomes a reason when slurmctld next builds its queue.
    """
    return tuple(
        replace(job, begins_s=job.eligible_s)
        if job.is_pending and job.is_admitted and job.eligible_s is not None and job.eligible_s > now_s
        else job
        for job in jobs
    )


def with_labels(jobs: tuple[Job, ...], config: Mapping[str, str]) -> tuple[Job, ...]:
    """The jobs, with which of them share nodes with those of their MCS label alone, by the site's MCSParameters.

    With `select` all do, with `noselect` none, otherwise those that say so (slurm_mcs_get_select in
    src/common/slurm_mcs.c).
    """
    said = config.get("MCSParameters", "").lower().partition(":")[0]
    if "noselect" in said:
        return tuple(replace(job, exclusive="") if job.exclusive == "MCS" else job for job in jobs)
    if "select" not in said.replace("ondemandselect", ""):
        return jobs
    return tuple(replace(job, exclusive="MCS") if job.mcs_label and not job.exclusive else job for job in jobs)


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without a user's own defaults, which would change what is printed: SQUEUE_FORMAT, SINFO_SORT.

    Times are asked for in seconds since the epoch: local time has an hour twice each autumn.
    """
    own = ("SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_")
    # Of a federation they show all clusters' jobs and nodes where the site says so (FederationParameters=fed_display);
    # sacct is told the cluster.
    local = {f"{name}LOCAL": "1" for name in own if name != "SACCT_"}
    return (
        {name: value for name, value in environ.items() if not name.startswith(own)}
        | local
        | {
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # all indices of an array: squeue ends them with "..." after 64 characters
        }
    )


def release_of(version: str) -> tuple[int, int]:
    """(22, 5) of `22.05.8` or `slurm-wlm 22.05.8`; (0, 0) if there is no version in it."""
    match = re.search(r"(?<!\d)(\d{1,9})\.(\d{1,9})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
