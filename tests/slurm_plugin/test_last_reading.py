"""The site daemon's last reading: what it holds, who may see it, and the commands that ask for it first."""

from __future__ import annotations

import json
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded
from running_daemon import RunningDaemon, WaitUntil, answer_to_stranger

from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.messages import (
    AskReading,
    RefuseReading,
    ShowReading,
    answer_text,
)
from hetstream.slurm_plugin.cli.cluster_source import DaemonFirst
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.read import hidden_by
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.server import ReadingAnswers, offer
from hetstream.slurm_plugin.insight.last_reading import MAX_PACKED_BYTES, SOURCE, pack, unpack
from hetstream.slurm_plugin.insight.observation import Reading, observe

ROOT = Path(__file__).parents[2] / "slurm_plugin"


def read(directory: Path, version: str = "22.05") -> Snapshot:
    return CommandSlurm({"PATH": f"{Recorded(directory, version).directory}:/usr/bin:/bin"}).snapshot()


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_a_reading_arrives_as_it_was_made(tmp_path: Path, version: str) -> None:
    made = read(tmp_path, version)
    got = unpack(pack(made))
    assert replace(got, source=made.source, config=made.config) == made
    assert got.source == SOURCE
    assert got.config["ClusterName"] == made.config["ClusterName"]
    assert "SlurmctldHost" not in got.config, "what no command looks at stays where it is"


# `doctor` asks slurmctld itself.
AT_SLURMCTLD = ("doctor.py", "install.py")


def test_every_setting_that_commands_look_at_is_in_a_reading() -> None:
    """As their source names it."""
    folders = [ROOT / name for name in ("cli", "insight", "packing", "render")]
    texts = {
        path: path.read_text() for folder in folders for path in folder.rglob("*.py") if path.name not in AT_SLURMCTLD
    }
    looked_at = {name for text in texts.values() for name in re.findall(r'snapshot\.config(?:\.get\(|\[)"(\w+)"', text)}
    assert looked_at > {"PreemptType", "PreemptParameters"}
    made = Snapshot(1.0, "22.05", "t", (), (), (), dict.fromkeys(looked_at, "x"))
    assert unpack(pack(made)).config.keys() == looked_at


def test_what_is_no_reading_is_an_error(tmp_path: Path) -> None:
    whole = pack(read(tmp_path))
    for data in (b"", b"none", whole[:-9], zlib.compress(b"{}"), zlib.compress(b"[" * 1000)):
        with pytest.raises(SiteError, match="a reading of the site daemon is"):
            unpack(data)
    with pytest.raises(SiteError, match="has more than"):
        unpack(zlib.compress(b" " * (65 << 20), 1))


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        ({}, ""),
        ({"PrivateData": "none", "MCSPlugin": "(null)"}, ""),
        ({"PrivateData": "accounts,usage,users,events,cloud", "MCSPlugin": "mcs/none"}, ""),
        ({"PrivateData": "jobs,usage"}, "PrivateData=jobs,usage"),
        ({"PrivateData": "nodes"}, "PrivateData=nodes"),
        ({"PrivateData": "partitions"}, "PrivateData=partitions"),
        ({"PrivateData": "reservations"}, "PrivateData=reservations"),
        ({"PrivateData": "what_a_later_release_hides"}, "PrivateData=what_a_later_release_hides"),
        ({"MCSPlugin": "mcs/group"}, "MCSPlugin=mcs/group"),
    ],
)
def test_what_slurm_hides_from_users_the_daemon_does_not_show_them(
    tmp_path: Path, config: Mapping[str, str], hidden: str
) -> None:
    assert hidden_by(config) == hidden
    snapshot = replace(read(tmp_path), config=config)
    shown = answer_text(ShowReading(pack(snapshot)))
    offered = offer(Reading(observe(snapshot, {})))
    assert offered.to_all == shown
    if hidden:
        assert offered.to_users == answer_text(RefuseReading(f"{hidden} shows each user another part of the cluster"))
    else:
        assert offered.to_users == shown


def test_a_reading_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    def refused(reason: str) -> ReadingAnswers:
        text = answer_text(RefuseReading(reason))
        return ReadingAnswers(text, text)

    assert offer(Reading()) == refused("the first reading is not there yet")
    assert offer(Reading(error="slurmctld is away")) == refused("slurmctld is away")
    snapshot = read(tmp_path)
    # Random names do not shrink, as those of users do.
    names = [os.urandom(512).hex() for _ in range(4500)]
    large = replace(snapshot, jobs=tuple(replace(snapshot.jobs[0], name=name) for name in names))
    size = len(pack(large))
    assert size > MAX_PACKED_BYTES
    assert offer(Reading(replace(observe(snapshot, {}), snapshot=large))) == refused(
        f"the reading has {size} bytes: at most {MAX_PACKED_BYTES} are sent"
    )


