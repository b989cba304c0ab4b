"""The cluster for commands that only look: as the site daemon read it last, or as slurmctld says it now.

The daemon is asked first where the site has one, so that a hundred users who look cost slurmctld nothing. Whatever
keeps the daemon from answering, slurmctld is asked instead.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hetstream.base.errors import HetstreamError, OptionsError, UsageError
from hetstream.base.text import printable
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import ADDRESS_VARIABLE, SiteSettings, ask, read_settings
from hetstream.hetjob.site.messages import AskGpus, AskReading, RefuseGpus, RefuseReading, ShowGpus, ShowReading
from hetstream.hetjob.site.site_file import site_value
from hetstream.slurm_plugin.client.model import Cluster, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.errors import NodesHidden
from hetstream.slurm_plugin.insight.last_reading import unpack
from hetstream.slurm_plugin.insight.prices import Prices, parse_prices
from hetstream.slurm_plugin.insight.shared_gpus import SharedGpus

logger = logging.getLogger(__name__)

# Older ones say little about who waits now. The daemon reads once a minute unless told otherwise.
MAX_AGE_S = 300.0
# A daemon that is there answers within milliseconds; slurmctld itself takes about a tenth of a second.
_ANSWER_S = 2.0
# Who sets one of these may mean another cluster than the daemon of this host reads.
_OTHER_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")


def add_fresh_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--fresh`."""
    parser.add_argument(
        "--fresh", action="store_true", help="ask slurmctld, and not the site daemon for its last reading"
    )


def read_cluster(args: argparse.Namespace) -> Snapshot:
    """Return the cluster, as `--fresh` asks for it. What keeps a daemon from answering is said on stderr."""
    return cluster_of(args, lambda text: print(f"hetstream: {printable(text)}", file=sys.stderr)).snapshot()


def read_cluster_or_jobs(args: argparse.Namespace) -> Snapshot:
    """Return the same; where Slurm tells this user of no node, without nodes."""
    try:
        return read_cluster(args)
    except NodesHidden:
        return CommandSlurm().seen()


def cluster_of(
    args: argparse.Namespace, say: Callable[[str], object] = logger.warning, max_age_s: float = MAX_AGE_S
) -> Cluster:
    """Return what to read the cluster from, as `--fresh` asks for it.

    Args:
        args: parsed.
        say: told why a daemon did not answer, once for each reason.
        max_age_s: of a reading that counts.
    """
    slurm = CommandSlurm()
    return slurm if args.fresh else DaemonFirst(slurm, say, max_age_s, os.environ)


class DaemonFirst:
    """Asks the site daemon, then slurmctld.

    Args:
        slurm: asked where the daemon does not answer.
        say: told why it did not, once for each reason. What the daemon refuses is no news: it is a rule of the site.
        max_age_s: of a reading that counts.
        environ: says where the daemon is.
    """

    def __init__(
        self, slurm: Cluster, say: Callable[[str], object], max_age_s: float, environ: Mapping[str, str]
    ) -> None:
        self._slurm = slurm
        self._say = say
        self._max_age_s = max_age_s
        self._environ = environ
        self._said = ""

    def snapshot(self) -> Snapshot:
        """Return the cluster.

        Raises:
            HetstreamError: slurmctld was asked, and could not be read.
        """
        try:
            found = last_reading(self._environ)
        except HetstreamError as error:
            if str(error) != self._said:
                self._said = str(error)
                self._say(f"slurmctld is asked, as the site daemon has not answered: {error}")
            return self._slurm.snapshot()
        if found is None or time.time() - found.taken_s > self._max_age_s:
            return self._slurm.snapshot()
        return found


def last_reading(environ: Mapping[str, str]) -> Snapshot | None:
    """Return what the site daemon read last; None if there is no daemon for this cluster, or it keeps that to itself.

    Raises:
        ConfigError: its address is of another form, or names a user that is unknown here.
        SiteError: it does not answer, or not to the question.
    """
    settings = _daemon(environ)
    if settings is None:
        return None
    answer = ask(settings, AskReading(), _ANSWER_S)
    if isinstance(answer, RefuseReading):
        logger.debug("the site daemon shows no reading: %s", answer.reason)
        return None
    if not isinstance(answer, ShowReading):
        raise SiteError(f"the daemon at {settings.address} answers {answer!r} to a question for its last reading")
    return unpack(answer.snapshot)


def shared_gpus(environ: Mapping[str, str] = os.environ) -> SharedGpus | None:
    """Return what the site daemon knows of shared GPUs; None if there is no daemon for this cluster."""
    try:
        settings = _daemon(environ)
        if settings is None:
            return None
        answer = ask(settings, AskGpus(), _ANSWER_S)
    except HetstreamError as error:
        return SharedGpus(missing=str(error))
    if isinstance(answer, ShowGpus):
        return SharedGpus(answer.nodes, answer.wait_shares)
    why = answer.reason if isinstance(answer, RefuseGpus) else f"it answers {answer!r}"
    return SharedGpus(missing=f"the site daemon shows none: {why}")


def _daemon(environ: Mapping[str, str]) -> SiteSettings | None:
    """Where the daemon of this cluster is; None without one."""
    if ADDRESS_VARIABLE not in environ and any(name in environ for name in _OTHER_CLUSTER):
        return None
    settings = read_settings(environ)
    return settings if settings.address else None


# Files that a user names for a command to read: whole, and no more of them than such a file may have.


def read_text(path: str, what: str, most_characters: int) -> str:
    """Return a text of UTF-8, with or without a mark of its bytes' order; what is no UTF-8 is escaped.

    Args:
        path: as the user gave it; it may be a pipe.
        what: it is to be, in words.
        most_characters: that such a text has.

    Raises:
        UsageError: it has more, or no end (a device).
        OSError: it cannot be read.
    """
    with Path(path).open(encoding="utf-8-sig", errors="backslashreplace") as file:
        text = file.read(most_characters + 1)
    if len(text) > most_characters:
        raise UsageError(f"{printable(path)}: more than {most_characters:,} characters are no {what}. Check its name")
    return text


# `--prices`, for the commands that show cost beside time; the site's own list where the user names none.

PRICES = "HETSTREAM_PRICES"
# A list of prices is a few lines.
_MOST_CHARACTERS = 10_000


def add_prices_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare `--prices`."""
    parser.add_argument(
        "--prices",
        metavar="FILE|TEXT",
        help=f"show cost, too: gpu_hour=2.5,cpu_hour=0.04,currency=EUR, or a file of such lines (default: {PRICES} of "
        "the environment or the site)",
    )


def prices_of(args: argparse.Namespace) -> Prices | None:
    """Return what the user or the site says; None if neither does.

    Raises:
        UsageError: it is no list of prices.
        OSError: the file cannot be read.
    """
    named, origin = args.prices, "--prices"
    if named is None:
        named, origin = site_value(PRICES, os.environ), PRICES
    if not named:
        return None
    text = named
    if "=" not in named:
        text = read_text(named, "list of prices", _MOST_CHARACTERS)
    try:
        return parse_prices(text)
    except OptionsError as error:
        raise UsageError(f"{origin}={printable(named)}: {error}") from error
