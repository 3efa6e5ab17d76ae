"""The program of the child process that counts (shapes.py).

`count.py lean` imports only what a count without adapters needs, see [Note: lean imports]. It imports before it reads
what is asked, so that it can be started while that is still being composed.
"""

from __future__ import annotations

import gc
import json
import sys

from orchestrator.wings.predict.counting_child import LEAN


def main() -> None:
    gc.disable()  # what is imported stays, so that collections would only visit it
    if sys.argv[1:] == [LEAN]:
        from orchestrator.worker import lean_imports

        lean_imports.import_lean()
    from orchestrator.wings.predict import shapes

    gc.freeze()
    gc.enable()
    shapes.main(json.load(sys.stdin))


if __name__ == "__main__":
    main()
