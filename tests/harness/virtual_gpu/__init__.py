"""A virtual GPU: the runtime runs on fake `cuda` tensors of a CPU build, and every ordering of its work is checked."""
