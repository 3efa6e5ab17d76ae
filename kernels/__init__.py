"""Fused operations of the runtime. Cheap to import: a Hugging Face package of the same name is probed for."""
