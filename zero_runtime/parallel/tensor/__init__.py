"""Tensor parallelism: layers divided over consecutive ranks, below the ZeRO plan, which sees local shapes alone."""
