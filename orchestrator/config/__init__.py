"""The configuration as frozen dataclasses: types and limits that depend on neither the machine nor another group."""
