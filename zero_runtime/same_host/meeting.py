"""How the ranks of a group find out whether they may read each other's memory, and connect.

Each rank writes its host, process and socket into the group's store; connects to the lower ranks and accepts the higher
ones; reads a number from the memory of every other rank; and writes whether it could. All ranks read these answers, so
they decide alike.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_runtime.process_identity import boot_id
from zero_runtime.same_host import peer_memory
from zero_runtime.same_host.links import Link

_CONNECT_S = 60.0  # until ranks that have all written their sockets are connected
_PEER = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


class _Address(NamedTuple):
    """The address of a rank. host: equal for ranks of one user with common pids and sockets. name: of its socket; empty
    if it has none. address: of `number` in its memory."""

    host: str
    pid: int
    name: str
    address: int
    number: int


class Meeting(NamedTuple):
    """Links to the other ranks, by rank; or none and the reason why the ranks cannot read each other."""

    links: dict[int, Link]
    reason: str = ""


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Meeting:
    """Connect the ranks of a group. Every rank must call it; the result's reason is the same on all of them."""
    # A store that outlives the groups of its ranks, such as torchrun's, still has what they wrote for an earlier group.
    store = dist.PrefixStore(str(store.add(f"meetings/{rank}", 1)), store)
    number = torch.tensor([secrets.randbits(62)])  # int64, in memory that the others are to read
    name = secrets.token_hex(16)
    with ExitStack() as stack:
        listener, trouble = None, peer_memory.trouble()
        if not trouble:
            peer_memory.allow_reads()
            try:
                listener = stack.enter_context(_listen(name, size))
            except OSError as error:
                trouble = f"rank {rank} could not listen at a Unix socket: {error}"
        own = _Address(_host(), os.getpid(), name if listener else "", number.data_ptr(), int(number))
        found = [
            _Address(*json.loads(one)) for one in _exchange(store, "address", rank, size, json.dumps(own), timeout)
        ]
        trouble = trouble or _elsewhere(found, own)
        # Whoever sees another host, or a rank without a socket, knows that all ranks see it, and connects to nobody.
        links: dict[int, Link] = {}
        can_connect = not any(_elsewhere(found, one) for one in found) and all(one.name for one in found)
        if can_connect and listener is not None:
            try:
                links = _connect(found, rank, listener)
                trouble = _unreadable(found, rank)
            except OSError as error:
                trouble = f"rank {rank} could not connect to the other ranks: {error}"
        reasons = [one for one in _exchange(store, "trouble", rank, size, trouble or "-", timeout) if one != "-"]
    if reasons:
        for link in links.values():
            link.close()
        return Meeting({}, reasons[0])
    return Meeting(links)


def _host() -> str:
    """The machine's boot, the namespaces in which a pid, a socket's name and a user mean one thing, and the user."""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user")]
        return " ".join([boot_id(), *spaces, str(os.getuid())])
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # no /proc: only this process is known


def _exchange(store: dist.Store, key: str, rank: int, size: int, text: str, timeout: timedelta) -> list[str]:
    """Every rank's text, in rank order. Raises the store's error if one does not come in time."""
    store.set(f"{key}/{rank}", text)
    names = [f"{key}/{one}" for one in range(size)]
    store.wait(names, timeout)
    return [store.get(name).decode() for name in names]


def _elsewhere(found: Sequence[_Address], own: _Address) -> str:
    other = next((rank for rank, one in enumerate(found) if one.host != own.host), None)
    return "" if other is None else f"rank {other} is on another host, in another container, or another user's"


def _listen(name: str, size: int) -> socket.socket:
    """A socket with an abstract name: no file; other users may connect, and are turned away by their pid."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(_CONNECT_S)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(found: Sequence[_Address], rank: int, listener: socket.socket) -> dict[int, Link]:
    links: dict[int, Link] = {}
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(_CONNECT_S)
                connection.connect(f"\0{found[peer].name}")
                _check_process(connection, found[peer].pid)
            except OSError:
                connection.close()
                raise
            links[peer] = Link(peer, found[peer].pid, connection)
        by_process = {found[peer].pid: peer for peer in range(rank + 1, len(found))}
        while len(links) < len(found) - 1:
            connection, _ = listener.accept()
            higher = by_process.pop(_process_of(connection), None)
            if higher is None:
                connection.close()  # a stranger's
            else:
                links[higher] = Link(higher, found[higher].pid, connection)
    except OSError:
        for link in links.values():
            link.close()
        raise
    return links


def _process_of(connection: socket.socket) -> int:
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid) if user == os.getuid() else -1


def _check_process(connection: socket.socket, pid: int) -> None:
    if (other := _process_of(connection)) != pid:
        raise ConnectionRefusedError(f"expected process {pid} at its socket, found {other}")


def _unreadable(found: Sequence[_Address], rank: int) -> str:
    """Why this rank cannot read another's memory; empty if it can read all."""
    for peer, one in enumerate(found):
        value = torch.zeros(1, dtype=torch.int64)
        try:
            peer_memory.read_into(value, one.pid, one.address)
        except OSError as error:
            return (
                f"rank {rank} may not read the memory of rank {peer} (process_vm_readv: {error.strerror}); "
                f"{peer_memory.NEEDS}"
            )
        if int(value) != one.number:
            return f"rank {rank} read {int(value)} from the memory of rank {peer}, expected {one.number}"
    return ""
