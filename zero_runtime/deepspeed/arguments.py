"""DeepSpeed's arguments of a command line. Standard library only."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, which `initialize(args=...)` reads; returns the parser."""
    group = parser.add_argument_group("zero_runtime", "the configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="has no effect: initialize always makes an engine")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the JSON file of the configuration")
    return parser
