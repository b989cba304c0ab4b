"""Run a command of hetstream's as another user, to whom these files may be closed: import, then give up every right.

python as_user.py UID daemon --address ...; python as_user.py UID jobs --json
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401, looked up by name when a socket first meets a host name
import logging
import os
import sys

import hetstream.base.web
import hetstream.slurm_plugin.daemon.server
import hetstream.slurm_plugin.daemon.store
from hetstream.base.errors import HetstreamError
from hetstream.slurm_plugin.cli import build_parser

with contextlib.suppress(HetstreamError):  # without prometheus-client
    import hetstream.slurm_plugin.render.metrics  # noqa: F401

if __name__ == "__main__":
    uid = int(sys.argv[1])
    args = build_parser(sys.argv[2], sys.argv[3]).parse_args(sys.argv[2:])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    sys.exit(args.run(args))
