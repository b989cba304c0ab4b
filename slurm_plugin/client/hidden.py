"""What Slurm hides from users: (configuration, who asks) -> the setting by which it does. Asks Slurm in one place only.

Where a part of the cluster is hidden, nothing follows from what is not there: not that a job is alone on its nodes, and
not that none is ahead of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.users import names_of

# Words of PrivateData about what slurmdbd and the event log say, and `cloud`, which shows more instead of less:
# https://slurm.schedmd.com/slurm.conf.html#OPT_PrivateData
_HIDES_NOTHING_HERE = frozenset({"", "none", "accounts", "cloud", "events", "usage", "users"})
_NO_PLUGIN = frozenset({"", "(null)", "none", "mcs/none"})
# AdminLevel of users who see everything (validate_operator in src/slurmctld/proc_req.c).
_SEE_ALL = frozenset({"operator", "administrator"})
_ASKING_S = 10.0


def hidden_by(config: Mapping[str, str]) -> str:
    """The setting by which Slurm hides jobs, nodes, partitions or reservations from some users; empty if none does."""
    private = config.get("PrivateData", "none")
    if set(private.lower().split(",")) - _HIDES_NOTHING_HERE:
        return f"PrivateData={private}"
    labels = config.get("MCSPlugin", "")
    return "" if labels.lower() in _NO_PLUGIN else f"MCSPlugin={labels}"


def hides_nodes(config: Mapping[str, str]) -> bool:
    """Whether Slurm refuses plain users all that it knows of nodes, their own job's too (slurm_rpc_dump_nodes)."""
    return "nodes" in config.get("PrivateData", "none").lower().split(",")


def hidden_from_me(config: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """The setting by which Slurm may hide a part of the cluster from this user; empty where this user sees all of it.

    root, SlurmUser and operators do. Who is an operator slurmdbd says; where it does not say, this user counts as none.
    """
    hidden = hidden_by(config)
    return "" if not hidden or sees_everything(config, environ) else hidden


def sees_everything(config: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Whether this user is root, SlurmUser or an operator."""
    uid = os.geteuid()
    number = re.search(r"\((\d+)\)", config.get("SlurmUser", ""))
    if uid == 0 or (number is not None and int(number[1]) == uid):
        return True
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        return False
    users = ",".join(sorted(names_of(uid)))
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", users, "format=AdminLevel"]
    try:
        said = run_slurm(argv, env=environ, timeout_s=_ASKING_S).stdout
    except SlurmCommandError:
        return False
    return any(line.strip().lower() in _SEE_ALL for line in said.splitlines())
