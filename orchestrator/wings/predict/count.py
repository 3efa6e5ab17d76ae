"""The program of the child process that counts (shapes.py).

It imports before it reads what is asked, so that it can be started while that is still being composed.
"""

from __future__ import annotations

import gc
import json
import sys


def main() -> None:
    gc.disable()  # what is imported stays, so that collections would only visit it
    from orchestrator.wings.predict import shapes

    gc.freeze()
    gc.enable()
    shapes.main(json.load(sys.stdin))


if __name__ == "__main__":
    main()
