"""The same as a nested dict."""

from harness.trainer_runs import tiny_llama, training_rows
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

ds_config_dict = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2},
}
arguments = TrainingArguments(
    output_dir="out", max_steps=2, save_strategy="no", report_to=[], learning_rate=1e-3, deepspeed=ds_config_dict
)
trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=training_rows())
trainer.train()
print(f"{trainer.engine.global_steps} steps at stage {trainer.engine.zero_optimization_stage()}")
