"""Man pages and bash completion, made from the parsers of the command line. Called by `hetstream site install`.

Verbs that hand their words on (`sbatch`, `run`, ...) have no parser of their own to read: their help text is shown.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping

# An option at the beginning of a line of a help text; elsewhere a text may speak of those of other programs.
_OPTION = re.compile(r"^ *(--[a-z][a-z-]*[a-z])", re.MULTILINE)


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The listed sub-parsers of a parser by name, in order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {listed.dest: action.choices[listed.dest] for listed in action._choices_actions}
    return {}


def man_pages(
    parser: argparse.ArgumentParser, summaries: Mapping[str, str], help_texts: Mapping[str, str], version: str
) -> dict[str, str]:
    """The manual of a command and of each of its verbs, in section 1.

    Args:
        parser: of the command, with all verbs.
        summaries: what each verb does, in a line.
        help_texts: of the verbs that argparse does not know the options of.
        version: for the footer.

    Returns:
        The roff text of each page by file name.
    """
    program = parser.prog
    lines = [*_head(program, parser.description or "", version), *_synopsis(parser.format_usage())]
    lines += [".SH COMMANDS"]
    for verb, summary in summaries.items():
        lines += [".TP", rf"\fB{_text(program)}\-{_text(verb)}\fR(1)", _text(summary)]
    lines += [*_options(parser), ".SH EXIT STATUS", "0 done, 1 the operation failed, 2 the command line is wrong."]
    pages = {f"{program}.1": "\n".join(lines) + "\n"}
    for verb, sub in verbs_of(parser).items():
        head = _head(f"{program}-{verb}", summaries[verb], version)
        body = _verbatim("DESCRIPTION", help_texts[verb]) if verb in help_texts else _verb(sub)
        pages[f"{program}-{verb}.1"] = "\n".join([*head, *body, ".SH SEE ALSO", rf"\fB{program}\fR(1)"]) + "\n"
    return pages


def bash_completion(parser: argparse.ArgumentParser, help_texts: Mapping[str, str]) -> str:
    """A completion script: verbs, their options and sub-commands; file names everywhere else."""
    program = parser.prog
    cases = []
    for verb, sub in verbs_of(parser).items():
        nested = verbs_of(sub)
        options = _OPTION.findall(help_texts[verb]) if verb in help_texts else [*_options_of(sub)]
        options += [option for action in nested.values() for option in _options_of(action)]
        candidates = [*nested, *dict.fromkeys(options)]
        cases.append(f"    {verb}) words={shlex.quote(' '.join(candidates))} ;;")
    verbs = shlex.quote(" ".join([*verbs_of(parser), *_options_of(parser)]))
    return "\n".join(
        [
            f"# bash completion for {program}; made by `{program} install`.",
            f"_{program}() {{",
            '  local current="${COMP_WORDS[COMP_CWORD]}" words=',
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            f'  [ "$COMP_CWORD" -eq 1 ] && words={verbs}',
            '  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
            "}",
            f"complete -o default -F _{program} {program}",
            "",
        ]
    )


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The long options that a parser takes; what its texts tell of those of other programs is none of them."""
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            yield from (option for option in action.option_strings if option.startswith("--"))


def _head(name: str, summary: str, version: str) -> list[str]:
    title = f'.TH "{name.upper()}" "1" "" "hetstream {version}" "User Commands"'
    return [title, ".SH NAME", rf"{_text(name)} \- {_text(summary.rstrip('.'))}"]


def _verb(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from _synopsis(parser.format_usage())
    if parser.description:
        yield from (".SH DESCRIPTION", _text(parser.description))
    yield from _options(parser)
    for name, sub in verbs_of(parser).items():
        yield f".SH {_text(name.upper())}"
        yield from _lines(sub.format_help())
    if parser.epilog:
        yield from _verbatim("NOTES", parser.epilog)


def _synopsis(usage: str) -> list[str]:
    return [".SH SYNOPSIS", _text(" ".join(usage.removeprefix("usage: ").split()))]


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    if actions:
        yield ".SH OPTIONS"
    formatter = parser._get_formatter()
    for action in actions:
        if action.help is not argparse.SUPPRESS:
            yield from (".TP", rf"\fB{_text(formatter._format_action_invocation(action))}\fR")
            yield _text(formatter._expand_help(action) if action.help else "")


def _verbatim(title: str, text: str) -> list[str]:
    return [f".SH {title}", *_lines(text)]


def _lines(text: str) -> list[str]:
    return [".nf", *(_text(line) for line in text.strip().splitlines()), ".fi"]


def _text(text: str) -> str:
    """Escape what roff would read as commands: backslashes, hyphens that must stay so, dots that begin a line."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in escaped.split("\n"))
