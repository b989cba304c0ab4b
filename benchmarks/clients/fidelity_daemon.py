"""The site daemon with other times than the usual, for a cluster on which time is compressed.

It is `hetstream site daemon --allocate` but for its `ReportIntervals`. Its argument is JSON: socket, state_dir,
partition, interval_s, and the fields of `ReportIntervals` and of `MoveCost`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from hetstream.hetjob.site.client import SiteSettings, UnixAddress
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.server import Daemon
from hetstream.slurm_plugin.daemon.settings import DaemonOptions, ReportIntervals
from hetstream.slurm_plugin.daemon.store import Store
from hetstream.slurm_plugin.policy.policies import MoveCost


def main() -> int:
    """Serve until SIGTERM."""
    request = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    pace = ReportIntervals(**{**request["pace"], "move": MoveCost(**request["pace"]["move"])})
    options = DaemonOptions(
        SiteSettings(UnixAddress(Path(request["socket"])), None),
        Path(request["state_dir"]),
        True,
        (request["partition"],),
        request["interval_s"],
        pace,
    )

    async def serve(store: Store) -> None:
        await Daemon(options, CommandSlurm(), store).run()

    with Store(options.state_dir) as store:
        asyncio.run(serve(store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
