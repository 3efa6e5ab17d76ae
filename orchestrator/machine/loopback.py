"""The loopback address of this machine, in IPv4 or IPv6."""

from __future__ import annotations

import socket
from collections.abc import Sequence

ADDRESSES = ("127.0.0.1", "::1")


def loopback(addresses: Sequence[str] = ADDRESSES) -> str:
    """127.0.0.1, or ::1 if the machine has only IPv6. Raises OSError if it has neither."""
    for address in addresses:
        if _binds(address):
            return address
    raise OSError(f"neither {' nor '.join(addresses)} can be bound; `ip link set lo up` brings the loopback up")


def _binds(address: str) -> bool:
    try:
        with socket.socket(family(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def family(address: str) -> socket.AddressFamily:
    """AF_INET6 for an address with colons, else AF_INET."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_url(address: str) -> str:
    """The address as written before a port: an IPv6 address in brackets."""
    return f"[{address}]" if ":" in address else address
