"""Rehearses the exact rows of `make gpu` on the virtual GPU: their path to the end, without values.

`python -m harness.virtual_gpu.exact_rows GUARD`; writes {"rows": how many, "disorders": of their accesses} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

from harness.virtual_gpu.build import load_guard


def main() -> None:
    os.environ["ZLAB_KERNELS"] = "reference"
    guard = load_guard(sys.argv[1])
    warnings.simplefilter("ignore")
    from harness.exact import ExactModel, rows_of, trained
    from harness.virtual_gpu.row import Row
    from harness.virtual_gpu.rows import Bench

    row = Row()
    bench = Bench(guard, row, ())
    rows = rows_of(row.world)
    with bench.recorder:
        for one in rows:
            trained(one, bench.device, lambda: bench.on_device(ExactModel()), bench.read_host)
    print(json.dumps({"rows": len(rows), "disorders": len(bench.machine.disorders)}))


if __name__ == "__main__":
    main()
