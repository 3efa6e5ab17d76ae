"""The words of a line whose values are names of people: of models and of machines."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.wings.words import machine_names, model_names


def spelled(words: Sequence[str], folder: str | None) -> list[str]:
    """The words, with such names as our settings. folder: that of --config-dir. Refusal: a name means nothing here."""
    return machine_names.spelled(model_names.spelled(words, folder), folder)
