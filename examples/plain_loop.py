"""A training loop as it is written for DeepSpeed; only its import is changed.

make example NAME=plain_loop
zlab launch --ranks 2 examples/plain_loop.py --deepspeed_config my.json
"""

import argparse

import torch
from small_model import rows_of, small_llama
from torch.utils.data import default_collate

import zero_runtime as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
}


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()

    deepspeed.init_distributed()
    model = small_llama()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=rows_of(),
        collate_fn=default_collate,
        config=asked.deepspeed_config or CONFIG,
    )
    batches = iter(loader)
    while engine.global_steps < asked.steps:
        batch, steps = next(batches, None) or next(batches := iter(loader)), engine.global_steps
        loss = engine(**{name: ids.to(engine.device) for name, ids in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps > steps and engine.global_rank == 0:
            norm, rate = engine.get_global_grad_norm(), engine.get_lr()[0]
            print(f"step {engine.global_steps}  loss {loss.item():.4f}  norm {norm:.4f}  lr {rate:g}")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
