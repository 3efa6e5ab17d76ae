"""Evaluation only: parameters in shards, without an optimizer."""

from harness.trainer_runs import evaluation_rows, plain_training, tiny_llama
from transformers import HfArgumentParser
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=tiny_llama(), args=arguments, eval_dataset=evaluation_rows())
if arguments.do_eval:
    loss = trainer.evaluate()["eval_loss"]
    one_process = plain_training([[], []], 1, by_rank=True, steps=0).evaluations[0]
    print(f"stage {trainer.engine.zero_optimization_stage()}, the loss of one process: {loss == one_process}")
