"""What jobs of a window of time used, from Slurm's accounting or from what slurmctld still remembers. Reads only.

Called by `hetstream util` and `hetstream advise`. With slurmdbd sacct knows all jobs, and how much CPU time they used
where that is gathered. Without, slurmctld knows the jobs that run, and those that ended up to `MinJobAge` seconds ago.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from slurm_plugin.client.gres import parse_gres
from slurm_plugin.client.model import Job, Snapshot, total
from slurm_plugin.client.parse_text import FIELD_END, new_separators
from slurm_plugin.client.run import run_slurm
from slurm_plugin.client.values import moment, text_or_empty, tres
from slurm_plugin.errors import UnreadableAnswer

SACCT_FIELDS = (
    "JobIDRaw", "User", "Account", "Partition", "State", "Start", "End", "AllocCPUS", "AllocTRES", "TotalCPU",
    "TRESUsageInAve", "TimelimitRaw", "JobName",
)  # fmt: skip
_CPU_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one job held, and used of it as far as that is known.

    Attributes:
        end_s: None while it runs.
        cpu_used_s: CPU time of its processes; None where nobody gathered it.
        gpu_share: how busy its GPUs were, 0 to 1; None where nobody gathered it.
        wait_share: share of their time that its trainers wait for data, told by hetstream itself; None for other jobs.
    """

    job: str
    name: str
    user: str
    account: str
    partition: str
    cpus: int
    gpus: int
    start_s: float
    end_s: float | None
    cpu_used_s: float | None = None
    gpu_share: float | None = None
    wait_share: float | None = None


def has_accounting(snapshot: Snapshot) -> bool:
    """Whether sacct has something to say."""
    return snapshot.config.get("AccountingStorageType", "").endswith("slurmdbd")


def from_sacct(environ: Mapping[str, str], start_s: float, end_s: float) -> tuple[Usage, ...]:
    """The jobs of all users that ran within a window.

    Raises:
        SlurmCommandError: sacct failed.
        UnreadableAnswer: it printed another form.
    """
    delimiter = new_separators()[0]
    argv = [
        "sacct", "--allusers", "--noheader", "--parsable2", f"--delimiter={delimiter}",
        f"--format={','.join(SACCT_FIELDS)}", f"--starttime={_iso(start_s)}", f"--endtime={_iso(end_s)}",
        "--state=R,CD,F,CA,TO,NF,OOM,PR,DL,S,RQ",
    ]  # fmt: skip
    plain = {name: value for name, value in environ.items() if not name.startswith("SACCT_")}
    done = run_slurm(argv, env=plain | {"SLURM_TIME_FORMAT": "standard"}, hint="Check: sacctmgr show cluster")
    return parse_sacct(done.stdout, delimiter)


def parse_sacct(text: str, delimiter: str = FIELD_END) -> tuple[Usage, ...]:
    """The jobs of sacct's lines; GPU use is in the lines of their steps. The name stands last, and may have line ends.

    Raises:
        UnreadableAnswer: a line has another form.
    """
    found: dict[str, Usage] = {}
    gpu_shares: dict[str, list[float]] = {}
    lines: list[str] = []
    for line in text.split("\n"):
        # What has no delimiter goes on with the name before; who wrote it there cannot know the delimiter.
        if lines and delimiter not in line:
            lines[-1] += f"\n{line}"
        elif line:
            lines.append(line)
    for line in lines:
        values = line.removesuffix("\n").split(delimiter)
        if len(values) != len(SACCT_FIELDS):
            raise UnreadableAnswer(f"sacct printed {len(values)} fields and not {len(SACCT_FIELDS)}", line)
        row = dict(zip(SACCT_FIELDS, values, strict=True))
        job, _, step = row["JobIDRaw"].partition(".")
        try:
            if step:
                busy = tres(row["TRESUsageInAve"]).get("gres/gpuutil")
                if busy:
                    gpu_shares.setdefault(job, []).append(float(busy) / 100)
                continue
            start_s = moment(row["Start"])
            if start_s is not None:
                found[job] = _usage(job, row, start_s)
        except ValueError as exc:
            raise UnreadableAnswer(str(exc), line) from exc
    return tuple(_with_gpu_share(usage, gpu_shares.get(job, [])) for job, usage in found.items())


def _usage(job: str, row: Mapping[str, str], start_s: float) -> Usage:
    used_s = _cpu_seconds(row["TotalCPU"])
    return Usage(
        job=job,
        name=row["JobName"],
        user=row["User"],
        account=text_or_empty(row["Account"]),
        partition=row["Partition"].split(",")[0],
        cpus=int(row["AllocCPUS"] or 0),
        gpus=_gpus(row["AllocTRES"]),
        start_s=start_s,
        end_s=moment(row["End"]),
        # Zero means that nobody gathered it: no program uses no CPU at all.
        cpu_used_s=used_s or None,
    )


def _gpus(allocated: str) -> int:
    """`gres/gpu=2,gres/gpu:h200=2` are two GPUs: the types add up to the whole."""
    found = parse_gres(allocated)
    untyped = total((gres for gres in found if not gres.type), "gpu")
    return untyped or total(found, "gpu")


def _with_gpu_share(usage: Usage, shares: list[float]) -> Usage:
    if not shares:
        return usage
    return Usage(**{name: getattr(usage, name) for name in Usage.__slots__} | {"gpu_share": sum(shares) / len(shares)})


def _cpu_seconds(text: str) -> float:
    """Seconds of `1-02:03:04`, `02:03:04` or `03:04.567`."""
    if not text_or_empty(text):
        return 0.0
    match = _CPU_TIME.fullmatch(text)
    if not match:
        raise ValueError(f"CPU time {text!r}: must be [[DAYS-]HOURS:]MINUTES:SECONDS")
    days, hours, minutes, seconds = match.groups()
    return ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60 + float(seconds)


def from_queue(jobs: tuple[Job, ...]) -> tuple[Usage, ...]:
    """The jobs that squeue still shows, with those that have ended: what they held, and nothing of what they used."""
    return tuple(
        Usage(
            job=job.label,
            name=job.name,
            user=job.user,
            account=job.account,
            partition=job.partitions[0],
            cpus=job.num_cpus,
            gpus=job.count("gpu"),
            start_s=job.start_s,
            end_s=None if job.is_running else job.end_s,
        )
        for job in jobs
        if job.start_s is not None and not job.is_pending
    )


def _iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s).strftime("%Y-%m-%dT%H:%M:%S")
