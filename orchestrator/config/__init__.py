"""The configuration as frozen dataclasses: its types and limits, without a machine or another group."""
