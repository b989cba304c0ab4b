"""The `hetstream` command: a file for each family of verbs, with `add_VERB_arguments` and `run_VERB`.

Verbs are imported only when they are called, so that reading commands start without the data plane or torch.
Data goes to stdout, notes and errors to stderr. Exit codes: 0 done, 1 the operation failed, 2 the command line or a
script is wrong; `hetstream sbatch` and `hetstream run` pass on the exit code of what they started.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import hetstream
from hetstream.base.errors import HetstreamError, OptionsError, UsageError
from hetstream.base.files import UntrustedFile
from hetstream.base.text import PrintableFormatter, printable, shortened
from hetstream.slurm_plugin.cli.commands import ACTIONS, add_command

# What `hetstream` alone prints, in groups.
GROUPS = {
    "your job": {
        "run": "run a program with local data workers, without Slurm",
        "sbatch": "submit an sbatch script as a heterogeneous job",
        "convert": "print the heterogeneous script that an sbatch script becomes",
        "job": "show a job in any state: why it waits, what it does, what it did",
        "ckpt": "list, check, convert and clean up checkpoints",
        "migrate": "move a running training job to other nodes, without a step lost",
    },
    "the cluster": {
        "why": "say what a pending job waits for, and what would let it start",
        "jobs": "show the queue: what jobs hold, and what pending ones wait for",
        "frag": "show which free CPUs and GPUs no pending job can use",
        "util": "show how much of the cluster was allocated, and was of use",
        "advise": "list jobs that would gain from data workers",
        "report": "draw the cluster's state and history as one HTML page",
    },
    "for the admin": {
        "doctor": "find problems in the cluster's configuration, with the fix",
        "site": "install hetstream for all users; run and steer the site daemon",
        "gpu": "share GPUs among a guaranteed job and opportunistic ones",
        "simulate": "say what another policy would have done to the cluster",
        "exporter": "serve figures to Prometheus, with a dashboard for Grafana",
        "serve": "show the page of `report` live",
    },
}
VERBS = {verb: summary for group in GROUPS.values() for verb, summary in group.items()}
# Not in the list: nobody needs it who uses or runs hetstream; nor does one twice.
INTERNAL = "internal"
UNLISTED = (INTERNAL, "completion")
# Words that one may look for, with what does it.
_ELSEWHERE = {
    "explain": "run --explain",
    **dict.fromkeys(("top", "status", "summary", "efficiency"), "job"),
    **{word: f"job --{word}" for word in ("events", "logs", "clean")},
    **dict.fromkeys(("checkpoint", "checkpoints", "restore"), "ckpt"),
    **dict.fromkeys(("queue", "squeue", "list"), "jobs"),
    **{"submit": "sbatch", "help": "--help", "version": "--version"},
    "opp": "gpu jobs",
    "packer": "gpu pack",
    "coordinator": "internal coordinator",
    **{word: f"site {word}" for word in ("daemon", "policy", "install", "uninstall")},
    **{word: f"internal {word}" for word in ("dispatcher", "worker", "master", "filter", "writer")},
}
# What a write says that finds no room; it names no file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_parser(only: str | None = None, action: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with `only`, import that verb alone, and with `action` that of it, and leave the others as help
    lines."""
    parser = _Parser(prog="hetstream", description="CPU data workers for GPU jobs on Slurm.")
    parser.add_argument("--version", action="version", version=f"hetstream {hetstream.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="debug log lines and tracebacks on stderr")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=argparse.ArgumentParser)
    for verb, summary in {**VERBS, **dict.fromkeys(UNLISTED, "")}.items():
        if only in (None, verb):
            add_command(subparsers, verb, summary, verb, action)
        elif summary:
            subparsers.add_parser(verb, help=summary)
    return parser


class _Parser(argparse.ArgumentParser):
    """Lists verbs by group."""

    def format_help(self) -> str:
        """Return what `--help` prints."""
        lines = ["usage: hetstream [-h] [--version] [-v] VERB ...", "", self.description or ""]
        for group, verbs in GROUPS.items():
            lines += ["", f"{group}:", *(f"  {verb:<10} {summary}" for verb, summary in verbs.items())]
        lines += [
            "",
            "Options of a verb: hetstream VERB --help. -v shows debug lines and tracebacks.",
            "Completion in your shell: hetstream completion --help",
        ]
        return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. The console script `hetstream` is this function."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, action, *_ = *(word for word in arguments if not word.startswith("-")), None, None
    if not arguments:
        print(build_parser("").format_help(), end="")
        return 0
    if verb is not None and verb not in VERBS and verb not in UNLISTED:
        return _refuse("hetstream", "verb", verb, VERBS, _ELSEWHERE)
    if arguments == [verb] and verb in ACTIONS:
        arguments.append("--help")
    actions = ACTIONS[verb][1] if verb in ACTIONS else {}
    if action is None or action not in actions:
        # A word that no action can have may be the value of an option; argparse then says what is wrong.
        if action is not None and actions and arguments[arguments.index(verb) + 1] == action:
            return _refuse(f"hetstream {verb}", "action", action, actions, {})
        action = None
    name = f"hetstream {verb}" if action is None else f"hetstream {verb} {action}"
    args, unknown = build_parser(verb or "", action).parse_known_args(arguments)
    if hasattr(args, "words") and not any(word.startswith("-") for word in unknown):
        # argparse takes a list of words in one piece: what stands behind an option it leaves.
        args.words, unknown = [*args.words, *unknown], []
    if unknown:
        return _refuse_option(args.of_verb, unknown[0].partition("=")[0])
    return call(name, args)


def _refuse_option(parser: argparse.ArgumentParser, word: str) -> int:
    """Say what a user may have meant by an option that a verb does not have, with the verb's own usage."""
    known = [option for option in vars(parser)["_option_string_actions"] if option.startswith("--")]
    near = get_close_matches(word, known, n=2, cutoff=0.75)
    parser.print_usage(sys.stderr)
    advice = f"Did you mean {' or '.join(near)}?" if near else f"See: {parser.prog} --help"
    print(f"{parser.prog}: {printable(shortened(word, 40))} is not known here. {advice}", file=sys.stderr)
    return 2


def _refuse(command: str, kind: str, word: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> int:
    """Say what a user may have meant by a word that is no verb or action."""
    meant = [elsewhere[word]] if word in elsewhere else get_close_matches(word, known, n=3)
    advice = f"Did you mean {', '.join(meant)}?" if meant else f"See: {command} --help"
    print(f"{command}: {printable(shortened(word, 40))} is no {kind}. {advice}", file=sys.stderr)
    return 2


def call(name: str, args: argparse.Namespace) -> int:
    """Run what the parser chose and return its exit code, with every error one line on stderr that begins with `name`.

    Args:
        name: What the user typed, such as `hetstream why`.
        args: `run`, a function of these arguments, and `verbose`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO, handlers=[handler])
    # A name that the terminal's encoding lacks must not end the command. Python does the same for stderr by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (HetstreamError, UntrustedFile) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("%s failed", name)
        # The lines are ours; what stands in them may be from a file.
        text = "\n".join(map(printable, str(error).split("\n")))
        print(f"{name}: {text}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | OptionsError) else 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has enough.
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in _FULL and error.filename is None and not args.verbose:
            _flush_or_drop()
            problem = f"{error.strerror}: what it writes, to stdout or a file, is cut off"
            print(f"{name}: {problem}", file=sys.stderr)
            return 1
        # A path that the user gave cannot be read or written; an error without a path is a fault of ours.
        if error.filename is None or args.verbose:
            raise
        path = str(error.filename)
        print(
            f"{name}: {printable(path)}: {error.strerror}. Check: namei -l {printable(shlex.quote(path))}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _flush_or_drop() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Let nothing more be written, not even by Python at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
