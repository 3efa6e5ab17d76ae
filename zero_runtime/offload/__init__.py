"""Offload of model states between uses to host memory, or to a scratch file on NVMe."""
