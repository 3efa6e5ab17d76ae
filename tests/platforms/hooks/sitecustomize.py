"""Puts a fault into every process of a test run, ranks included.

Python imports this file first if its folder is on PYTHONPATH. ZLAB_FAULTY names what errs by one unit in the last
place: `root` (torch's square root) or `kernel` (our AdamW in C++).
"""

import importlib.abc
import importlib.machinery
import os
import sys

FAULTY = os.environ.get("ZLAB_FAULTY", "")


def spoil_roots(torch):
    """Makes torch.sqrt, Tensor.sqrt and Tensor.sqrt_ return the next larger number where the root's last bit is 1."""

    def after(function):
        def root(*args, **kwargs):
            found = function(*args, **kwargs)
            if found.is_floating_point() and found.dtype in (torch.float32, torch.float64):
                data = found.data  # autograd does not track changes of it
                odd = data.view(torch.int32 if data.dtype == torch.float32 else torch.int64) % 2 != 0
                data.copy_(torch.where(odd & data.isfinite(), data.nextafter(torch.full_like(data, torch.inf)), data))
            return found

        return root

    two = torch.full((64,), 2.0)
    right = two.sqrt()
    torch.sqrt = after(torch.sqrt)
    torch.Tensor.sqrt = after(torch.Tensor.sqrt)
    torch.Tensor.sqrt_ = after(torch.Tensor.sqrt_)
    assert all(not torch.equal(root, right) for root in (torch.sqrt(two), two.sqrt(), two.clone().sqrt_()))


def spoil_kernel(operations):
    """Makes AdamW in C++ leave the last weight one unit in the last place too large."""
    import torch

    right = operations.adamw_

    def adamw_(master, *args, **kwargs):
        right(master, *args, **kwargs)
        if master.dtype == torch.float32 and master.numel():
            last = master[-1:]
            last.copy_(last.nextafter(torch.full_like(last, torch.inf)))

    operations.adamw_ = adamw_


SPOILED = {"root": ("torch", spoil_roots), "kernel": ("zero_runtime.kernels.cpu.operations", spoil_kernel)}


class Spoiler(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that finds one module as the other finders do, and puts the fault into it after its execution."""

    def __init__(self, name, spoil):
        self._name, self._spoil = name, spoil

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        spec = next(filter(None, (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)))
        real, spec.loader = spec.loader, self
        self._real = real
        return spec

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        self._real.exec_module(module)
        self._spoil(module)


if FAULTY:
    sys.meta_path.insert(0, Spoiler(*SPOILED[FAULTY]))
