"""A script of a user: trains with the files that `zlab export` wrote, and imports nothing of zero-lab.

torchrun --nproc-per-node N plain_script.py FOLDER...: each folder has the written files, the architecture
(config.json), the first weights (first.safetensors) and the batches (batches.safetensors: ids and labels,
[steps, sequences, tokens]). Writes FOLDER/trained.json: the loss of each step, and its seconds.
"""

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


def the_model(folder):
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(load_file(folder / "first.safetensors"), strict=not config.tie_word_embeddings)
    return model.train()


def prepared(folder):
    """The function of a step, the schedule, and the micro-batch size, by the files that are in the folder."""
    if (folder / "ds_config.json").exists():
        import deepspeed

        # Its own messages for CPUs would be compiled at the start, and training with ZeRO does not use them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        parts = runpy.run_path(str(folder / "loop_parts.py"))
        engine = parts["initialize"](the_model(folder))
        return (lambda batches: parts["train_step"](engine, batches)), None, parts["MICRO_BATCH"]
    (file,) = folder.glob("*_parts.py")
    parts = runpy.run_path(str(file))
    wrap = parts.get("replicate") or parts["shard"]
    model = wrap(the_model(folder))
    optimizer = parts["optimizer"](model)
    schedule = parts["schedule"](optimizer)
    return (lambda batches: parts["train_step"](model, optimizer, batches)), schedule, parts["MICRO_BATCH"]


def train(folder):
    step, schedule, micro = prepared(folder)
    data = load_file(folder / "batches.safetensors")
    losses, seconds = [], []
    for ids, labels in zip(data["ids"], data["labels"], strict=True):
        own = slice(dist.get_rank() * len(ids) // dist.get_world_size(), None)
        count = len(ids) // dist.get_world_size()
        ids, labels = ids[own][:count], labels[own][:count]
        start = time.perf_counter()
        losses.append(step([*zip(ids.split(micro), labels.split(micro), strict=True)]))
        if schedule is not None:
            schedule.step()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        (folder / "trained.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    linear = torch.nn.functional.linear
    for name in sys.argv[1:]:
        train(Path(name))
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 puts its own in the place
    gc.collect()  # FSDP2's states are in cycles; a thread that still holds some at Python's end would abort it
    dist.barrier()
    dist.destroy_process_group()
