"""LoRA through PEFT: a frozen model with trainable adapters, their initial values, and their folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from orchestrator.config.schema import ALL_LINEAR
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.tensor_source import Renamed, TensorSource

ADAPTER = "adapter_model"  # start of the name of the weights file in a PEFT folder
_NAME = ".default"  # PEFT's name for a single adapter, which its files omit


def lora_config(rank: int, alpha: float, targets: Sequence[str], base: str | None = None) -> LoraConfig:
    """PEFT's settings, without dropout. `base`: the folder of the frozen model."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # declared int, used as a factor
        target_modules=list(targets) or ALL_LINEAR,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def add_lora(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Freezes `model` and adds adapters on the meta device. ValueError if no layer matches the targets, or if no matrix
    of the model has as many dimensions as the adapters' rank."""
    most = max((min(one.shape) for one in model.parameters() if one.dim() == 2), default=0)
    if config.r > most:  # before they are made: PEFT makes each in host memory first
        raise ValueError(f"adapter.rank: expected at most {most}, as no matrix of the model has more, found {config.r}")
    if not hasattr(type(model), "prepare_inputs_for_generation"):  # of a model that generates nothing
        config.task_type = None
    try:
        with parameters_on_meta():
            return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"adapter.targets: {' '.join(str(error).split())}") from error


def first_values(model: PeftModel) -> Callable[[nn.Module], None]:
    """The rule for initial values: PEFT's for adapters (A uniform, B zero, so no effect at first), else the model's."""
    base_rule: Callable[[nn.Module], None] = model.get_base_model()._init_weights  # type: ignore[assignment]

    def initialise(module: nn.Module) -> None:
        if isinstance(module, LoraLayer):
            for name in (*module.lora_A, *module.lora_embedding_A):
                module.reset_lora_parameters(name, True)
        elif not isinstance(module, PeftModel):
            base_rule(module)

    return initialise


def adapter_weights(source: TensorSource) -> Renamed:
    """The adapters' weights only, under the names that PEFT's files use."""
    return Renamed(source, {name.replace(_NAME, ""): name for name in source.names() if "lora_" in name})


def save_adapter_config(config: LoraConfig, folder: str | Path) -> None:
    """Writes adapter_config.json as PeftModel.from_pretrained reads it."""
    config.inference_mode = True
    config.save_pretrained(str(folder))
