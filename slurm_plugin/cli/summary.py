"""`hetstream summary`: what the loaders of an ended job took, who made it, and what the elastic controller did."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetstream.base.text import printable
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.ended_job import ended_of
from hetstream.hetjob.errors import ServiceNotFound
from hetstream.hetjob.summary import SUMMARY_FILE, load_summary, summary_line
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.slurm_plugin.cli.logs import directory_of
from hetstream.slurm_plugin.cli.output import EXIT_CODES
from hetstream.slurm_plugin.render.table import Cell, duration_words, size_words, table

_HEAD = ("LOADER", "RANK", "HOST", "EPOCHS", "STEPS", "SAMPLES", "BYTES", "WAITED", "LOCAL", "LEFT OUT")
_DECISIONS_SHOWN = 10

EPILOG = f"""\
WAITED is the share of the time inside epochs in which the training loop waited for data; LOCAL are steps that the
trainer had to make itself.

examples:
  hetstream summary 8123
  hetstream summary --json 8123
  hetstream summary .hetstream/job-8123   without Slurm

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print what a job did that has ended: its loaders, its data workers, the changes of their number."
    )
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="job id, also of a component or companion; or a job's directory")
    parser.add_argument("--json", action="store_true", help="the whole record, as it was written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    directory = directory_of(args.job)
    summary = _read(directory)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        try:
            lines = _lines(summary, directory)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise ServiceError(f"{directory / SUMMARY_FILE} is no record of a job: {error!r}") from error
        print("\n".join(map(printable, lines)))
    return 0


def _read(directory: Path) -> dict[str, Any]:
    try:
        summary, _ = load_summary(directory)
    except FileNotFoundError as error:
        running = (directory / "address").exists()
        raise ServiceNotFound(
            f"no {SUMMARY_FILE} in {directory}: "
            + ("the job runs; see: hetstream top " if running else "its job master was killed; see: hetstream logs ")
            + str(directory)
        ) from error
    except ValueError as error:
        raise ServiceError(f"{directory / SUMMARY_FILE} {error}") from error
    return summary


def _lines(summary: Mapping[str, Any], directory: Path) -> list[str]:
    name = summary.get("job_name")
    lines = [f"{directory.name}{f' ({name})' if name else ''} has ended: {summary_line(summary)}"]
    loaders = summary.get("loaders", [])
    if loaders:
        rows = [_cells(loader) for loader in sorted(loaders, key=lambda loader: (loader["pid"], loader["ordinal"]))]
        lines += ["", *table(_HEAD, rows, ("LOADER", "HOST"), color=False)]
    elastic = summary.get("elastic") or {}
    for name, whose in (("elastic", "data workers"), ("elastic_gpu", "data workers with a GPU")):
        lines += _changes((summary.get(name) or {}).get("decisions", []), whose)
    if elastic.get("step_terms"):
        terms = [StepTerm(**{name: row[name] for name in StepTerm.__struct_fields__}) for row in elastic["step_terms"]]
        lines += ["", "parts of a step:", *(f"  {term}" for term in terms)]
    if elastic.get("trainer_memory"):
        lines += ["", str(elastic["trainer_memory"])]
    ended = ended_of(summary, directory.name, "", 0.0)
    if ended and ended.advice:
        lines += ["", f"{ended.advice}: next time --trainer-cpus={ended.needed_cpus}"]
    return [*lines, "", f"more: hetstream logs {directory}; hetstream events {directory}"]


def _changes(decisions: Sequence[Mapping[str, Any]], whose: str) -> list[str]:
    """What the controller of one stage did; empty if it did nothing."""
    if not decisions:
        return []
    began = decisions[0]["time"]
    shown = [
        f"  after {duration_words(row['time'] - began)}: {row['action']} {row['count']}, because {row['reason']}"
        for row in decisions[-_DECISIONS_SHOWN:]
    ]
    return ["", f"changes of the number of {whose} ({len(decisions)}, the last {_DECISIONS_SHOWN}):", *shown]


def _cells(loader: Mapping[str, Any]) -> list[Cell]:
    waited = min(1.0, loader["wait_s"] / loader["elapsed_s"]) if loader["elapsed_s"] > 0 else 0.0
    texts = (
        str(loader.get("title") or loader["job_name"]),
        str(loader["rank"]),
        str(loader["host"]),
        f"{loader['epochs']:,}",
        f"{loader['steps']:,}",
        f"{loader['samples']:,}",
        size_words(loader["bytes"]),
        f"{waited:.0%}",
        f"{loader['local_steps']:,}",
        f"{loader['skipped']:,}",
    )
    return [(text, "") for text in texts]
