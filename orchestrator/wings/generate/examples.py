"""Texts that the model generates: from token ids, and at the end of a training from held-out samples."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.config.pretrained import tokenizer_folder
from orchestrator.config.schema import DataKind, RunConfig, Tokenizer
from orchestrator.wings.pretrained.tokenizer import Texts, texts_of
from orchestrator.worker.listeners import Listener
from orchestrator.workloads.data import TokenData
from orchestrator.workloads.models import prepare_to_generate
from orchestrator.workloads.sources import Example
from zero_runtime.runtime import ZeroRuntime

POSITION_KEYS = ("max_position_embeddings", "n_positions")


class Examples(Listener):
    """Generates the examples of a training that came to its end, shows and records them."""

    def at_end(self) -> None:
        run = self.run
        run.examples = examples_of(run.runtime, run.config, run.data)
        run.runtime.reset_ledger()  # the communication of a step is that of training
        for one in run.examples if run.rank.rank == 0 else ():
            run.writer.tell("example", **one)
            prompt, answer = (
                part["ids"] if part["text"] is None else part["text"] for part in (one["prompt"], one["answer"])
            )
            print(f"example: {prompt!r} -> {answer!r}", flush=True)


def generated(
    runtime: ZeroRuntime, ids: list[int], new_tokens: int, end: int | None = None, beams: int = 1
) -> list[int]:
    """The token ids after `ids` that a search with so many beams finds, by transformers; one beam is greedy. end: a
    token that ends the text, besides those of the model's configuration."""
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
        num_beams=beams,
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
    is_of_model = config.data.tokenizer is Tokenizer.model
    folder = tokenizer_folder(config.model.path, config.model.adapter) if is_of_model else None
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
