"""A cluster whose hosts have network namespaces: names, addresses, configuration, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster import namespaces
from tests.devcluster.__main__ import main
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.errors import BootFailed, NetworkFailed
from tests.devcluster.namespaces import NETNS_DIR, free_subnet, left_of, make_network, remove_network
from tests.devcluster.network import ClusterNetwork, choose_subnet, plan_network
from tests.devcluster.programs import host_programs
from tests.devcluster.record import ClusterRecord, read_record, write_record
from tests.devcluster.render import slurm_conf
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape, ClusterSpec
from tests.devcluster.teardown import tear_down
from tests.programs import require

DEVCLUSTER = [sys.executable, "-m", "tests.devcluster"]


def planned(nodes: int = 4, token: str = "0123abcd") -> ClusterNetwork:
    return plan_network(f"unit-{token}", [f"cpu{number}" for number in range(nodes)], "10.1.2.0/24")


def devices(network: ClusterNetwork) -> set[str]:
    """What the machine has of a network's devices; other tests may have networks at the same time."""
    own = {network.bridge, *(host.link for host in network.hosts)}
    return {name for _, name in socket.if_nameindex() if name in own}


def namespaces_of(cluster_name: str) -> list[str]:
    return [path.name for path in NETNS_DIR.glob(f"{cluster_name}-*")] if NETNS_DIR.exists() else []


@pytest.fixture
def may_make_namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    require("ip")
    if subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not allowed here")


def test_every_host_has_an_address_and_names_that_the_kernel_takes() -> None:
    network = planned(64)
    assert len({host.address for host in network.hosts}) == 65
    assert all(host.address in map(str, IPv4Network(network.subnet).hosts()) for host in network.hosts)
    assert max(len(host.link) for host in network.hosts) <= 15
    assert network.host("cpu3").address == "10.1.2.13"
    assert network.host("cpu3").namespace == "unit-0123abcd-cpu3"
    with pytest.raises(KeyError):
        network.host("gpu0")


def test_clusters_share_no_name() -> None:
    one, other = (
        {name for host in network.hosts for name in (host.namespace, host.link)} | {network.bridge}
        for network in (planned(), planned(token="89abcdef"))
    )
    assert not one & other


def test_every_host_knows_all_by_name() -> None:
    lines = planned(2).hosts_file("box").splitlines()
    assert lines == ["127.0.0.1 localhost", "10.1.2.1 box", "10.1.2.2 ctl", "10.1.2.10 cpu0", "10.1.2.11 cpu1"]


@pytest.mark.parametrize(
    ("routes", "within"),
    [
        ([], "10.0.0.0/8"),
        (["192.0.2.0/24", "127.0.0.1", "10.0.0.0/9"], "10.128.0.0/9"),
        (["10.0.0.0/8", "172.17.0.0/16"], "172.16.0.0/12"),
        (["10.0.0.0/8", "172.16.0.0/12"], "192.168.0.0/16"),
    ],
)
def test_a_subnet_is_one_to_which_no_route_leads(routes: list[str], within: str) -> None:
    for seed in range(20):
        subnet = IPv4Network(choose_subnet(routes, random.Random(seed)) or "")
        assert subnet.prefixlen == 24
        assert subnet.subnet_of(IPv4Network(within))
        assert not any(subnet.overlaps(IPv4Network(route)) for route in routes)


def test_a_machine_with_routes_everywhere_has_none() -> None:
    assert choose_subnet(["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"], random.Random(0)) is None


def test_slurm_knows_each_host_by_its_address() -> None:
    spec = ClusterSpec("unit", "unit-0123abcd", Path("/state"), 21000, ClusterShape(1, 1, 2, 4))
    spec = replace(spec, network=plan_network(spec.cluster_name, spec.nodes, "10.1.2.0/24"))
    text = slurm_conf(spec)
    assert "SlurmctldHost=ctl(10.1.2.2)\n" in text
    assert "NodeName=gpu0 NodeAddr=10.1.2.10 Port=21001 " in text
    assert "NodeName=cpu[0-1] NodeAddr=10.1.2.[11-12] Port=[21002-21003] " in text
    assert "SlurmdTimeout=10\n" in text
    assert "127.0.0.1" not in text
    assert "localhost" not in text


def test_the_record_keeps_the_network(tmp_path: Path) -> None:
    record = ClusterRecord(
        "unit", "unit-0123abcd", str(tmp_path), "22.05.8", ("cpu0",), ("cpu",), "", True, 0.0, 0.0, planned(1)
    )
    write_record(record)
    assert read_record(tmp_path) == record


@pytest.mark.shows("hosts of a devcluster have addresses of their own, and nothing is left after `down`")
def test_without_ip_it_is_one_line_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.devcluster.programs.SYSTEM_PATH", str(tmp_path))
    assert main(["up", "--network", "--dry-run", "--state-dir", "/tmp/hs-none"]) == 1
    said = capsys.readouterr().err
    assert "the program ip" in said
    assert "apt-get install iproute2" in said
    assert "Traceback" not in said
    assert not Path("/tmp/hs-none").exists()


def test_a_kernel_that_refuses_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not permitted' >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkFailed, match=r"Operation not permitted.*NET_ADMIN.*without --network"):
        make_network(planned())


@pytest.mark.usefixtures("may_make_namespaces")
def test_a_network_of_which_half_is_there_goes_whole() -> None:
    token = f"{os.getpid():08x}"
    network = plan_network(f"unit-{token}", ["cpu0", "cpu1"], free_subnet())
    make_network(network)
    try:
        assert devices(network) == {network.bridge, *(host.link for host in network.hosts)}
        subprocess.run(["ip", "link", "del", network.hosts[1].link], check=True)
        subprocess.run(["ip", "netns", "del", network.hosts[2].namespace], check=True)
        assert len(left_of(network)) == 5 or len(left_of(network)) == 4  # its cable goes some time after a namespace
    finally:
        remove_network(network)
    assert left_of(network) == []
    assert devices(network) == set()
    remove_network(network)


