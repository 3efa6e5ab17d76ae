"""Composes the arguments of a command line into plain values, with Hydra and OmegaConf."""
