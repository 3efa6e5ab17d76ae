"""Holds the store in which the ranks of a script meet, until it is ended. A child of the launcher: it imports torch."""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore


def main(address: str, port: str, listening: str) -> None:
    """listening: the descriptor of a socket that listens at the port."""
    store = TCPStore(address, int(port), is_master=True, wait_for_workers=False, master_listen_fd=int(listening))
    signal.pause()
    del store


if __name__ == "__main__":
    main(*sys.argv[1:])
