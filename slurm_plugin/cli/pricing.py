"""`--prices`, for the commands that show cost beside time; the site's own list where the user names none."""

from __future__ import annotations

import argparse
import os

from hetstream.base.errors import OptionsError, UsageError
from hetstream.base.text import printable
from hetstream.hetjob.site.address import site_value
from hetstream.slurm_plugin.cli.input_files import read_text
from hetstream.slurm_plugin.prices import Prices, parse_prices

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
    """What the user or the site says; None if neither does.

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
