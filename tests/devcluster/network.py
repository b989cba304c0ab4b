"""The network of a cluster whose hosts have addresses of their own: names and addresses. Pure.

Each node and slurmctld have a network namespace; a cable (a pair of veth devices) joins each to one bridge:

    machine's own namespace     bridge hsTOKEN .1 ── hsTOKENgpu0 ═╗   hsTOKENcpu0 ═╗
    namespace CLUSTER-gpu0                                 eth0 .10 ╝                ║
    namespace CLUSTER-cpu0                                                   eth0 .12 ╝

TOKEN is what makes Slurm's ClusterName unlike any other's, so the names are this cluster's alone. `namespaces.py` makes
and removes what is planned here.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# slurmctld's host. No node has this name.
CONTROLLER = "ctl"

# Host numbers in the subnet: the machine, slurmctld, and the nodes from here on.
_MACHINE, _CONTROLLER, _FIRST_NODE = 1, 2, 10
_PREFIX_LENGTH = 24
# In this order, because 10.0.0.0/8 has the most room. RFC 1918.
_PRIVATE = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_TRIES = 100


@dataclass(frozen=True)
class VirtualHost:
    """One host of a cluster's network.

    Attributes:
        name: the node's name, also its host name; `ctl` is slurmctld's.
        address: its IPv4 address.
        namespace: its network namespace, as in `ip netns exec NAMESPACE`.
        link: the machine's end of its cable: `ip link set LINK down` cuts the host off, `up` brings it back.
    """

    name: str
    address: str
    namespace: str
    link: str


@dataclass(frozen=True)
class ClusterNetwork:
    """The network of one cluster.

    Attributes:
        bridge: the bridge's name.
        subnet: `10.1.2.0/24`.
        machine_address: the machine's own address there, from which Slurm's commands reach the cluster.
        hosts: slurmctld's first, then the nodes.
    """

    bridge: str
    subnet: str
    machine_address: str
    hosts: tuple[VirtualHost, ...]

    @property
    def prefix_length(self) -> int:
        return ipaddress.IPv4Network(self.subnet).prefixlen

    def host(self, name: str) -> VirtualHost:
        """The host of this name.

        Raises:
            KeyError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def hosts_file(self, machine: str) -> str:
        """What /etc/hosts holds on every host: all of them by name, and the machine."""
        lines = ["127.0.0.1 localhost", f"{self.machine_address} {machine}"]
        return "".join(f"{line}\n" for line in [*lines, *(f"{host.address} {host.name}" for host in self.hosts)])


def plan_network(cluster_name: str, nodes: Sequence[str], subnet: str) -> ClusterNetwork:
    """The network of a cluster.

    Args:
        cluster_name: Slurm's ClusterName, NAME-TOKEN.
        nodes: node names, at most five characters each: with `hs` and the token that is all that a device name holds.
        subnet: a free one of /24.
    """
    token = cluster_name.rpartition("-")[2]
    network = ipaddress.IPv4Network(subnet)
    numbers = [_CONTROLLER, *range(_FIRST_NODE, _FIRST_NODE + len(nodes))]
    hosts = tuple(
        VirtualHost(name, str(network[number]), f"{cluster_name}-{name}", f"hs{token}{name}")
        for name, number in zip([CONTROLLER, *nodes], numbers, strict=True)
    )
    return ClusterNetwork(f"hs{token}", subnet, str(network[_MACHINE]), hosts)


def choose_subnet(routes: Collection[str], draw: random.Random) -> str | None:
    """A private subnet to which no route leads, or None if there is none.

    Args:
        routes: the destinations of the machine's routes, `10.0.0.0/8` or `10.1.2.3`; not the default route.
        draw: which one, so that two clusters that are planned at the same time seldom choose the same.
    """
    taken = [ipaddress.IPv4Network(route, strict=False) for route in routes]
    for private in _PRIVATE:
        count = 2 ** (_PREFIX_LENGTH - private.prefixlen)
        for _ in range(_TRIES):
            first = private.network_address + draw.randrange(count) * 2 ** (32 - _PREFIX_LENGTH)
            subnet = ipaddress.IPv4Network((first, _PREFIX_LENGTH))
            if not any(subnet.overlaps(other) for other in taken):
                return str(subnet)
    return None
