"""One rank of `zlab generate`: its share of the prompts, with weights that are sharded over the ranks."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from orchestrator.config.pretrained import tokenizer_folder
from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.generate.examples import generated
from orchestrator.wings.pretrained.tokenizer import texts_of
from orchestrator.worker.setup import build_runtime, prepare_process, world_of
from orchestrator.workloads.models import prepare_to_generate
from zero_runtime.census import take_census
from zero_runtime.runtime import ZeroRuntime


def run_rank(attempt: AttemptPaths, rank: RankInfo) -> None:
    """Answers the prompts of generation.json in turn with the other ranks; rank 0 writes all answers to result.json."""
    asked = require_json(attempt.root / "generation.json")
    config = from_dict(require_json(attempt.config))
    device = prepare_process(config, rank.local_rank)
    with world_of(attempt, config, rank, device) as watch:
        runtime = build_runtime(config, device, watch, trains=False).runtime
        prepare_to_generate(runtime.model, config.model.path)
        runtime.collectives.journal.end_start()
        census = take_census(runtime)
        began = time.perf_counter()
        with runtime.uneven_forwards():
            own = [_answer(runtime, config, one, asked, rank) for one in asked["prompts"][rank.rank :: rank.world]]
        seconds = time.perf_counter() - began
        answers = runtime.collectives.gather_objects(own)
        if rank.rank == 0:
            in_turn = [answers[at % rank.world][at // rank.world] for at in range(len(asked["prompts"]))]
            parameters = sum(unit.layout.numel for unit in runtime.units)
            facts = {"seconds": seconds, "parameters": parameters, "memory": asdict(census)}
            write_json_atomic(attempt.result, {"answers": in_turn, **facts})


def _answer(
    runtime: ZeroRuntime, config: RunConfig, prompt: dict[str, Any], asked: dict[str, Any], rank: RankInfo
) -> dict[str, Any]:
    """Tokens for a prompt, given as text, as text that is written as data=pairs writes it (`ask`), or as ids."""
    texts = end = None
    ids = prompt.get("tokens")
    if ids is None:
        folder = tokenizer_folder(config.model.path, config.model.adapter)
        texts = texts_of(folder, int(config.model.config["vocab_size"]))
        asks = "ask" in prompt
        ids = texts.ask(prompt["ask"]) if asks else texts.encode(prompt["text"])
        end = texts.end if asks else None
    new = generated(runtime, ids, asked["new_tokens"], end, asked["beams"])
    return {**prompt, "rank": rank.rank, "new": new, "answer": None if texts is None else texts.decode(new)}
