"""What a job's class changes in its request: the partition, and words in its Comment that say so to everybody.

Called by `convert.py` for a script with `--job-class` or `--opportunistic-after`. Slurm and its guard know classes by
partitions and QOS alone; so what a user says must agree with the partition, or a place is chosen that agrees.

    ConversionError
    └── ClassNotPossible     the class and the rest of the request contradict each other
"""

from __future__ import annotations

from collections.abc import Mapping

from hetstream.hetjob.errors import ConversionError
from hetstream.hetjob.plan import Change
from hetstream.hetjob.request import asks_for_gpus
from hetstream.hetjob.sbatch_options import SbatchOption, SbatchOptions, time_limit_s
from hetstream.hetjob.site.address import site_value
from hetstream.hetjob.spec import GUARANTEED, OPPORTUNISTIC, JobSpec

# Where the site says which partitions are for opportunistic jobs: names with spaces between them.
PARTITIONS_VARIABLE = "HETSTREAM_OPPORTUNISTIC_PARTITIONS"
# In the environment that sbatch is called in: the class of a job that says nothing of it.
CLASS_VARIABLE = "HETSTREAM_JOB_CLASS"
# Words of a job's Comment, which squeue shows: the packer and all tools read them there.
CLASS_MARK, AFTER_MARK = "hetstream:class=", "hetstream:opportunistic-after="
_ADVICE = (
    "it gets one GPU on each node; for more, or for more memory, write --comment='hetstream:gpus=2 "
    "hetstream:gpu-memory=16G'"
)


def opportunistic_partitions(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The partitions of opportunistic jobs, by the environment or the site's file; empty where neither names any."""
    return tuple((site_value(PARTITIONS_VARIABLE, environ) or "").replace(",", " ").split())


class ClassNotPossible(ConversionError):
    """A class that contradicts the rest of the request."""


def class_overrides(
    spec: JobSpec, options: SbatchOptions, opportunistic: tuple[str, ...], name: str
) -> tuple[list[SbatchOption], list[Change]]:
    """What the job gets beside what it asks for, with the reasons.

    Args:
        spec: of the job. Without a class, or a time after which it changes, it gets nothing.
        options: of the script and the command line.
        opportunistic: partitions of opportunistic jobs, as far as the site names them.
        name: of the script, for messages.

    Raises:
        ClassNotPossible: see there.
    """
    if spec.job_class is None and spec.opportunistic_after is None:
        return [], []
    overrides: list[SbatchOption] = []
    changes: list[Change] = []
    asked = [part for part in (options.value("partition") or "").split(",") if part]
    matching = [part for part in asked if part in opportunistic]
    if spec.job_class != OPPORTUNISTIC:
        if matching:
            raise ClassNotPossible(
                f"{name}: --job-class={GUARANTEED}, and partition {matching[0]} is for opportunistic jobs. Remove one "
                "of the two"
            )
    else:
        _check_opportunistic(asked, matching, options, opportunistic, name)
        if not asked:
            overrides.append(_option("partition", opportunistic[0]))
            why = f"--job-class={OPPORTUNISTIC}: it starts on a GPU that another job leaves, chosen by the site"
            changes.append(Change(f"--partition={opportunistic[0]}", why))
    marks = [f"{CLASS_MARK}{spec.job_class or GUARANTEED}"]
    if spec.opportunistic_after is not None:
        marks.append(f"{AFTER_MARK}{time_limit_s(spec.opportunistic_after):.0f}")
    comment = " ".join([*marks, *(options.value("comment") or "").split()])
    overrides.append(_option("comment", comment))
    changes.append(Change(f"--comment={comment!r}", "its class stands there for the packer, squeue and hetstream jobs"))
    return overrides, changes


def _check_opportunistic(
    asked: list[str], matching: list[str], options: SbatchOptions, opportunistic: tuple[str, ...], name: str
) -> None:
    if asks_for_gpus(options):
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}, and it asks for GPUs: the site chooses the one that it shares. "
            f"Remove --gpus and --gres=gpu; {_ADVICE}"
        )
    if asked and opportunistic and len(matching) < len(asked):
        other = next(part for part in asked if part not in matching)
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}, and partition {other} is not for opportunistic jobs: write "
            f"--partition={opportunistic[0]}, or no partition"
        )
    if not asked and not opportunistic:
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}: nothing here names a partition of opportunistic jobs. Name it with "
            f"--partition, or have the site set {PARTITIONS_VARIABLE} in /etc/hetstream/daemon.env"
        )


def _option(name: str, value: str) -> SbatchOption:
    return SbatchOption(name, value, "hetstream", (f"--{name}={value}",))
