"""Kinds of sites, as text and commands; what they do is in tests/sites."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.devcluster import sites
from tests.devcluster.__main__ import main
from tests.devcluster.errors import BootFailed, SlurmMissing
from tests.devcluster.private_run import command_text
from tests.devcluster.programs import SlurmPrograms
from tests.devcluster.render import gres_conf, slurm_conf
from tests.devcluster.site_setup import check
from tests.devcluster.spec import ClusterShape, ClusterSpec, ports_needed

HERE = Path("/var/lib/hetstream/devcluster/default")
PLAIN = ClusterSpec("default", "default-0123abcd", HERE, 21000)


def lines_of(*kinds: str) -> set[str]:
    """What stands in slurm.conf with these kinds and not without."""
    return {*slurm_conf(replace(PLAIN, sites=kinds)).splitlines()} - {*slurm_conf(PLAIN).splitlines()}


def test_a_plain_cluster_is_like_no_site() -> None:
    assert sites.commands(PLAIN) == []
    assert sites.partitions(PLAIN) == {}


def test_accounting_has_a_port_behind_those_of_the_nodes() -> None:
    said = lines_of("accounting")
    assert {"AccountingStorageType=accounting_storage/slurmdbd", "AccountingStoragePort=21007"} <= said
    assert PLAIN.base_port + ports_needed(PLAIN.shape, accounting=True) == PLAIN.dbd_port + 1
    assert PLAIN.base_port + ports_needed(PLAIN.shape, accounting=False) == PLAIN.dbd_port
    text = sites.slurmdbd_conf(replace(PLAIN, sites=("accounting",)))
    assert "DbdPort=21007\n" in text
    assert f"AuthInfo=socket={HERE}/run/munge.sock\n" in text
    assert "StoragePass" not in text


def test_limits_are_given_to_root_and_nobody() -> None:
    told = [" ".join(command[3:]) for command in sites.commands(replace(PLAIN, sites=("accounting",)))]
    assert told == [
        "add qos two-gpus MaxTRESPerUser=gres/gpu=2",
        "add qos ten-minutes MaxWall=00:10:00",
        "add account free",
        "add account eight-cpus GrpTRES=cpu=8",
        "add account one-job MaxJobs=1",
        "add user root Account=free,eight-cpus,one-job DefaultAccount=free QOS=normal,two-gpus,ten-minutes",
        "add user nobody Account=free,eight-cpus,one-job DefaultAccount=free QOS=normal,two-gpus,ten-minutes",
        "modify user where name=root set DefaultAccount=free",
    ]


def test_partitions_of_sites() -> None:
    assert lines_of("hidden", "exclusive") == {
        "PartitionName=cpu Nodes=cpu[0-2] MaxTime=INFINITE State=UP",
        "PartitionName=hidden Nodes=gpu0,gpu1,cpu3 Hidden=YES MaxTime=INFINITE State=UP",
        "PartitionName=whole Nodes=gpu0,gpu1 OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP",
    }
    alone = replace(PLAIN, shape=ClusterShape(1, 4, 1, 16), sites=("hidden",))
    assert "PartitionName=cpu Nodes=cpu0 " in slurm_conf(alone), "a partition without nodes is none"


def test_the_last_nodes_are_reserved() -> None:
    gpu, cpu = sites.commands(replace(PLAIN, sites=("reservations",)))
    assert {"ReservationName=course", "Nodes=gpu1"} <= {*gpu}
    assert {"ReservationName=maintenance", "Nodes=cpu3", "StartTime=now+1hour"} <= {*cpu}
    no_gpus = replace(PLAIN, shape=ClusterShape(0, 1, 2, 16), sites=("reservations",))
    assert [command[-1] for command in sites.commands(no_gpus)] == ["Nodes=cpu1"]


def test_programs_of_power_saving_end_and_start_a_nodes_slurmd() -> None:
    spec = replace(PLAIN, sites=("power-saving",))
    assert f"SuspendProgram={HERE}/suspend.sh" in lines_of("power-saving")
    assert 'kill "$pid"\n' in sites.suspend_program(spec, "/bin")
    assert f'setsid /sbin/slurmd -f {HERE}/slurm.conf -D -b -N "$node"' in sites.resume_program(
        spec, "/bin", ["/sbin/slurmd", "-f", f"{HERE}/slurm.conf"]
    )


def test_gpus_of_each_kind_stand_near_their_cores() -> None:
    spec = replace(PLAIN, shape=ClusterShape(4, 4, 1, 16), sites=("gpu-kinds",))
    lines = slurm_conf(spec).splitlines()
    assert "GresTypes=gpu,shard" in lines
    nodes = {line.split()[0]: line.partition(" Gres=")[2] for line in lines if line.startswith("NodeName=gpu")}
    assert list(nodes.items()) == [
        ("NodeName=gpu0", "gpu:4"),
        ("NodeName=gpu1", "gpu:a100:2,gpu:v100:2"),
        ("NodeName=gpu2", "gpu:a100:2,gpu:v100:2,shard:16"),
        ("NodeName=gpu3", "gpu:h100_3g.40gb:2,gpu:h100_1g.10gb:2"),
    ]
    devices = gres_conf(spec).splitlines()
    assert devices[0] == f"NodeName=gpu0 Name=gpu File={HERE}/dev/gpu0 Cores=0-7"
    assert devices[7] == f"NodeName=gpu1 Name=gpu Type=v100 File={HERE}/dev/gpu3 Cores=8-15"
    assert "NodeName=gpu2 Name=shard Count=16" in devices
    single = replace(spec, shape=ClusterShape(2, 1, 1, 1))
    assert gres_conf(single).splitlines()[1] == f"NodeName=gpu1 Name=gpu Type=v100 File={HERE}/dev/gpu0 Cores=0-0"


def test_a_dry_run_shows_files_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = Path(f"/tmp/hets-{os.getpid()}")
    up = ["up", "--state-dir", str(nowhere), "--site", "reservations,accounting", "--dry-run"]
    assert main([*up, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {*facts["files"]} == {"slurm.conf", "gres.conf", "slurmdbd.conf"}
    assert facts["commands"][0] == "sacctmgr --immediate --quiet add qos two-gpus MaxTRESPerUser=gres/gpu=2"
    assert main(up) == 0
    assert "# would then run\nsacctmgr" in capsys.readouterr().out
    assert not nowhere.exists()


def test_an_unknown_kind_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--site", "accounting,moon"])
    assert f"'moon': must be of {', '.join(sites.SITES)}" in capsys.readouterr().err


def test_what_accounting_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.devcluster.programs.SYSTEM_PATH", str(tmp_path))
    programs = SlurmPrograms("22.05.8", *[tmp_path / "none"] * 3)
    check(("hidden",), programs)
    with pytest.raises(SlurmMissing, match=r"slurmdbd, mariadbd, .*devcluster install --site accounting"):
        check(("accounting",), programs)


def test_configless_and_auth_slurm_change_who_asks_whom() -> None:
    assert lines_of("configless") == {"SlurmctldParameters=enable_configless"}
    assert lines_of("auth-slurm") == {"AuthType=auth/slurm", "CredType=cred/slurm"}
    assert "munge" not in slurm_conf(replace(PLAIN, sites=("auth-slurm",)))


def test_what_cannot_be_had_together_or_is_too_old_is_said(tmp_path: Path) -> None:
    programs = SlurmPrograms("22.05.8", *[tmp_path / "none"] * 3)
    with pytest.raises(BootFailed, match=r"Slurm 22\.05\.8 has no auth/slurm: give --slurm 24\.11"):
        check(("auth-slurm",), programs)
    check(("configless",), programs)
    with pytest.raises(BootFailed, match="does not go with --packing"):
        check(("gpu-kinds",), programs, packing=True)
    newer = replace(programs, version="24.11.5")
    for kinds, options in ((("configless",), {"network": True}), (("configless",), {"cgroups": True}),
                           (("configless", "power-saving"), {}), (("configless", "auth-slurm"), {})):  # fmt: skip
        with pytest.raises(BootFailed, match="go neither together nor with --network"):
            check(kinds, newer, **options)


def test_a_command_is_run_inside_or_from_outside(tmp_path: Path) -> None:
    """Outside there is no such file in /run, and the process is entered: here this one's own mounts."""
    script, pid_file = tmp_path / "echo", tmp_path / "pid"
    for mark, called in (("no-such-cluster", "nsenter --mount=/proc/7/ns/mnt"), (".", "")):
        pid_file.write_text("7")
        script.write_text(command_text(Path("/bin/echo"), mark, pid_file))
        (tmp_path / "nsenter").write_text('#!/bin/sh\necho nsenter "$@"\n')
        for path in (script, tmp_path / "nsenter"):
            path.chmod(0o755)
        done = subprocess.run([script, "a b"], env={"PATH": f"{tmp_path}:/bin"}, capture_output=True, text=True)
        assert done.stdout.startswith(called)
        assert done.stdout.endswith("a b\n")
