"""Files and a command line in the style of other tools, with small models and data of nobody."""

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
AXOLOTL = """
base_model: acme/small-llama
datasets: [{path: acme/instructions, type: alpaca}]
val_set_size: 0.05
sequence_len: 512
sample_packing: true
adapter:
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
weight_decay: 0.01
special_tokens: {pad_token: <pad>}
"""
AXOLOTL_FSDP = """
lora_target_linear: false
fsdp_version: 2
fsdp_config:
  offload_params: true
  reshard_after_forward: true
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
LLAMA_FACTORY = """
model_name_or_path: acme/small-llama
stage: sft
do_train: true
dataset: acme_demo
template: llama3
cutoff_len: 256
preprocessing_num_workers: 4
output_dir: saves/small
logging_steps: 10
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 7
bf16: true
ddp_timeout: 180000000
"""
TRL = """
model_name_or_path: acme/small-llama
dataset_name: acme/chat
dataset_text_field: text
packing: true
max_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
lr_scheduler_type: constant
num_train_epochs: 1
output_dir: out
"""
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
TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "debugmodel"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 20
decay_type = "cosine"
[training]
local_batch_size = 2
global_batch_size = -1
seq_len = 256
max_norm = 0.5
steps = 100
dataset = "c4_test"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = {shards}
fsdp_reshard_after_forward = "{reshard}"
tensor_parallel_degree = 1
pipeline_parallel_degree = {stages}
[checkpoint]
interval = 500
[activation_checkpoint]
mode = "full"
"""
OPENRLHF = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --max_len 2048 --dataset acme/chat --input_key question "
    "--train_batch_size 64 --micro_train_batch_size 2 --pretrain acme/small --save_path ./out --logging_steps 1 "
    "--max_epochs 1 --bf16 --learning_rate 5e-6 --packing_samples --gradient_checkpointing --lr_scheduler constant"
)
