"""Folders of weights in the format of the Hugging Face libraries."""
