"""Where the time, the operations and the memory of a training step go, module by module: profiled steps."""
