"""Models as people name them: a folder, the config.json in it, or the name of a model in the hub's local cache."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from orchestrator.compose.folders import config_folders, option_file
from orchestrator.config.pretrained import CONFIG
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import expanded, program

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # an organisation and a model, as the hub spells them


def spelled(words: Sequence[str], folder: str | None = None) -> list[str]:
    """The words, with `model=PATH` and `model=NAME` as the settings of a local folder, which may be a plain name if no
    option has it. folder: that of --config-dir. Refusal: a name of the hub whose files are not here; nothing is
    downloaded."""
    return [other for word in words for other in _spelled(word, folder)]


def _spelled(word: str, folder: str | None) -> list[str]:
    key, _, value = word.partition("=")
    if key not in ("model", "model.path") or "," in value:
        return [word]
    if value.endswith(".py"):
        own = f"a script trains a model class of its own: {program()} launch SCRIPT (docs/dropin.md, docs/runtime.md)"
        raise Refusal([f"{word}: expected a folder with a {CONFIG} or the name of a model, found a script; {own}"])
    path = expanded(value)
    if "/" not in value and (key != "model" or not _is_plain_folder(path, folder)):
        return [word]
    if path.name == CONFIG and path.is_file():
        path = path.parent
    elif HUB_NAME.fullmatch(value) and not path.exists():
        path = cached(value)
    return [*(["model=pretrained"] if key == "model" else []), f"model.path={path}"]


def _is_plain_folder(path: Path, folder: str | None) -> bool:
    """Whether a model of this name is in the working directory, and no option is called so."""
    return (path / CONFIG).is_file() and option_file(f"model/{path}", config_folders(folder)) is None


def in_cache(name: str, revision: str | None = None) -> Path | None:
    """The folder of the hub's cache with the files of the model `name`; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # imported here: only such a name needs it

    found = try_to_load_from_cache(name, CONFIG, revision=revision) if HUB_NAME.fullmatch(name) else None
    return Path(found).parent if isinstance(found, str) else None


def cached(name: str) -> Path:
    """The same. Refusal if it is not there."""
    from huggingface_hub import constants

    if (found := in_cache(name)) is not None:
        return found
    fetch = f"hf download {shlex.quote(name)}"
    raise Refusal(
        [
            f"{name}: expected a folder, or a model in the hub's cache ({constants.HF_HUB_CACHE}), found neither; "
            f"nothing is downloaded here      fix: {fetch}   or, for fit alone: {fetch} {CONFIG}"
        ]
    )
