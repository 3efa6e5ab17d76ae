"""Sequence parallelism (arXiv 2309.14509): each rank of a group holds a part of every sequence, or some heads of it."""
