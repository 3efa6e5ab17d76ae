"""One process in the environment of a launcher, as a cell of a notebook sets it, and a file that a cell writes."""

import json
import os
import socket
from pathlib import Path

from harness.trainer_runs import tiny_llama, training_rows
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

with socket.socket() as free:
    free.bind(("localhost", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
os.environ |= {"MASTER_ADDR": "localhost", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

Path("ds_config_zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
arguments = TrainingArguments(
    output_dir="out", max_steps=2, save_strategy="no", report_to=[], deepspeed="ds_config_zero3.json"
)
trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=training_rows())
trainer.train()
print(f"{trainer.engine.global_steps} steps on {trainer.args.world_size} rank")
