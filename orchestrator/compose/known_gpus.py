"""The data sheets in conf/hardware by the name that a GPU's driver reports."""

from __future__ import annotations

import contextlib

import yaml

from orchestrator.compose import folders
from orchestrator.config.hardware import GpuNode
from orchestrator.config.strict import build


def data_sheet(gpu: str) -> GpuNode | None:
    """The description of a node with this GPU; None if no file has it. The user's own files are looked at too, and one
    that cannot be read is passed over."""
    from orchestrator.compose.compose import read_yaml  # imported here: it imports Hydra, which other ranks do without

    for folder in folders.config_folders(None):
        for file in sorted((folder / "hardware").glob("*.yaml")):
            content: object = None
            with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
                content = read_yaml(file)
            if isinstance(content, dict) and content.get("gpu") == gpu:
                node: GpuNode
                node, broken = build(GpuNode, content, "hardware")
                if not broken:
                    return node
    return None
