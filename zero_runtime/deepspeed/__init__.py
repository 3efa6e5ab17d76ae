"""DeepSpeed's entry points on top of the runtime: `import zero_runtime as deepspeed`. See docs/dropin.md.

Imports are lazy, as in the package: `zero_runtime.initialize` and `zero_runtime.init_distributed` import these modules.
"""
