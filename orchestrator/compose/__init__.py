"""Composes the arguments of a command line into plain values; the only package that imports Hydra and OmegaConf."""
