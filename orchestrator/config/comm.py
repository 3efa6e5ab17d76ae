"""The group that chooses how CPU ranks communicate."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.strict import Word


class CommKind(Word):
    auto = "auto"
    shm = "shm"
    gloo = "gloo"


@dataclass(frozen=True)
class Comm:
    """How the ranks of a run communicate on CPUs, in every engine.

    `kind`: shm lets the ranks of one machine read each other's memory, or ends the run with an error where the system
    does not permit it; gloo sends messages; auto is shm where the ranks may do so, and gloo otherwise. GPUs use NCCL.
    """

    kind: CommKind = CommKind.auto
