"""How many parameters of real models begin off a 16-byte boundary of their unit's flat tensor: almost none.

The layout leaves no gaps between parameters, and the widths of real models are multiples of 8 elements. An unaligned
parameter costs vector accesses in kernels over it, and cuBLAS may choose another kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from harness.attack_counts import Tally
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from orchestrator.workloads.models import build_meta_model
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.unit_planner import plan_units

FILES = sorted((Path(__file__).resolve().parents[3] / "conf" / "model").glob("*.yaml"))
BOUNDARY_NUMEL = 8  # 16 bytes of bf16, the smallest dtype of a flat tensor
# Published sizes that conf/model/ does not have; two layers each, since a model's layers are alike.
OTHERS = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(d_model=768, d_ff=3072, num_layers=2, num_heads=12)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_hidden_layers=2)),
    "vit": lambda: ViTForImageClassification(ViTConfig(num_hidden_layers=2)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(encoder_layers=2, decoder_layers=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(num_hidden_layers=2)),
}
# The bias of BERT's head has as many elements as the vocabulary, 30,522, and these are registered after it.
UNALIGNED = {"bert": ["cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias"]}


def model_of(name: str) -> nn.Module:
    if name in OTHERS:
        with torch.device("meta"):
            return OTHERS[name]()
    content = yaml.safe_load(next(file for file in FILES if file.stem == name).read_text())
    return build_meta_model(content["model_type"], content["config"])


@pytest.mark.parametrize("name", [*(file.stem for file in FILES if file.stem != "pretrained"), *OTHERS])
def test_parameters_of_real_models_begin_at_16_bytes(name: str, checked: Tally) -> None:
    layouts = [
        FlatLayout.build([(name, tuple(param.shape)) for name, param in spec.params], shard_count=8, world=8)
        for spec in plan_units(model_of(name))
    ]
    segments = [segment for layout in layouts for segment in layout.segments]
    unaligned = [segment.name for segment in segments if segment.offset % BOUNDARY_NUMEL]
    checked("alignment of real models", parameters=len(segments), unaligned=len(unaligned))
    assert unaligned == UNALIGNED.get(name, [])
