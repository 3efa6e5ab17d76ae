"""Fine-tuning with a dict of "auto" values, and a callback that prints the memory every few steps."""

import os

import torch
from harness.trainer_runs import tiny_llama, training_rows
from transformers import TrainerCallback, set_seed
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

import zero_runtime as deepspeed


class MemoryUsageCallback(TrainerCallback):
    def __init__(self, print_every_n_steps=10):
        self.print_every_n_steps = print_every_n_steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % self.print_every_n_steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                print(f"[Step {state.global_step}] allocated {torch.cuda.memory_allocated() / 1024**3:.2f} GB")
            else:
                used = deepspeed.get_accelerator().memory_allocated()  # of this process
                print(f"[Step {state.global_step}] some memory is used: {used > 0}")


os.environ["TOKENIZERS_PARALLELISM"] = "false"
set_seed(42)
deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
ds_config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": "auto",
}
arguments = TrainingArguments(
    output_dir="out",
    learning_rate=1e-3,
    adam_beta1=0.9,
    adam_beta2=0.95,
    weight_decay=0.1,
    warmup_steps=0.5,  # warmup_ratio of earlier versions of transformers
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    save_steps=4,
    max_grad_norm=1.0,
    ddp_find_unused_parameters=False,
    gradient_checkpointing=True,
    dataloader_pin_memory=True,
    report_to=[],
    deepspeed=ds_config,
)
trainer = Trainer(
    model=tiny_llama(),
    args=arguments,
    train_dataset=training_rows(),
    callbacks=[MemoryUsageCallback(print_every_n_steps=2)],
)
trainer.train()
stage, rates = trainer.engine.zero_optimization_stage(), trainer.engine.get_mom()
print(
    f"{trainer.state.global_step} steps at stage {stage}, betas {rates[0]}, saved {os.path.isdir('out/checkpoint-4')}"
)
