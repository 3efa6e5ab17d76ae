"""The network interface over which ranks on several machines reach each other."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping, MutableMapping

import psutil

from orchestrator.machine.loopback import loopback

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_meeting_place(environ: Mapping[str, str]) -> None:
    """OSError if the ranks of this machine cannot meet, over the loopback or an interface that the user has named."""
    if GLOO not in environ:
        loopback()


def interface_to(address: str) -> str | None:
    """The network interface from which this machine would send to the address; None if it cannot be determined."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: on a datagram socket this only selects the route
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        numbers = [entry.address for entry in addresses if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if own in [ipaddress.ip_address(number.partition("%")[0]) for number in numbers]:
            return name
    return None


def set_interface(environ: MutableMapping[str, str], way: str | None) -> None:
    """Makes gloo and NCCL use the interface, except where the user has named another one; None changes nothing.

    By default gloo takes the interface that the host's own name resolves to, which may be the loopback, and NCCL the
    first one that is up, which may be a bridge of virtual machines. NCCL reads a name as a prefix unless = is before
    it, and uses this interface to find the other ranks, and for data only where it has no InfiniBand.
    """
    if way is not None:
        environ.setdefault(GLOO, way)
    if GLOO in environ and environ[GLOO] != LOOPBACK:
        environ.setdefault(NCCL, f"={environ[GLOO]}")
