"""What CONTRIBUTING.md shows can be done: its examples, carried out in a copy of the program, and the files they touch.

The code is read from the guide, so that an example which no longer works fails here. A change that needs another file
for one of them raises what every such change costs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import wings
from tests.house.test_imports import MODULES
from tests.house.test_reach import lines_of_code

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(example: str) -> list[str]:
    """The Python of an example of the guide, one text for each block."""
    section = GUIDE.split(f"\n### {example}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    return [block.strip("\n") for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


class Copy:
    """A copy of the program, and the files that were changed in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.touched = root, set[str]()
        for name in ("kernels", "zero_runtime", "orchestrator", "conf", "sweeps"):
            shutil.copytree(ROOT / name, root / name, symlinks=True)  # with the bytecode of what is not changed
        shutil.copy2(ROOT / "run.py", root)

    def new(self, file: str, text: str) -> None:
        assert not (self.root / file).exists(), file
        (self.root / file).parent.mkdir(exist_ok=True)
        (self.root / file).write_text(text, encoding="utf-8")
        self.touched.add(file)

    def put(self, file: str, before: str, text: str) -> None:
        """Writes the text into the file, before the only place with `before`."""
        found = (self.root / file).read_text(encoding="utf-8")
        assert found.count(before) == 1, f"{file}: expected one {before!r}, found {found.count(before)}"
        (self.root / file).write_text(found.replace(before, f"{text}{before}"), encoding="utf-8")
        self.touched.add(file)

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_verb_touches_two_files(copy: Copy) -> None:
    imports = (
        "import json\nimport os\nfrom collections.abc import Sequence\nfrom pathlib import Path\n"
        "from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser\n"
        "from orchestrator.text.paths import DEFAULT_OUTPUT, OUTPUT\n"
    )
    (code,) = blocks("A verb")
    (line,) = re.findall(r'"size": "[\w.]+"', GUIDE)
    copy.new("orchestrator/commands/size.py", f'"""Bytes."""\n{imports}\n\n{code}\n')
    copy.put("orchestrator/compose/arguments.py", '    "doctor": ', f"    {line},\n")
    assert len(copy.touched) == 2
    (copy.root / "some").mkdir()
    (copy.root / "some" / "file").write_bytes(bytes(1200))
    done = copy.python("run.py", "size", "--output", "some")
    assert (done.returncode, done.stdout, done.stderr) == (0, "some  1,200 bytes\n", "")
    wrong = copy.python("run.py", "size", "--outptu", "some")
    assert (wrong.returncode, wrong.stderr.count("run.py size [-h] [--output OUTPUT] [--json]")) == (2, 1)


def test_a_rule_of_the_plan_touches_two_files(copy: Copy) -> None:
    (code,) = blocks("A rule")
    (line,) = re.findall(r'Rule\(data_rules\.adapter_is_narrower.*?"model"\)\)', GUIDE, re.DOTALL)
    copy.put("orchestrator/planning/rules/data.py", "def tokenizer_of(", f"{code}\n\n\n")
    copy.put("orchestrator/planning/rules/table.py", "    Rule(data_rules.weights_are_there,", f"    {line},\n")
    assert len(copy.touched) == 2
    done = copy.python("run.py", "adapter=lora", "adapter.rank=500")
    told = GUIDE.split("$ python run.py adapter=lora adapter.rank=500\n", 1)[1].split("```", 1)[0]
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.full
def test_an_engine_touches_three_files_and_an_option(copy: Copy) -> None:
    imports = (
        "from __future__ import annotations\n"
        "from collections.abc import Iterable, Iterator, Mapping, Sequence\nfrom typing import TYPE_CHECKING, Any\n"
        "from orchestrator.config.schema import RunConfig\nfrom orchestrator.config.strict import Broken\n"
        "from orchestrator.wings.engines.contract import Task, Updated\n"
        "from orchestrator.wings.engines.limits import common_problems, replicated\n"
        "from zero_runtime.predict.memory.peers import PeerMemory, PeerModel\n"
        "if TYPE_CHECKING:\n    import torch\n    from zero_runtime.optim.lr_schedule import Rates\n"
    )
    (code,) = blocks("An engine")
    (line,) = re.findall(r'"handmade": "[\w.]+"', GUIDE)
    (kind,) = re.findall(r'`(handmade = "handmade")`', GUIDE)
    copy.new("orchestrator/wings/engines/handmade.py", f'"""By hand."""\n{imports}\n\n{code}\n')
    copy.put("orchestrator/wings/__init__.py", '    "ddp": "orchestrator.wings.engines.ddp",\n', f"    {line},\n")
    copy.put("orchestrator/config/engine.py", '    plain = "plain"\n', f"    {kind}\n")
    copy.new("conf/engine/handmade.yaml", "kind: handmade\n")
    assert sorted(Path(file).suffix for file in copy.touched) == [".py", ".py", ".py", ".yaml"]
    wrong = copy.python("run.py", "engine=handmade", "precision=bf16", "resources.device=cpu")
    assert wrong.returncode == 2
    assert "the hand-made loop computes in fp32, found 16 bits      fix: precision=fp32" in wrong.stderr
    words = (
        *("engine=handmade", "zero=stage0", "precision=fp32", "tracking=none", "model=llama_tiny", "data=synthetic"),
        *("measure=quick", "measure.steps=2", "resources.device=cpu", "resources.ranks=2", "resources.threads=1"),
        *("batch.seq=16", "batch.micro=1"),
    )
    done = copy.python("run.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients are sent after the last backward, one message for each parameter" in done.stdout


def test_an_adapter_of_an_engine_has_at_most_150_lines_of_code() -> None:
    sizes = {kind: lines_of_code(module) for kind, module in wings.ENGINES.items() if module in MODULES}
    assert {"ddp", "plain"} <= sizes.keys()
    assert {kind: size for kind, size in sizes.items() if size > 150} == {}


@pytest.mark.full
def test_an_optimizer_touches_four_files(copy: Copy) -> None:
    config, update = blocks("An optimizer")
    copy.put("zero_runtime/optim/configs.py", "OPTIMIZERS: dict", f"{config}\n\n\n")
    copy.put("zero_runtime/optim/configs.py", "        TorchConfig,\n", "        SignumConfig,\n")
    copy.put("zero_runtime/optim/rules.py", "_UPDATES: dict", f"{update}\n\n\n")
    copy.put("zero_runtime/optim/rules.py", "    LionConfig: _lion,\n", "    SignumConfig: _signum,\n")
    copy.put("zero_runtime/optim/rules.py", "    SgdConfig,\n)", "    SignumConfig,\n")
    lion = (ROOT / "conf" / "optimizer" / "lion.yaml").read_text(encoding="utf-8")
    lines = lion.replace("kind: lion", "kind: signum").splitlines(keepends=True)
    own = "".join(line for line in lines if not line.startswith(("beta2", "state_dtype")))
    copy.new("conf/optimizer/signum.yaml", own)
    shutil.copy2(ROOT / "tests" / "harness" / "configuration_page.py", copy.root)
    page = copy.python("configuration_page.py")
    copy.new("docs/configuration.md", page.stdout)
    assert "signum" in page.stdout
    assert len(copy.touched) == 4
    words = ("zero=stage3", "optimizer=signum", "tracking=none", "model=llama_tiny", "measure=quick", "measure.steps=2")
    done = copy.python("run.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
