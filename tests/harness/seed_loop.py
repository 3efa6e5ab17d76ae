"""A training script as users write it for DeepSpeed, and everything that it needs: a tokenizer and a model without a
hub, data, and its two configuration files. Only its import of deepspeed is changed."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

AUTO_TP_JSON = """// ds_config_autoTP_zero1.json
{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 1,
  "fp16": {
    "enabled": true
  },
  "zero_optimization": {
    "stage": 1,                 // 启用 Zero-1
    "reduce_bucket_size": 5e8   // 可调整
  },
  "tensor_parallel": {          // AutoTP 配置
    "enabled": true,
    "tp_size": 4,               // 张量并行度 (必须匹配 GPU 数量)
    "tp_group_size": 4,          // 通常等于 tp_size
    "verbose": false
  },
  "flops_profiler": {
    "enabled": false,
    "profile_step": 1
  }
}
"""

ZERO_3_JSON = """// ds_config_zero3.json
{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 1,
  "fp16": {
    "enabled": true
  },
  "zero_optimization": {
    "stage": 3,                 // 启用 Zero-3
    "offload_optimizer": {      // 可选 CPU Offload
      "device": "none"          // 或 "cpu" 节省更多显存
    },
    "offload_param": {
      "device": "none"          // 或 "cpu"
    },
    "contiguous_gradients": true,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "reduce_bucket_size": 1e6
  },
  "flops_profiler": {
    "enabled": false
  }
}
"""

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import zero_runtime as deepspeed

# 初始化模型和分词器
model_name = "meta-llama/Llama-2-7b-hf"  # 以LLaMA2为例
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(
    model_name,
    torch_dtype=torch.float16
)

# DeepSpeed 初始化
deepspeed.init_distributed()

# 选择配置文件
ds_config = "ds_config_autoTP_zero1.json"  # 或 "ds_config_zero3.json"

# 配置引擎参数
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config=ds_config,
    dist_init_required=True
)

# 训练循环示例
for batch in dataloader:
    inputs = tokenizer(batch["text"], return_tensors="pt", padding=True).to(engine.device)
    
    # 前向传播
    outputs = engine(**inputs, labels=inputs["input_ids"])
    loss = outputs.loss
    
    # 后向传播
    engine.backward(loss)
    
    # 参数更新
    engine.step()
    
    # 监控显存使用
    if torch.distributed.get_rank() == 0:
        mem = torch.cuda.memory_allocated() / (1024 ** 3)
        print(f"Step: {step} | Loss: {loss.item():.4f} | GPU Mem: {mem:.2f}GB")

if engine.global_rank == 0:
    print(f"Max allocated: {torch.cuda.max_memory_allocated()/1e9:.2f} GB")
"""  # as it was written
TEXTS = ("to be or not to be", "that is the question", "whether tis nobler", "in the mind to suffer")


class Words:
    """A tokenizer: letters of a text as ids, 0 for padding."""

    def __call__(self, texts: list[str], *, return_tensors: str, padding: bool) -> Any:
        import torch
        from transformers import BatchEncoding

        assert return_tensors == "pt"
        assert padding
        ids = [torch.tensor([ord(letter) - 31 for letter in text]) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return BatchEncoding({"input_ids": padded, "attention_mask": (padded > 0).long()})


def tiny_llama(_name: str, *, torch_dtype: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers)).to(torch_dtype)


def initialize_quietly(**given: Any) -> tuple[Any, Any, Any, Any]:
    """initialize without its warning, which other tests check."""
    import zero_runtime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zero_runtime.initialize(**given)


def run_script(folder: str, config: str, steps: int) -> dict[str, Any]:
    """Run the script in `folder` with one of its files for `steps` batches. Returns what it printed and counted, or the
    message with which it was refused."""
    import transformers

    from zero_runtime.errors import PlanError

    Path(folder, "ds_config_autoTP_zero1.json").write_text(AUTO_TP_JSON)
    Path(folder, "ds_config_zero3.json").write_text(ZERO_3_JSON)
    os.chdir(folder)
    transformers.AutoTokenizer.from_pretrained = lambda name: Words()
    transformers.AutoModelForCausalLM.from_pretrained = tiny_llama
    told: list[str] = []
    names: dict[str, Any] = {"dataloader": [{"text": list(TEXTS)}] * steps, "step": 0, "print": told.append}
    script = SCRIPT.replace('ds_config = "ds_config_autoTP_zero1.json"', f"ds_config = {json.dumps(config)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(script, names)
        except PlanError as error:
            return {"refused": str(error), "told": told}
    engine = names["engine"]
    found = {
        "told": told,
        "steps": (engine.global_steps, engine.skipped_steps, engine.runtime.updates),
        "dtype": {str(param.dtype) for param in engine.parameters()},
        "warned": [str(warning.message) for warning in caught if "zero_runtime" in str(warning.message)],
        "returned": (names["optimizer"] is engine.optimizer, names["scheduler"], names["_"]),
        "numbers": (engine.device.type, engine.global_rank, engine.local_rank, engine.world_size),
    }
    engine.destroy()
    return found
