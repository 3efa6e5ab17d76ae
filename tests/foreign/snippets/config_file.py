"""A configuration as a file."""

from pathlib import Path

from harness.trainer_runs import tiny_llama, training_rows
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out",
    max_steps=2,
    save_strategy="no",
    report_to=[],
    deepspeed=str(Path(__file__).with_name("zero3.json")),
)
trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=training_rows())
trainer.train()
print(f"{trainer.engine.global_steps} steps at stage {trainer.engine.zero_optimization_stage()}")
