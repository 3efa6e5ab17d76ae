"""From the words of a command line to plain values: the only importer of Hydra and OmegaConf."""
