"""DeepSpeed's entry points over the runtime: `import zero_runtime as deepspeed`. See docs/dropin.md.

Lazy like the package: `zero_runtime.initialize` and `zero_runtime.init_distributed` import what they need.
"""
