"""A sequence-to-sequence Trainer generates the tokens of plain transformers at every stage, with ranks out of step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness.generation import ENDS, VOCAB, small_model
from harness.ranks import run_ranks
from harness.trainer_runs import as_launched
from zero_runtime.integrations.trainer import ZeroTrainer

MOST = 12  # tokens of an answer
ROWS = 5
PADDED = 6  # the ranks get equally many rows, and transformers keeps the answer to the one that is repeated


def rows() -> list[dict[str, torch.Tensor]]:
    """Prompts of 2 to 14 tokens, with labels."""
    generator = torch.Generator().manual_seed(4)
    lengths = [(2 + 3 * row, 3 + row) for row in range(ROWS)]
    drawn = [[torch.randint(3, VOCAB, (length,), generator=generator) for length in pair] for pair in lengths]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels} for ids, labels in drawn]


def answers(folder: str, numbers: list[int]) -> list[dict[str, Any]]:
    """On this rank, at each stage: predictions before and after one epoch of training, and those of the plain model."""
    as_launched()
    from zero_runtime.integrations.transformers import Seq2SeqTrainingArguments

    class Mine(ZeroTrainer, transformers.Seq2SeqTrainer):
        """A class of a script's own."""

    found = []
    for number in numbers:
        model = small_model("t5")
        model.generation_config.eos_token_id = ENDS
        plain = copy.deepcopy(model)
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            num_train_epochs=1,
            learning_rate=1e-3,
            predict_with_generate=True,
            generation_max_length=MOST,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            deepspeed={"zero_optimization": {"stage": number}},
        )
        trainer = Mine(
            model=model,
            args=arguments,
            train_dataset=rows(),
            eval_dataset=rows(),
            compute_metrics=lambda pair: {"rows": len(pair.predictions)},
        )
        first = trainer.predict(rows())
        trainer.train()
        metrics = trainer.evaluate()
        second = trainer.predict(rows())
        trained = copy.deepcopy(plain)
        with trainer.engine.runtime.full_params() as values:
            for name, param in trained.named_parameters():
                param.data.copy_(values[name])
        found.append(
            {
                "first": [cut(row) for row in first.predictions[:ROWS]],
                "second": [cut(row) for row in second.predictions[:ROWS]],
                "expected": [plain_answers(plain), plain_answers(trained)],
                "rows": metrics["eval_rows"],
            }
        )
        trainer.engine.destroy()
    return found


def plain_answers(model: Any) -> list[list[int]]:
    model.eval()
    prompts = [(row["input_ids"][None], row["attention_mask"][None]) for row in rows()]
    return [cut(model.generate(ids, attention_mask=mask, max_length=MOST)[0]) for ids, mask in prompts]


def cut(tokens: Any) -> list[int]:
    """The tokens of an answer without the padding behind them: 0, and -100 between ranks."""
    kept = tokens.tolist()
    while kept and kept[-1] in (0, -100):
        kept.pop()
    return kept


@pytest.mark.parametrize("numbers", [[2, 3], pytest.param([0, 1], marks=pytest.mark.full)])
def test_predictions_are_those_of_plain_transformers_at_every_stage(numbers: list[int], tmp_path: Path) -> None:
    for first, second in zip(*run_ranks(answers, 2, str(tmp_path), numbers), strict=True):
        assert first == second  # gathered on every rank
        assert [first["first"], first["second"]] == first["expected"]
        assert first["rows"] == PADDED
        before, after = first["expected"]
        assert before != after  # it was trained
        pairs = [*before, before[0]]  # of the two ranks, batch by batch
        assert any(len(one) != len(other) for one, other in zip(pairs[::2], pairs[1::2], strict=True))
