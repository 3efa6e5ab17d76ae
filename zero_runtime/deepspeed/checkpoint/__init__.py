"""DeepSpeed's `checkpoint`: the functions that scripts use. Checkpoints are those of zero_runtime.checkpoint."""
