"""Reads configurations of DeepSpeed, Accelerate and transformers' Trainer, and writes a point in their forms.

The meaning of a key of DeepSpeed is owned by zero_runtime.deepspeed, which runs it; here it is expressed in the
settings of conf/.
"""
