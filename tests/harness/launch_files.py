"""Files of Accelerate, DeepSpeed and the Trainer, with small models and data of nobody."""

from __future__ import annotations

ZERO3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ULYSSES = {
    **{"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1},
    **{"sequence_parallel_size": 2, "communication_data_type": "bf16", "gradient_clipping": 1.0},
}
ARGUMENTS = {
    **{"per_device_train_batch_size": 2, "output_dir": "out", "fp16": True, "dataset_name": "acme/text"},
    **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_machines: {machines}
num_processes: {ranks}
parallelism_config:
  parallelism_config_dp_replicate_size: {replicas}
  parallelism_config_dp_shard_size: {shards}
  parallelism_config_tp_size: {tp}
  parallelism_config_cp_size: {cp}
"""
ALONE = {"kind": "FSDP", "machines": 1, "ranks": 8, "replicas": 1, "shards": 1, "tp": 1, "cp": 1}
