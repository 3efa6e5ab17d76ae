"""The loopback address of this machine, in IPv4 or IPv6."""

from __future__ import annotations

import socket
from collections.abc import Sequence

ADDRESSES = ("127.0.0.1", "::1")
ANSWER_S = 5.0  # the kernel answers at once; a firewall that drops the question never does


def loopback(addresses: Sequence[str] = ADDRESSES) -> str:
    """127.0.0.1, or ::1 if the machine has only IPv6. Raises OSError if neither answers."""
    for address in addresses:
        if _answers(address):
            return address
    expected = "expected a loopback interface, over which the ranks of this machine meet"
    raise OSError(f"{expected}, found that neither {' nor '.join(addresses)} answers      fix: ip link set lo up")


def _answers(address: str) -> bool:
    """Whether a socket at the address can be reached. Binding shows less: an interface that is down can be bound."""
    try:
        with socket.socket(family(address)) as server, socket.socket(family(address)) as client:
            server.bind((address, 0))
            server.listen(1)
            client.settimeout(ANSWER_S)
            client.connect(server.getsockname())
    except OSError:
        return False
    return True


def family(address: str) -> socket.AddressFamily:
    """AF_INET6 for an address with colons, else AF_INET."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_url(address: str) -> str:
    """The address as written before a port: an IPv6 address in brackets."""
    return f"[{address}]" if ":" in address else address
