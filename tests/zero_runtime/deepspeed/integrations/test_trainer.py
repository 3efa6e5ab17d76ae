"""The Trainer of transformers gives plain PyTorch's bits in every stage, also saved and resumed in the middle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.ranks import run_alone, run_ranks
from harness.trainer_runs import (
    STEPS,
    TrainerCase,
    as_launched,
    logged,
    make_trainer,
    plain_training,
    tiny_llama,
    weights_in,
)
from zero_runtime.integrations.pretrained import from_pretrained

from zero_runtime.deepspeed.integrations.trainer_config import engine_config
from zero_runtime.errors import PlanError

RANKS = 2


def trained_and_resumed(folder: str, cases: list[TrainerCase]) -> list[dict[str, Any]]:
    """On each rank: train each case with a checkpoint in the middle, then continue from it with a new model."""
    as_launched()
    results = []
    for number, case in enumerate(cases):
        out = f"{folder}/{number}"
        trainer = make_trainer(case, out)
        assert trainer.args.world_size == RANKS
        trainer.train()
        trainer.save_model(f"{out}/final")
        kept = {
            "seen": trainer.data_collator.batches,
            "losses": logged(trainer, "loss"),
            "evaluations": logged(trainer, "eval_loss"),
            "lrs": logged(trainer, "learning_rate"),
            "updates": trainer.engine.runtime.updates,
        }
        trainer.engine.destroy()
        torch.distributed.barrier()
        again = make_trainer(case, f"{out}/again", tiny_other())
        again.train(resume_from_checkpoint=f"{out}/checkpoint-3")
        again.save_model(f"{out}/resumed")
        kept["resumed"] = logged(again, "loss")
        again.engine.destroy()
        torch.distributed.barrier()
        results.append(kept)
    return results


def tiny_other() -> Any:
    """The same architecture with other weights, so that a checkpoint that is not loaded shows."""
    model = tiny_llama()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return model


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 2])
def test_losses_and_weights_equal_plain_pytorch_bit_for_bit_in_every_stage(tmp_path: Path, accumulation: int) -> None:
    cases = [TrainerCase({"stage": stage}, accumulation, arguments={"eval_strategy": "no"}) for stage in range(4)]
    ranks = run_ranks(trained_and_resumed, RANKS, str(tmp_path), cases)
    for stage in range(4):
        first, second = (rank[stage] for rank in ranks)
        plain = plain_training([first["seen"], second["seen"]], accumulation, by_rank=stage < 2)
        assert first["losses"] == second["losses"] == plain.losses
        assert first["updates"] == STEPS
        assert first["resumed"] == plain.losses  # the history of a checkpoint, then the steps after it
        for folder in ("final", "resumed"):
            saved = weights_in(tmp_path / str(stage) / folder)
            assert saved.keys() == plain.weights.keys()
            assert all(torch.equal(saved[name], plain.weights[name]) for name in saved), folder
        shutil.rmtree(tmp_path / str(stage))


def evaluated(folder: str) -> list[dict[str, Any]]:
    as_launched()
    found = []
    for stage in (0, 3):
        trainer = make_trainer(TrainerCase({"stage": stage}), f"{folder}/{stage}")
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        trainer.evaluate()
        found.append({"losses": [before, *logged(trainer, "eval_loss")], "seen": trainer.data_collator.batches})
        trainer.engine.destroy()
    return found


def test_evaluations_before_during_and_after_training_equal_plain_pytorch(tmp_path: Path) -> None:
    for first, second in zip(*run_ranks(evaluated, RANKS, str(tmp_path)), strict=True):
        plain = plain_training([first["seen"], second["seen"]], 1, by_rank=True).evaluations
        assert first["losses"] == [*plain, plain[-1]] == second["losses"]


def test_a_configuration_that_contradicts_the_arguments_is_refused(tmp_path: Path) -> None:
    wrong = {"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    case = TrainerCase({"stage": 1}, config=wrong)
    told = run_alone(refused, case, str(tmp_path))
    assert "expected the values of TrainingArguments" in told
    assert "train_micro_batch_size_per_gpu: 3 in the file, 2 in the arguments (per_device_train_batch_size)" in told
    assert "gradient_clipping: 1.0 in the file" in told
    assert "bf16.enabled: True in the file, False in the arguments" in told
    told = run_alone(refused, TrainerCase({"stage": 1}, arguments={"auto_find_batch_size": True}), str(tmp_path))
    assert "auto_find_batch_size: the engine's sizes are fixed" in told


def refused(case: TrainerCase, folder: str) -> str:
    with pytest.raises(PlanError) as error:
        make_trainer(case, folder).train()
    return str(error.value)


SCHEDULED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def with_sections_and_bf16(folder: str) -> dict[str, Any]:
    """One process: sections of the configuration instead of the Trainer's optimizer, bf16, the memory callback."""
    from zero_runtime.integrations.transformers import MemoryUsageCallback

    memory = MemoryUsageCallback(print_every_n_steps=4)
    arguments = {"warmup_steps": 2, "bf16": True, "gradient_checkpointing": True, "load_best_model_at_end": True}
    case = TrainerCase({"stage": 2}, config=SCHEDULED, arguments=arguments)
    trainer = make_trainer(case, folder, callbacks=[memory])
    trainer.train()
    trainer.save_model(f"{folder}/final")
    best = trainer.state.best_model_checkpoint
    return {
        "lrs": logged(trainer, "learning_rate"),
        "dtypes": {str(value.dtype) for value in weights_in(f"{folder}/final").values()},
        "history": memory.history,
        "is_best": all(
            torch.equal(value, weights_in(best)[name]) for name, value in weights_in(f"{folder}/final").items()
        ),
    }


