"""Make and remove a cluster's network, and enter one of its hosts. The only place that calls `ip`.

Called by boot.py, teardown.py and, for `enter`, by the supervisor's children before they become daemons.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.devcluster import kernel
from tests.devcluster.errors import NetworkFailed
from tests.devcluster.network import ClusterNetwork, choose_subnet
from tests.devcluster.programs import search_path

NETNS_DIR = Path("/run/netns")
_TIMEOUT_S = 30.0


def free_subnet() -> str:
    """A private subnet of /24 that this machine has no route to.

    Raises:
        NetworkFailed: there is none, or no `ip`.
    """
    routes = json.loads(_ip(["-json", "-4", "route", "show", "table", "all"]) or "[]")
    known = {route["dst"] for route in routes} - {"default"}
    subnet = choose_subnet(known, random.Random())
    if subnet is None:
        raise NetworkFailed("no free private subnet: routes lead to all of them. Look at: ip route show table all")
    return subnet


def make_network(network: ClusterNetwork) -> None:
    """Make the bridge, and for each host a namespace, a cable and an address.

    Raises:
        NetworkFailed: this machine does not allow it; what was made by then stays for `remove_network`.
    """
    bridge, length = network.bridge, network.prefix_length
    lines = [f"link add {bridge} type bridge", f"addr add {network.machine_address}/{length} dev {bridge}"]
    lines.append(f"link set {bridge} up")
    for host in network.hosts:
        lines.append(f"netns add {host.namespace}")
        lines.append(f"link add {host.link} type veth peer name eth0 netns {host.namespace}")
        lines.append(f"link set {host.link} master {bridge} up")
    _ip(["-batch", "-"], lines)
    for host in network.hosts:
        inside = [f"addr add {host.address}/{length} dev eth0", "link set eth0 up", "link set lo up"]
        _ip(["-netns", host.namespace, "-batch", "-"], inside)


def remove_network(network: ClusterNetwork) -> None:
    """Remove whatever is there of it; no process may be left in it.

    Raises:
        NetworkFailed: something could not be removed.
    """
    while found := left_of(network):
        try:
            _ip(["-force", "-batch", "-"], [f"{kind} del {name}" for kind, name in found])
        except NetworkFailed:
            # A cable may just have gone by itself, with a namespace whose last process has ended.
            if left_of(network) == found:
                raise


def left_of(network: ClusterNetwork) -> list[tuple[str, str]]:
    """What there is of it now: ("link" or "netns", its name), in the order of removal."""
    devices = {name for _, name in socket.if_nameindex()}
    # Cables first: with its namespace alone, a cable would go only some time later.
    found = [("link", link) for link in (*(host.link for host in network.hosts), network.bridge) if link in devices]
    return found + [("netns", host.namespace) for host in network.hosts if (NETNS_DIR / host.namespace).exists()]


def enter(namespace: str, host_name: str, hosts_file: str) -> None:
    """Move this process to a host: its network, host name, shared memory, and an /etc/hosts that knows all hosts.

    Everything else stays the machine's: files, process ids, users. The shared memory goes with the last process there.

    Raises:
        OSError: the kernel refuses.
    """
    kernel.enter_namespace(NETNS_DIR / namespace, kernel.CLONE_NEWNET)
    kernel.unshare_mounts(also=kernel.CLONE_NEWUTS)
    socket.sethostname(host_name)
    kernel.bind(hosts_file, "/etc/hosts")
    kernel.mount_memory("/dev/shm")


def _ip(arguments: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Run `ip`, and return what it printed.

    Args:
        words: its arguments.
        lines: commands for `-batch -`.
    """
    program = shutil.which("ip", path=search_path())
    if program is None:
        raise NetworkFailed(
            "--network needs the program ip, which is not on this machine. Run: apt-get install iproute2"
        )
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NetworkFailed(
            f"ip {' '.join(arguments)} did not end within {_TIMEOUT_S:g} s. Look at what the kernel says: dmesg | tail"
        ) from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise NetworkFailed(
            f"ip {' '.join(arguments)} exited with {done.returncode}: {said}. Network namespaces need root with the "
            "capabilities NET_ADMIN and SYS_ADMIN: in a container give them, or boot the cluster without --network"
        )
    return done.stdout
