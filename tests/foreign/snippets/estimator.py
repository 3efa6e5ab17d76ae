"""The memory that a model of T0's size needs; it is built without taking any."""

import torch
from transformers import AutoModelForSeq2SeqLM, T5Config
from zero_runtime.zero import estimate_zero3_model_states_mem_needs_all_live

sizes = {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "num_layers": 24}
config = T5Config(**sizes, vocab_size=32128, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
with torch.device("meta"):
    model = AutoModelForSeq2SeqLM.from_config(config)
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1)
