"""Other engines as an axis of a sweep: DeepSpeed, FSDP2 and DDP do the same work as zero-lab's own runtime.

`contract.py` says what an engine's module has; `foreign_runtime.py` makes of it what a rank trains with; `work.py`
counts the work of every engine in the same way, and `equality.py` decides whether two rows did the same.
"""