def timeless(report: Any) -> Any:
    """A report without what a second changes."""
    if isinstance(report, dict):
        return {key: timeless(value) for key, value in report.items() if key != "meta" and not key.endswith("_s")}
    return [timeless(one) for one in report] if isinstance(report, list) else report


def test_commands_show_what_the_daemon_read(local: RunningDaemon, wait_until: WaitUntil, slurm: Recorded) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    asked = {"HETSTREAM_DAEMON": local.address}
    for line in ("jobs", "frag", "why 3", "advise", "report"):
        said, fresh = (json.loads(slurm.run(f"{line} --json{more}", **asked).stdout) for more in ("", " --fresh"))
        assert (said["meta"]["source"], fresh["meta"]["source"]) == (SOURCE, "commands"), line
        assert said["meta"]["cluster"] == fresh["meta"]["cluster"]
        assert timeless(said) == timeless(fresh)
    # Without slurmdbd, `util` asks slurmctld for ended jobs, and takes the nodes of the same moment.
    assert json.loads(slurm.run("util --json", **asked).stdout)["meta"]["source"] == "commands"
    # A variable that may mean another cluster: only who also names the daemon has it asked.
    assert json.loads(slurm.run("frag --json", SLURM_CLUSTERS="other", **asked).stdout)["meta"]["source"] == SOURCE
    table = slurm.run("jobs", **asked)
    assert "hetstream: this is what the site daemon read" in table.stderr
    assert "s ago; --fresh asks slurmctld now\n" in table.stderr
    for name in ("squeue", "scontrol"):
        (slurm.directory / name).rename(slurm.directory / f"no-{name}")
    for line in ("jobs", "frag", "why 3", "report", "exporter --print"):
        done = slurm.run(line, **asked)
        assert done.returncode == 0, done.stderr
    # What the reading does not have, and --fresh and --details, are questions to slurmctld, which is not there.
    for line in ("jobs 99", "why 99", "jobs --details", "frag --fresh", "exporter --print --fresh"):
        assert slurm.run(line, **asked).returncode == 1, line
    for name in ("squeue", "scontrol"):
        (slurm.directory / f"no-{name}").rename(slurm.directory / name)
    assert local.end() == 0
    done = slurm.run("jobs", **asked)
    assert done.returncode == 0
    assert done.stderr == (
        "hetstream: slurmctld is asked, as the site daemon has not answered: "
        f"{local.address} does not answer: No such file or directory\n"
    )


# Asks as another user, and prints the answer behind its HMAC.
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_stranger_sees_what_slurm_shows_him(local: RunningDaemon, wait_until: WaitUntil, slurm: Recorded) -> None:
    with tempfile.TemporaryDirectory(prefix="hetstream-reading-") as place:
        Path(place).chmod(0o755)
        local.address = f"unix:{place}/socket"
        local.start(wait_until)
        local.wait_for_reading(wait_until)
        assert answer_to_stranger(Path(place, "socket"), AskReading()).startswith(b'{"type":"show_reading"')
        config = (slurm.directory / "config").read_text()
        slurm.write("config", config.replace("PrivateData             = none", "PrivateData             = jobs"))
        local.wait_for_reading(wait_until, after=local.status().num_readings)
        assert answer_to_stranger(Path(place, "socket"), AskReading()) == answer_text(
            RefuseReading("PrivateData=jobs shows each user another part of the cluster")
        )
        assert isinstance(local.ask(AskReading()), ShowReading), "root sees all"
        assert local.end() == 0


class Away:
    """A slurmctld that counts who asks it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.answer = snapshot
        self.asked = 0

    def snapshot(self) -> Snapshot:
        self.asked += 1
        return self.answer


def test_a_daemon_that_cannot_be_asked_is_told_of_once_for_each_reason(tmp_path: Path) -> None:
    slurm, said = Away(read(tmp_path)), list[str]()
    environ = {"HETSTREAM_DAEMON": f"unix:{tmp_path}/none"}
    cluster = DaemonFirst(slurm, said.append, 300.0, environ)
    assert [cluster.snapshot() for _ in range(3)] == [slurm.answer] * 3
    environ["HETSTREAM_DAEMON"] = "nowhere"
    cluster.snapshot()
    assert slurm.asked == 4
    assert len(said) == 2
    assert "No such file or directory" in said[0]
    assert "must be unix:/PATH" in said[1]


def test_another_clusters_configuration_keeps_the_daemon_of_this_host_out(tmp_path: Path) -> None:
    slurm, said = Away(read(tmp_path)), list[str]()
    for name in ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"):
        DaemonFirst(slurm, said.append, 300.0, {name: "other"}).snapshot()
    assert (slurm.asked, said) == (3, [])
