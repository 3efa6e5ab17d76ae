"""Folders of weights as Hugging Face libraries write and read them."""
