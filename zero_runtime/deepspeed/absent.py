"""Names of DeepSpeed that have no counterpart here, each with what to do instead. Standard library only."""

from __future__ import annotations

ABSENT_OF_ENGINE: dict[str, str] = {}