def test_sections_of_the_configuration_bf16_callbacks_and_the_best_model_work(tmp_path: Path) -> None:
    found = run_alone(with_sections_and_bf16, str(tmp_path))
    # WarmupDecayLR from 0 to 1e-2 over 2 steps, then to 0 at step 6: DeepSpeed's starts with its first rate twice.
    assert found["lrs"] == pytest.approx([0.0, 0.0, 5e-3, 1e-2, 7.5e-3, 5e-3])
    assert found["dtypes"] == {"torch.bfloat16"}
    assert [one.step for one in found["history"]] == [0, 4, 6]  # loaded, every fourth step, the end
    assert all(one.allocated == one.reserved > 0 for one in found["history"])  # of the process, on a CPU
    assert found["is_best"]


def from_a_folder(folder: str) -> dict[str, Any]:
    """Each rank reads its shards of a saved model: what it reads, and the loss of one evaluation."""
    as_launched()
    from transformers import AutoModelForCausalLM
    from zero_runtime.integrations.transformers import from_pretrained

    from zero_runtime.checkpoint.hugging_face.source import WeightsFolder

    read: list[int] = []
    close = WeightsFolder.close

    def counted(own: WeightsFolder) -> None:
        read.append(own.bytes_read)
        close(own)

    model = from_pretrained(AutoModelForCausalLM, folder)
    on_meta = all(param.is_meta for param in model.parameters())
    with mock.patch.object(WeightsFolder, "close", counted):
        trainer = make_trainer(TrainerCase({"stage": 3}), f"{folder}/out", model)
        loss = trainer.evaluate()["eval_loss"]
    return {"on_meta": on_meta, "loss": loss, "read": max(read)}


def test_from_pretrained_reads_each_ranks_shards_only(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    ranks = run_ranks(from_a_folder, RANKS, str(tmp_path))
    plain = plain_training([[], []], 1, by_rank=True, steps=0).evaluations[0]
    total = sum(param.nbytes for param in model.parameters())
    assert [one["on_meta"] for one in ranks] == [True, True]
    assert [one["loss"] for one in ranks] == [plain, plain]
    assert sum(one["read"] for one in ranks) == total
    assert max(one["read"] for one in ranks) <= 0.75 * total


def test_a_folder_without_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"expected a folder with config\.json and safetensors, found 'gpt2'; download"):
        from_pretrained(None, "gpt2")


def test_save_on_each_node_gives_each_node_its_own_checkpoints(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), save_on_each_node=True, use_cpu=True)
    config = engine_config({"checkpoint": {"tag_validation": "Warn"}}, args, torch.nn.Linear(2, 2), None)
    assert config["checkpoint"] == {"tag_validation": "Warn", "use_node_local_storage": True}
