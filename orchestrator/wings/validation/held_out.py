"""The loss over held-out data during training, and the texts that the trained model generates at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchestrator.config.schema import DataKind, RunConfig, Tokenizer
from orchestrator.worker.micro_batches import MicroBatches
from orchestrator.workloads.data import IGNORED_LABEL, TokenData
from orchestrator.workloads.models import prepare_to_generate
from orchestrator.workloads.sources import Example
from orchestrator.workloads.tokenizer import Texts, texts_of
from zero_runtime.runtime import ZeroRuntime

POSITION_KEYS = ("max_position_embeddings", "n_positions")


class HeldOut:
    """The validations of one rank. All ranks must make the same calls."""

    def __init__(self, config: RunConfig, runtime: ZeroRuntime, data: TokenData, mine: MicroBatches) -> None:
        self._runtime, self._data, self._mine = runtime, data, mine
        self._micro = config.batch.micro
        self._every = config.train.eval_every if config.trains_to_the_end else None
        self._rank, self._world = runtime.collectives.batch_rank, runtime.collectives.batch_world
        available = -(-data.validation_samples // (self._micro * self._world))
        asked = config.measure.validation_batches
        self._batches = available if asked is None else min(asked, available)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to validate after this step, before the last one of `steps`. At the end is always a validation."""
        return self._every is not None and step % self._every == 0 and step < steps and self._batches > 0

    def loss(self) -> float | None:
        """Mean loss over the labels that count, of the first held-out samples; None without any.

        A batch may go past the last sample: what it repeats does not count, so that the loss over all held-out data is
        that of each sample once, whatever the number of ranks.
        """
        if self._batches == 0:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self._runtime.device)
        tokens = 0
        with torch.no_grad():
            for index in range(self._batches):
                position = (index * self._world + self._rank) * self._micro
                batch = self._data.validation_batch(position, self._micro)
                batch.labels[np.arange(position, position + self._micro) >= self._data.validation_samples] = (
                    IGNORED_LABEL
                )
                total += self._mine.losses(self._mine.on_device(batch.input_ids), self._mine.on_device(batch.labels))
                tokens += self._mine.count(batch.labels)
        counted = self._runtime.sum_over_ranks(tokens).clamp(min=1)
        collectives = self._runtime.collectives
        loss = float(collectives.sum_over_data_(total) / counted)
        # Whether it is the lowest decides about a save, in which all ranks take part: all go by one rank's bits.
        return float(collectives.gather_objects(loss)[0])


def generated(runtime: ZeroRuntime, ids: list[int], new_tokens: int, end: int | None = None) -> list[int]:
    """Greedy token ids after `ids`. end: a token that ends the text, besides those of the model's configuration."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=runtime.device)
    more: dict[str, Any] = {}
    if end is not None:
        settings = getattr(runtime.model, "generation_config", None)
        known = getattr(settings, "eos_token_id", None)
        more["eos_token_id"] = [*(known if isinstance(known, list) else [] if known is None else [known]), end]
    out = runtime.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        **more,
    )
    return [int(one) for one in out[0, len(ids) :]]


def examples_of(runtime: ZeroRuntime, config: RunConfig, data: TokenData) -> list[dict[str, Any]]:
    """Held-out samples continued greedily by the model as it is now, on every rank: each with `prompt`, `answer` and
    `reference`, what the data has; as `ids`, and as `text` where the data are text.

    A collective. The ranks take the samples in turn. The model is left ready to train.
    """
    collectives = runtime.collectives
    rank, world = collectives.rank, collectives.world
    samples = data.examples(config.train.examples)
    if not samples:
        return []
    texts = _texts(config)
    end = texts.end if texts is not None and config.data.kind is DataKind.pairs else None
    used_cache = getattr(getattr(runtime.model, "config", None), "use_cache", None)
    prepare_to_generate(runtime.model, config.model.path)
    with runtime.uneven_forwards():
        own = [_continued(runtime, config, one, texts, end) for one in samples[rank::world]]
    runtime.model.train()
    if used_cache is not None:
        runtime.model.config.use_cache = used_cache  # type: ignore[union-attr]
    found = collectives.gather_objects(own)
    return [found[at % world][at // world] for at in range(len(samples))]


def _texts(config: RunConfig) -> Texts | None:
    if config.data.kind is DataKind.synthetic:
        return None
    of_model = config.data.tokenizer is Tokenizer.model and config.model.path is not None
    folder = Path(config.model.path) if of_model and config.model.path else None
    return texts_of(folder, int(config.model.config["vocab_size"]))


def _continued(
    runtime: ZeroRuntime, config: RunConfig, sample: Example, texts: Texts | None, end: int | None
) -> dict[str, Any]:
    positions = [config.model.config[key] for key in POSITION_KEYS if isinstance(config.model.config.get(key), int)]
    most = min([*positions, len(sample.prompt) + config.train.new_tokens]) - len(sample.prompt)
    answer = generated(runtime, sample.prompt, most, end) if most > 0 else []
    parts = {"prompt": sample.prompt, "answer": answer, "reference": sample.answer[: config.train.new_tokens]}
    return {
        name: {"ids": ids, "text": None if texts is None else texts.decode(ids).rstrip("\0")}
        for name, ids in parts.items()
    }
