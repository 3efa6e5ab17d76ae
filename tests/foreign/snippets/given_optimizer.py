"""An optimizer of the script's own, for the Trainer."""

import sys

import torch
from harness.trainer_runs import tiny_llama, training_rows
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
given = {"optimizer": optimizer} if sys.argv[1] == "optimizer" else {"optimizers": (optimizer, None)}
arguments = TrainingArguments(
    output_dir="out", max_steps=2, save_strategy="no", report_to=[], deepspeed={"zero_optimization": {"stage": 2}}
)
trainer = Trainer(model=model, args=arguments, train_dataset=training_rows(), **given)
trainer.train()
print(f"{trainer.engine.global_steps} steps with {type(trainer.engine.runtime.optimizer.config).__name__}")
