"""The program of the child process that counts (shapes.py): it imports only what a count needs.

transformers imports several large libraries if they are installed, of which a model on the meta device uses none. They
are left out, as where they are not installed, unless a configuration has an adapter: PEFT needs some of them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

OPTIONAL = ("accelerate", "scipy", "sklearn", "pandas")


def main() -> None:
    asked = json.load(sys.stdin)
    if all(one["adapter"]["kind"] == "none" for one in _configurations(asked)):
        for name in OPTIONAL:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # an import of it fails from now on
    gc.disable()  # what is imported stays, so that collections would only visit it
    from orchestrator.worker import shapes

    gc.freeze()
    gc.enable()
    shapes.main(asked)


def _configurations(asked: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from asked["units"].values()
    for family in asked["activations"]:
        yield from family.values()


if __name__ == "__main__":
    main()
