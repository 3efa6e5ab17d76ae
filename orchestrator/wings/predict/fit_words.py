"""Words of `fit` and `choose` that a run does not have: the file of a model, a job, and rows as one JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.config.pretrained import CONFIG
from orchestrator.config.schema import DataKind, RunConfig, to_dict
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import expanded
from orchestrator.text.units import count
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.profile import costs
from orchestrator.wings.words.machine_names import values

TOKENS, EPOCHS = "train.tokens", "train.epochs"


def machine(config: RunConfig) -> str:
    """The described machine of a row, or the name of this one."""
    return config.hardware.name if config.hardware.is_described else hardware_name(config)


def predicted(one: Fit) -> dict[str, Any]:
    """The speed of a row and its price, for other programs."""
    speed, config = one.speed(hardware_name(one.config)), to_dict(one.config)
    price, cost = costs.price_of(config), costs.predicted_cost(config, speed.shown if speed else None)
    known = {"predicted": speed and speed.to_dict(), "currency": price and price.currency}
    return {**known, "cost_per_billion_tokens": cost}


def document(model: str, rows: Iterable[Any], cells: Mapping[str, Mapping[str, Any]] | None = None, **more: Any) -> str:
    """The rows for other programs, each with its machine. rows: what has a `config` and `to_dict`. cells: more of each,
    by label. more: what is said of all of them."""
    listed = [{"machine": machine(one.config), **one.to_dict(), **(cells or {}).get(one.label, {})} for one in rows]
    return json.dumps({"model": model, **more, "rows": listed}, ensure_ascii=False)


class Length(NamedTuple):
    """How much is to be trained: tokens, or epochs of the configured data."""

    tokens: float | None = None
    epochs: float | None = None

    def tokens_of(self, config: RunConfig) -> float:
        """Refusal if the tokens of the data cannot be counted."""
        if self.tokens is not None:
            return self.tokens
        assert self.epochs is not None, "a job has tokens or epochs"
        return self.epochs * tokens_of_an_epoch(config)


def tokens_of_an_epoch(config: RunConfig) -> int:
    """Tokens of the training part of the data, as a run cuts them into samples. Refusal if the data or the tokenizer
    cannot be read."""
    from orchestrator.worker.setup import build_data  # imported here: it imports torch, which no other line needs

    try:
        return build_data(config).train_samples * config.batch.seq
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise Refusal([f"{EPOCHS}: expected data that can be read, found: {reason}      fix: {TOKENS}=50e6"]) from None


def with_folder(word: str) -> list[str]:
    """model=PATH as the settings of a local folder. The path may also be that of the folder's config.json."""
    key, _, value = word.partition("=")
    if key not in ("model", "model.path") or os.sep not in value:
        return [word]
    path = expanded(value)
    folder = path.parent if path.name == CONFIG and path.is_file() else path
    return [*(["model=pretrained"] if key == "model" else []), f"model.path={folder}"]


def with_less(words: Sequence[str]) -> list[str]:
    """What to add to a line of which nothing fits, so that less is trained; empty if adapters are asked for already."""
    given = values(words).keys()
    coded = ["precision.weights=int4"] * given.isdisjoint(("offload", "parallel.tp", "precision.weights"))
    return [] if "adapter" in given else ["adapter=lora", *coded]


def job_of(words: Sequence[str]) -> tuple[Length | None, list[str]]:
    """The job that the words ask about, and the words without it. With measure=train epochs are a run's own."""
    given = values(words)
    found = {key: given[key] for key in (TOKENS, EPOCHS) if key in given}
    if len(found) > 1:
        raise Refusal([f"{TOKENS} and {EPOCHS} are two lengths of one training      fix: leave one of them out"])
    if not found:
        return None, list(words)
    ((key, text),) = found.items()
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        example = "50e6" if key == TOKENS else "3"
        raise Refusal([f"{key}: expected a number above 0, found '{text}'      fix: {key}={example}"])
    kept = (key,) if key == TOKENS or given.get("measure") != "train" else ()
    rest = [word for word in words if word.partition("=")[0] not in kept]
    return Length(number) if key == TOKENS else Length(epochs=number), rest


def length_text(job: Length, config: RunConfig, ends: tuple[float, float] | None) -> str:
    """The hours of a job at the least and the most tokens per second, and what they cost where a price is set."""
    tokens = job.tokens_of(config)
    steps = -(-tokens // (config.batch.global_size * config.batch.seq))
    is_padded = job.epochs is not None and config.data.kind is DataKind.pairs and not config.data.packing
    what = f"{count(tokens)} tokens{', padding included,' if is_padded else ''} are {steps:,.0f} steps"
    if ends is None:
        return f"{what}; hours are not known, because no speed is"
    hours = [tokens / end / 3600 for end in reversed(ends)]
    price = costs.price_of(to_dict(config))
    per_billion = [costs.predicted_cost(to_dict(config), end) for end in reversed(ends)]
    amounts = [one * tokens / costs.TOKENS for one in per_billion if one is not None]
    money = f", {_span(amounts)} {price.currency}".rstrip() if price is not None and amounts else ""
    return f"{what} and {_span(hours)} h{money}"


def _span(ends: Sequence[float]) -> str:
    """Both ends with two digits, as the speeds have; one number if they are shown alike."""
    return "-".join(dict.fromkeys(f"{float(f'{end:.2g}'):,g}" for end in ends))
