"""Marks, tools and calls of conversations reach tokens and labels, or are refused or named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import run_alone
from harness.sft_files import make_sft_files

from orchestrator.wings.pairs.first_record import problem
from orchestrator.wings.pairs.pairs_file import read_pairs
from orchestrator.workloads.data import IGNORED_LABEL, TokenData, load_data

GOOD = '{"prompt": "a", "response": "b"}'
USER = {"role": "user", "content": "two?"}
ANSWER = {"role": "assistant", "content": "2"}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text(json.dumps(records))
    return path


def load(path: Path) -> TokenData:
    return load_data("pairs", str(path), seq=20, seed=7, vocab_size=256, validation_fraction=0.0)


CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
TOLD = {"role": "tool", "content": "3"}
SYSTEM = {"role": "system", "content": "s"}
WRONG = {"role": "assistant", "content": "no", "weight": 0}
NO = {"role": "assistant", "content": "no"}
# A template as models that call tools have it.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for m in messages if m.role != 'critic' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>\n"
WRITTEN = json.dumps(CALL, ensure_ascii=False) + END
# Records, the messages and tools that transformers' own template call gets for the same text, and what is trained.
MARKED: list[tuple[Any, list[Any], Any, list[str]]] = [
    ({"messages": [USER, WRONG, USER, ANSWER | {"weight": 1}]}, [USER, NO, USER, ANSWER], None, ["2" + END]),
    ({"messages": [USER, NO | {"train": False}, USER, ANSWER]}, [USER, NO, USER, ANSWER], None, ["2" + END]),
    ({"messages": [USER, ANSWER, USER, WRONG]}, [USER, ANSWER], None, ["2" + END]),
    (
        {"messages": [USER, CALLED, TOLD, ANSWER], "tools": [TOOL]},
        [USER, CALLED, TOLD, ANSWER],
        [TOOL],
        [WRITTEN, "2" + END],
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            ],
            "functions": [TOOL["function"]],
        },
        [USER, CALLED],
        [TOOL],
        [WRITTEN],
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "two?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "2"},
            ],
            "system": "s",
            "tools": json.dumps([TOOL["function"]]),
        },
        [SYSTEM, USER, CALLED, TOLD, ANSWER],
        [TOOL],
        [WRITTEN, "2" + END],
    ),
    (
        {"instruction": "two?", "output": "2", "system": "s", "history": [["two?", "no"]]},
        [SYSTEM, USER, NO, USER, ANSWER],
        None,
        ["no" + END, "2" + END],
    ),
    ({"prompt": [USER, NO, USER], "completion": [ANSWER]}, [USER, NO, USER, ANSWER], None, ["2" + END]),
    (
        {"messages": [USER | {"content": [{"type": "text", "text": "two?"}]}, ANSWER | {"name": "x"}], "id": 4},
        [USER, ANSWER],
        None,
        ["2" + END],
    ),
]
# Records that the template, or a model without one, cannot write; and what is told.
UNWRITTEN: list[tuple[Any, str | None, str]] = [
    ({"messages": [USER, CALLED]}, None, "record 1: expected texts alone, .* found tool_calls"),
    ({"messages": [USER, ANSWER], "tools": [TOOL]}, None, "found tools; add a chat_template.jinja"),
    ({"messages": [USER, CALLED]}, "{% for m in messages %}{{ m.role }}{% endfor %}", "record 1: .* found tool_calls"),
    ({"messages": [{"role": "critic", "content": "c"}, USER, ANSWER]}, TEMPLATE, "found messages of critic"),
    ({"messages": [USER, ANSWER]}, "{{ raise_exception('roles') }}", "record 1: .*TemplateError: roles"),
]


def _by_transformers(folder: Path) -> list[Any]:
    """For each record its text and the texts that are trained, and the text by transformers; then what is refused."""
    from transformers import AutoTokenizer

    from orchestrator.wings.pretrained.tokenizer import _PairEncoder

    model, _ = make_sft_files(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found: list[Any] = []
    for record, messages, tools, _ in MARKED:
        tokenizer.chat_template = TEMPLATE
        (one,) = _PairEncoder(tokenizer).encode(read_pairs(write(folder / "p.json", [record])))
        ids, spans = [*one.prompt, *one.answer], [*one.answered, (len(one.prompt), len(one.prompt) + len(one.answer))]
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        found.append((tokenizer.decode(ids), whole, [tokenizer.decode(ids[a:b]) for a, b in spans], one.unread))
    for record, template, _ in UNWRITTEN:
        tokenizer.chat_template = template
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller has the text
            _PairEncoder(tokenizer).encode(read_pairs(write(folder / "p.json", [record])))
        found.append(str(raised.value))
    return found


def test_marks_tools_and_calls_are_written_as_transformers_writes_them(tmp_path: Path) -> None:
    found = run_alone(_by_transformers, tmp_path)
    for (_, _, _, trained), (text, whole, parts, _) in zip(MARKED, found, strict=False):
        assert text == whole
        assert parts == trained
    assert found[len(MARKED) - 1][3] == ("id", "name")
    for (_, _, told), refusal in zip(UNWRITTEN, found[len(MARKED) :], strict=True):
        assert re.search(told, refusal), refusal


def test_an_answer_of_weight_0_has_its_tokens_and_no_labels(tmp_path: Path) -> None:
    talk = [USER, NO, USER, ANSWER]
    plain = load(write(tmp_path / "a.json", [{"messages": talk}])).train_batch(0, 1)
    marked = load(write(tmp_path / "p.json", [{"messages": [USER, WRONG, USER, ANSWER], "id": 1}]))
    ids, labels = marked.train_batch(0, 1)
    assert ids.tolist() == plain.input_ids.tolist()
    own = plain.labels.copy()
    own[0, 3:6] = IGNORED_LABEL  # "no" and its end, the labels after "two?"
    assert labels.tolist() == own.tolist()
    assert marked.learned_tokens(1) == 2
    assert marked.notes[-1] == "not read, keys of records: id (1)"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "expected 0, 1, true or false as the weight .*, found 0.5"),
        ({"messages": [USER | {"train": True}, ANSWER]}, "expected weights of the assistant's messages alone"),
        ({"messages": [USER, WRONG]}, "is the assistant's, found none to learn"),
        ({"messages": [USER, ANSWER | {"train_detail": [{}]}]}, "found train_detail, which is not read here"),
        (
            {"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]},
            "expected text parts .*, found image_url",
        ),
        ({"messages": [USER, CALLED | {"tool_calls": "x"}]}, "expected tool_calls as a list of objects, found 'x'"),
        ({"messages": [USER, {"role": "assistant"}]}, "expected a text as its content, found NoneType"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "t"}, "expected one system text"),
        ({"prompt": "a", "completion": "b", "label": False}, "found label, which divides good ones from bad"),
        ({"prompt": "a", "response": "b", "images": ["x.png"]}, "found images, which is not read here"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "expected a history of pairs"),
        ('{"prompt": "a", "response": "b", "response": "c"}', "the key 'response' is there twice"),
    ],
)
def test_marks_that_cannot_be_followed_are_refused_before_the_start(record: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(GOOD + "\n" + (record if isinstance(record, str) else json.dumps(record)))
    with pytest.raises(ValueError, match=f"line 2: .*{told}"):
        read_pairs(file)
    found = problem(file, "pairs")
    assert found is not None
    assert re.search(told, f"{found.rule}, found {found.found}")


def _ends_of_bytes(folder: Path) -> tuple[Any, bool, list[int]]:
    from transformers import AutoTokenizer

    from orchestrator.wings.pairs.conversation import Pair
    from orchestrator.wings.pairs.windows import bytes_of_pairs
    from orchestrator.wings.pretrained.tokenizer import pair_encoder, save_byte_tokenizer

    save_byte_tokenizer(folder)
    pairs = [Pair((USER, {"role": "assistant", "content": "\u0100"}))]  # the letter of byte 0 in a vocabulary of bytes
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    same = pair_encoder(folder).encode(pairs) == bytes_of_pairs(pairs)
    return tokenizer.eos_token_id, same, tokenizer("\u0100\0")["input_ids"]


def test_an_exported_tokenizer_of_bytes_ends_answers_as_the_training_did(tmp_path: Path) -> None:
    assert run_alone(_ends_of_bytes, tmp_path) == (0, True, [*"\u0100\0".encode()])
