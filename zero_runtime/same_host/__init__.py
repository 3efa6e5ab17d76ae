"""A process group of CPU ranks on one host, which read each other's tensors in place: the backend "shm".

gloo sends every byte through the loopback of the network. Here a rank tells the others where its tensor lies, and they
copy out of it (process_vm_readv), so a byte is copied once and nothing is allocated:

    rank 0   [ tensor A ]                     rank 1   [ tensor B ]
       |  "number 7: all_gather, A at 0x7f.."    |
       |---------------- token ---------------->|  copies A from rank 0's memory into its own output
       |<--------------- token ------------------|  "number 7: read"
       |  A may be written again                 |

- peer_memory.py: copies from another process; the permission for it.
- meeting.py: how the ranks of a group find out that they share a host, and connect; links.py: the connection of two.
- operations.py: the collectives, each as a generator that yields the ranks it waits for.
- mailbox.py: the tokens that have come.
- progress.py: runs the operations of this process; a waiting thread sleeps in poll(2) until a token comes or a process
  ends.
- group.py and work.py: torch's interface, under the name "shm"; messages.py: the runtime's own.

There is no shared memory, file or name that could be left behind; other users cannot read a rank (the kernel's rule for
debuggers). Groups whose ranks may not read each other get gloo instead, see `group.create`.
"""