@pytest.fixture
def place() -> Iterator[str]:
    """The name of a cluster that the test may boot; whatever is left of it goes afterwards."""
    name = f"pytest-{os.getpid()}-net"
    yield name
    tear_down(DEFAULT_STATE_ROOT / name)


def hetstream(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEVCLUSTER, *words], capture_output=True, text=True, timeout=120, check=False, **options)


SHOW = """\
import os, socket
print(socket.gethostname(), os.listdir("/dev/shm"), socket.gethostbyname("cpu0"), socket.gethostbyname("ctl"))
probe = socket.create_connection((socket.gethostbyname("cpu0"), %d), 10)
print(probe.getsockname()[0])
"""


@pytest.mark.shows("hosts of a devcluster have addresses of their own, and nothing is left after `down`")
@pytest.mark.slurm
@pytest.mark.usefixtures("may_make_namespaces")
def test_hosts_have_addresses_and_nothing_is_left(place: str) -> None:
    assert "network namespaces on the bridge" in hetstream("up", "--network", "--dry-run", "--name", place).stdout
    assert namespaces_of(place) == []
    up = hetstream("up", "--network", "--name", place, "--gpu-nodes=1", "--cpu-nodes=2", "--json")
    assert up.returncode == 0, up.stderr
    hosts = {host["name"]: host for host in json.loads(up.stdout)["network"]["hosts"]}
    assert hosts.keys() == {"ctl", "gpu0", "cpu0", "cpu1"}
    record = read_record(DEFAULT_STATE_ROOT / place)
    assert record is not None
    assert record.network is not None
    port = int((DEFAULT_STATE_ROOT / place / "slurm.conf").read_text().split("SlurmctldPort=")[1].split()[0]) + 2
    note = f"/dev/shm/{place}"
    argv = ["srun", "--nodelist=cpu0", "--partition=cpu", "touch", note]
    assert hetstream("exec", "--name", place, "--", *argv).returncode == 0
    assert not Path(note).exists()
    argv = ["srun", "--nodelist=cpu1", "--partition=cpu", sys.executable, "-c", SHOW % port]
    shown = hetstream("exec", "--name", place, "--", *argv)
    addresses = [hosts[name]["address"] for name in ("cpu0", "ctl", "cpu1")]
    assert shown.stdout == f"cpu1 [] {addresses[0]} {addresses[1]}\n{addresses[2]}\n", shown.stderr
    status = hetstream("status", "--name", place)
    assert status.returncode == 0
    assert all(host["address"] in status.stdout and host["link"] in status.stdout for host in hosts.values())
    assert f"would remove link {hosts['cpu0']['link']}" in hetstream("down", "--name", place, "--dry-run").stdout
    assert "9 parts of its network" in hetstream("down", "--name", place).stdout
    assert devices(record.network) == set()
    assert namespaces_of(record.cluster_name) == []


@pytest.mark.shows("hosts of a devcluster have addresses of their own, and nothing is left after `down`")
@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("may_make_namespaces")
@pytest.mark.parametrize("moment", ["cluster.json", "hosts", "run/plan.json", "log/slurmctld.log"])
def test_an_up_that_was_killed_leaves_nothing_after_down(place: str, moment: str, wait_until: Any) -> None:
    argv = [*DEVCLUSTER, "up", "--network", "--name", place]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (DEFAULT_STATE_ROOT / place / moment).exists(), 20, moment)
        process.kill()
    record = read_record(DEFAULT_STATE_ROOT / place)
    assert record is not None
    assert record.network is not None
    assert hetstream("down", "--name", place).returncode == 0
    assert devices(record.network) == set()
    assert namespaces_of(record.cluster_name) == []


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("may_make_namespaces")
def test_a_boot_that_fails_leaves_nothing(place: str) -> None:
    programs = replace(host_programs(), slurmd=Path("/bin/false"))
    request = BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(), network=True)
    with pytest.raises(BootFailed, match=r"slurmd gpu0 ended with 1\."):
        boot(request, programs, print)
    assert namespaces_of(place) == []
    assert not (DEFAULT_STATE_ROOT / place).exists()


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("may_make_namespaces")
def test_a_host_that_cannot_be_entered_is_told(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_made(network: ClusterNetwork) -> None:
        namespaces.make_network(replace(network, hosts=network.hosts[:2]))

    monkeypatch.setattr("tests.devcluster.boot.make_network", half_made)
    request = BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(), network=True)
    with pytest.raises(BootFailed, match=r"slurmd gpu1 could not be started"):
        boot(request, host_programs(), print)


@pytest.mark.shows("hosts of a devcluster have addresses of their own, and nothing is left after `down`")
@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("may_make_namespaces")
def test_two_networks_side_by_side(place: str, devcluster: Any) -> None:
    names = [place, f"{place}2"]
    try:
        for name in names:
            up = hetstream("up", "--network", "--name", name, "--gpu-nodes=1", "--cpu-nodes=1")
            assert up.returncode == 0, up.stderr
        subnets = {read_record(DEFAULT_STATE_ROOT / name).network.subnet for name in names}
        assert len(subnets) == 2
        for name in names:
            shown = hetstream("exec", "--name", name, "--", "srun", "sh", "-c", "echo $SLURM_CLUSTER_NAME")
            assert shown.stdout.rpartition("-")[0] == name, shown.stderr
        assert devcluster.run("srun", "hostname")
    finally:
        tear_down(DEFAULT_STATE_ROOT / names[1])
