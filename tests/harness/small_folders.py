"""Small models of transformers, a run's configuration for a folder of one, and its runtime on this rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orchestrator.config import pretrained
from orchestrator.config.schema import (
    Adapter,
    AdapterKind,
    Data,
    Device,
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    Tokenizer,
)
from orchestrator.config.state_groups import Precision, Zero
from zero_runtime.precision import MixedPrecision

IDS = torch.arange(24).view(2, 12)
LORA = Adapter(AdapterKind.lora, rank=3, alpha=6.0)
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},  # with a tied head
    "llama": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}


def config_of(folder: Path, stage: int = 3, weights: Any = None, **changes: Any) -> RunConfig:
    return RunConfig(
        model=pretrained.completed(Model("pretrained", path=str(folder))),
        zero=Zero(stage=stage),
        precision=Precision(MixedPrecision(weights=weights), compute="fp32"),
        batch=ResolvedBatch(micro=1, accumulation=1, global_size=2, seq=12),
        resources=ResolvedResources(Device.cpu, ranks=2, threads=1),
        data=Data(tokenizer=Tokenizer.bytes),
        **changes,
    )


def runtime_of(config: RunConfig) -> Any:
    from orchestrator.worker.setup import build_runtime

    return build_runtime(config, torch.device("cpu"), None).runtime  # type: ignore[arg-type]
