"""A script for the Trainer of transformers with a DeepSpeed configuration; only one import is changed.

make example NAME=trainer
zlab launch --ranks 2 examples/trainer.py --deepspeed my.json --learning_rate 3e-3 --resume_from_checkpoint true
"""

import json
import sys

import torch
from small_model import rows_of, small_llama
from transformers import HfArgumentParser, TrainerCallback
from zero_runtime.integrations.transformers import Trainer, TrainingArguments

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
}
ARGUMENTS = {
    "output_dir": "outputs/example",
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "report_to": "none",
    "disable_tqdm": True,
    "deepspeed": json.dumps(CONFIG),
}


class Greeting(TrainerCallback):
    """A callback sees the state of the training, as with any Trainer."""

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"trained {state.global_step} steps on {args.world_size} ranks")


def make_trainer(words: list[str]) -> Trainer:
    """The Trainer for a command line of TrainingArguments; ARGUMENTS are the defaults."""
    defaults = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*defaults, *words])
    rows = rows_of()
    return Trainer(
        model=small_llama(),
        args=arguments,
        train_dataset=rows[:-16],
        eval_dataset=rows[-16:],
        callbacks=[Greeting()],
    )


def main() -> None:
    trainer = make_trainer(sys.argv[1:])
    resumes = trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resumes == "true" else resumes)
    print(trainer.evaluate()["eval_loss"])
    trainer.save_model()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
