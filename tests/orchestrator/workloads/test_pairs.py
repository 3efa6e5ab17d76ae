"""Prompts and responses are read, tokenized as generation sees them, and only responses have labels that count."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness.ranks import run_alone
from harness.sft_files import make_sft_files
from pyarrow import parquet

from orchestrator.wings.pairs.conversation import Pair
from orchestrator.wings.pairs.first_record import problem
from orchestrator.wings.pairs.pairs_file import place_to_mend, read_pairs
from orchestrator.wings.pairs.text_records import LINES
from orchestrator.wings.pairs.windows import BYTE_END, Encoded, PairWindows, bytes_of_pairs
from orchestrator.workloads.data import IGNORED_LABEL, TokenData, load_data
from orchestrator.workloads.sources import read_text
from orchestrator.workloads.text_files import TABLES

GOOD = '{"prompt": "a", "response": "\u2028"}'
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": {"b": 1}}}],
}
USER = {"role": "user", "content": "two?"}
ANSWER = {"role": "assistant", "content": "2"}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text(json.dumps(records))
    return path


def load(path: Path, seq: int = 12, fraction: float = 0.0, **more: Any) -> TokenData:
    return load_data("pairs", str(path), seq=seq, seed=7, vocab_size=256, validation_fraction=fraction, **more)


@pytest.mark.parametrize(
    ("record", "prompt", "response"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"prompt": "a", "completion": "b"}, "a", "b"),
        ({"instruction": "a", "input": "of c", "output": "b"}, "a\nof c", "b"),
        ({"instruction": "a", "input": "", "output": "b"}, "a", "b"),
        ({"question": "a", "answer": "b"}, "a", "b"),
        ({"messages": [{"role": "system", "content": "s"}, USER, ANSWER]}, "s\ntwo?", "2"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "a", "b"),
        ({"system": "s", "conversations": [USER, ANSWER, USER]}, "s\ntwo?", "2"),
    ],
)
def test_each_form_of_a_record_is_a_prompt_and_a_response(
    record: Any, prompt: str, response: str, tmp_path: Path
) -> None:
    (as_array,) = read_pairs(write(tmp_path / "one.json", [record]))
    lines = tmp_path / "one.jsonl"
    lines.write_text(json.dumps(record) + "\n\n")
    as_array = as_array._replace(place="")
    assert [one._replace(place="") for one in read_pairs(lines)] == [as_array]
    packed = tmp_path / "one.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    assert [one._replace(place="") for one in read_pairs(packed)] == [as_array]
    assert ("\n".join(turn["content"] for turn in as_array.turns[:-1]), as_array.response) == (prompt, response)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "expected prompts and responses, found none"),
        ("[1]", "record 1: expected an object with prompt/response"),
        ('[{"prompt": "a"}]', "found the keys prompt"),
        ('[{"prompt": "a", "response": 3}]', "expected a text as its response, found int"),
        ('[{"prompt": "", "response": "b"}]', "expected a text as its prompt, found an empty one"),
        ('[{"messages": [{"role": "user", "content": "a"}]}]', "of which one after the first is the assistant's"),
        ("[{", "expected a JSON array of objects, or an object in each line"),
        (f"{GOOD}\n\n{{", "pairs.json, line 3: expected a JSON array of objects, or an object in each line"),
        (f"{GOOD}\n{'[' * 9000}", "pairs.json, line 2: .*RecursionError"),
        ('[{"conversations": [{"from": "x", "value": "a"}]}]', "`from` of human, .*, found 'x'"),
        ("\0\xff\0", "pairs.json, line 1: expected a JSON array"),
        ('{"text": "a"}', "line 1: expected an object with prompt/response, .*, found the keys text"),
        (
            '[{"conversations": [{"from": "human", "value": "a"}]}]',
            "record 1: expected conversations of which",
        ),
        (
            '{"prompt": "a", "response": "b", "completion": "c", "output": "d"}',
            "line 1: expected one response, found response and completion and output; remove all but one",
        ),
        ('{"response": "a", "messages": []}', "expected one response, found response and messages"),
        (GOOD + '\n{"prompt": "a", "response": "b\\ud800"}', r"pairs.json, line 2: .*half a character \(.ud800\)"),
    ],
)
def test_a_file_that_holds_no_pairs_is_refused_with_its_place(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=told) as raised:
        read_pairs(file)
    at = re.match(rf"{re.escape(str(file))}, (line|record) \d+(?=: expected)", str(raised.value))
    assert place_to_mend(f"rank 1: ValueError: {raised.value}") == (at[0] if at else "")


@pytest.mark.parametrize(
    ("name", "text", "kind", "told", "fix"),
    [
        ("a.jsonl", '\n{"text": "a"}\n{', "pairs", "line 2: expected an object with prompt", ("data=text",)),
        (
            "a.jsonl",
            '{"prompt": "a", "response": "b"}',
            "text",
            "line 1: expected an object with text",
            ("data=pairs",),
        ),
        ("a.jsonl.gz", "3", "text", "found int", ()),
        ("a.json", '[{"a":', "pairs", "expected a JSON array of objects", ()),
        ("a.json", '[{"a": "b"}]', "pairs", "record 1: expected an object", ()),
        ("a.tar.gz", "x", "text", "found another .gz", ()),
        ("a.jsonl", '{"text": "a"}', "text", "None", None),
        ("a.json", GOOD, "pairs", "None", None),
        ("a.jsonl", GOOD + "\n{", "pairs", "line 2: expected a JSON array of objects", ()),
        ("a.jsonl", "\n", "pairs", "data.path must be a file or a folder with records or text", ()),
        ("a.json", "[]", "pairs", "data.path must be a file or a folder with records", ()),
        ("a.jsonl", "", "text", "data.path must be a file or a folder with records", ()),
        ("a.json", "[" + GOOD, "text", "None", None),
    ],
)
def test_the_first_record_is_checked_before_a_start(
    name: str, text: str, kind: str, told: str, fix: tuple[str, ...] | None, tmp_path: Path
) -> None:
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for path in [tmp_path / name, tmp_path][: 2 if name.endswith(LINES) else 1]:
        found = problem(path, kind)
        assert told in str(found).replace(f"{path}", "")
        assert (None if found is None else found.fix) == fix


def test_texts_of_records_and_of_compressed_files_are_read(tmp_path: Path) -> None:
    records = [{"text": "one\u2028"}, {"text": "two\n", "id": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert read_text(tmp_path).decode() == "one\u2028\ntwo\nthree"
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}')
    with pytest.raises(ValueError, match="line 1: expected an object with text"):
        read_text(tmp_path)


def save(path: Path, records: list[dict[str, Any]]) -> Path:
    """Writes records as the name's end says: Parquet in groups of one row, else Arrow: as a stream, as
    `datasets.save_to_disk` does, or if the name says so as a file for random access."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        parquet.write_table(rows, path, row_group_size=1)
        return path
    new = pa.ipc.new_file if path.stem == "random" else pa.ipc.new_stream
    with new(str(path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=1)
    return path


ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "response": "b", "id": 1, "messages": None},
    {"prompt": None, "response": None, "id": 2, "messages": [USER, ANSWER]},
]
SHARDS = ("data-00000-of-00002", "data-00001-of-00002")


@pytest.mark.parametrize("name", ["{}.parquet", "{}.arrow", "{}/random.arrow", "{}.jsonl", "{}.json.gz"])
def test_a_folder_of_shards_is_the_same_data_as_a_file(name: str, tmp_path: Path) -> None:
    one = load(write(tmp_path / "one.json", ROWS))
    folder = tmp_path / "folder"
    for shard, row in zip(SHARDS, ROWS, strict=True):
        path = folder / name.format(shard)
        if path.suffix in TABLES:
            save(path, [row])
            save(path.parent / "cache-1.arrow", [{"id": 3}])
            (folder / "state.json").write_text("{}")
        else:
            text = json.dumps(row).encode()
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    (folder / "README.md").write_text("# A card")
    assert problem(folder, "pairs") is None
    assert load(folder).hash == one.hash


@pytest.mark.parametrize("end", TABLES)
def test_rows_of_tables_are_checked_as_records_are(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = save(tmp_path / f"both{end}", ROWS)
    assert [pair.response for pair in read_pairs(both)] == ["b", "2"]
    texts = save(tmp_path / f"texts{end}", [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}])
    assert read_text(texts) == b"one\ntwo\n"
    assert problem(texts, "text") is None
    found = problem(texts, "pairs")
    assert found is not None
    assert f"{texts}, row 1: expected an object with prompt/response" in found.rule
    assert (found.found, found.fix) == ("the keys id, text", ("data=text",))
    assert problem(both, "text") is not None
    save(texts, [{"text": "one"}, {"text": None}])
    assert ", row 2: expected a text as its text" in str(problem(texts, "text"))
    with pytest.raises(ValueError, match="row 2: expected a text as its text, found NoneType"):
        read_text(texts)
    twice = pa.table([["a"], ["b"], ["c"]], names=["prompt", "response", "response"])
    if end == ".parquet":
        parquet.write_table(twice, texts)
    else:
        with pa.ipc.new_stream(str(texts), twice.schema) as writer:
            writer.write_table(twice)
    assert "expected one column response" in str(problem(texts, "pairs"))
    texts.write_bytes(both.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"{re.escape(str(texts))}: expected a file of"):
        read_pairs(texts)
    called = [{"messages": [USER, CALLED]}, {"messages": [USER, ANSWER | {"weight": 1}]}]
    assert read_pairs(save(texts, called))[1].turns == (USER, ANSWER)  # without the nulls of columns of another row
    texts.write_bytes(b"ARROW1 or another")
    assert "expected a file of" in str(problem(texts, "text"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"expected the package pyarrow, found none; pip install -e .*\[data\]"):
        read_pairs(both)


@pytest.mark.parametrize(
    ("names", "found", "fixes"),
    [
        (("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"), "test, train", 2),
        (("train/data-0.arrow", "train/data-1.arrow", "validation/data-0.arrow"), "train, validation", 2),
        (("train-0.parquet", "train-1.parquet", "eval.parquet"), "eval, train", 1),
        (("train-0.parquet", "train-1.parquet", "trainer.parquet"), None, 0),
    ],
)
def test_the_parts_of_a_data_set_are_not_trained_on_together(
    names: tuple[str, ...], found: str | None, fixes: int, tmp_path: Path
) -> None:
    for name in names:
        save(tmp_path / name, ROWS)
    told = problem(tmp_path, "pairs")
    if found is None:
        assert told is None
        return
    assert told is not None
    assert told.found.startswith(f"{found} in {tmp_path}")
    assert [Path(fix.removeprefix("data.path=")).exists() for fix in told.fix] == [True] * fixes


def test_labels_of_prompts_and_of_filling_are_ignored() -> None:
    windows = PairWindows([Encoded([5, 6, 7], [8, 9]), Encoded([5], [6])], seq=6)
    indices = np.arange(2)
    assert windows.read(indices).tolist() == [[5, 6, 7, 8, 9, 0, 0], [5, 6, 0, 0, 0, 0, 0]]
    assert windows.counts(indices).tolist() == [[False, False, True, True, False, False], [True] + 5 * [False]]
    assert windows.counted(indices) == 3


def test_batches_have_the_labels_of_responses_alone_and_their_count(tmp_path: Path) -> None:
    data = load(write(tmp_path / "p.json", [{"prompt": "ab", "response": "cd"}, {"prompt": "e", "response": "f"}]))
    ids, labels = data.train_batch(0, 2)
    rows = {tuple(row[:3]): wanted for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True)}
    assert rows[97, 98, 99] == [IGNORED_LABEL, 99, 100, BYTE_END, *8 * [IGNORED_LABEL]]
    assert rows[101, 102, BYTE_END] == [102, BYTE_END, *10 * [IGNORED_LABEL]]
    (alone,) = data.train_batch(0, 1).input_ids.tolist()  # one row: labels must not be written over the inputs
    assert alone == ids[0].tolist()
    assert data.learned_tokens(2) == (labels != IGNORED_LABEL).sum() == 5
    # Of two epochs and one sample more, by the batches themselves.
    assert data.learned_tokens(5) == (data.train_batch(0, 5).labels != IGNORED_LABEL).sum()


TALK = {
    "conversations": [
        *({"from": "gpt", "value": "!"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}),
        *({"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}, {"from": "human", "value": "f"}),
    ]
}


def test_every_answer_of_a_conversation_is_trained_and_the_rest_is_context(tmp_path: Path) -> None:
    data = load(write(tmp_path / "p.json", [TALK]))
    (ids,), (labels,) = (part.tolist() for part in data.train_batch(0, 1))
    assert bytes(ids) == b"!\nabc\0de\0" + bytes(3)
    ignored = IGNORED_LABEL
    assert labels == [ignored, ignored, *b"bc\0", ignored, *b"e\0", *4 * [ignored]]
    assert data.learned_tokens(1) == 5
    assert data.notes[0].startswith("the turns of 1 conversation are joined without roles")
    (example,) = data.examples(1)
    assert (bytes(example.prompt), bytes(example.answer)) == (b"!\nabc\0d", b"e\0")
    short = load(write(tmp_path / "p.json", [TALK]), seq=4)  # holds a part of the first answer alone
    assert short.train_batch(0, 1).labels.tolist() == [[ignored, ignored, *b"bc"]]
    assert short.learned_tokens(1) == 2


def _talk_by_template(folder: Path) -> tuple[str, list[str]]:
    """The text of a conversation of two answers by a chat template, and the parts that are trained."""
    from transformers import AutoTokenizer

    from orchestrator.wings.pretrained.tokenizer import _PairEncoder

    model, _ = make_sft_files(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    (one,) = _PairEncoder(tokenizer).encode([Pair((USER, ANSWER, USER, {**ANSWER, "content": "3"}))])
    ids = [*one.prompt, *one.answer]
    spans = [*one.answered, (len(one.prompt), len(ids))]
    return tokenizer.decode(ids), [tokenizer.decode(ids[start:stop]) for start, stop in spans]


def test_a_chat_template_writes_a_conversation_whole(tmp_path: Path) -> None:
    text, trained = run_alone(_talk_by_template, tmp_path)
    user, opened = "<|im_start|>user\ntwo?<|im_end|>\n", "<|im_start|>assistant\n"
    assert text == f"{user}{opened}2<|im_end|>\n{user}{opened}3<|im_end|>\n"
    assert trained == ["2<|im_end|>\n", "3<|im_end|>\n"]


def test_pairs_that_are_too_long_lose_their_end_or_are_left_out_and_it_is_told(tmp_path: Path) -> None:
    records = [
        {"prompt": "abc", "response": "defghi"},
        {"prompt": "abcdefgh", "response": "i"},
        {"prompt": "a", "response": "b"},
    ]
    data = load(write(tmp_path / "p.json", records), seq=5)
    assert data.train_samples == 2
    assert [note.split(":")[0].split(" pairs")[0] for note in data.notes] == ["1 of 2", "1"]
    assert {tuple(row) for row in data.train_batch(0, 2).labels.tolist()} == {
        (IGNORED_LABEL, IGNORED_LABEL, 100, 101, 102),
        (98, BYTE_END, *3 * [IGNORED_LABEL]),
    }
    with pytest.raises(ValueError, match="found all 1 longer than 2"):
        PairWindows([Encoded([1, 2, 3], [4])], seq=2)


def test_the_hash_covers_tokens_and_where_responses_begin(tmp_path: Path) -> None:
    texts = [("ab", "c"), ("a", "bc"), ("ab", "d")]
    hashes = {load(write(tmp_path / "p.json", [{"prompt": a, "response": b}])).hash for a, b in texts}
    assert len(hashes) == 3


def test_examples_are_held_out_prompts_with_the_responses_of_the_data(tmp_path: Path) -> None:
    records = [{"prompt": chr(97 + number), "response": str(number)} for number in range(10)]
    data = load(write(tmp_path / "p.json", records), fraction=0.2)
    held = {(bytes(one.prompt), bytes(one.answer)) for one in data.examples(9)}
    assert len(held) == data.validation_samples == 2
    trained = {chr(row[0]) for row in data.train_batch(0, data.train_samples).input_ids.tolist()}
    assert trained.isdisjoint({prompt.decode() for prompt, _ in held})
    for prompt, answer in held:
        assert answer == str(ord(prompt) - 97).encode() + b"\0"


def _encoded(folder: Path) -> list[Any]:
    """Tokens of one pair by the tokenizer with its chat template, without it, and with a template that hides turns."""
    from transformers import AutoTokenizer

    from orchestrator.wings.pretrained.tokenizer import _PairEncoder, pair_encoder, texts_of

    model, _ = make_sft_files(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pair = Pair((USER, ANSWER))
    texts = texts_of(model, 384)
    (templated,) = _PairEncoder(tokenizer).encode([pair])
    found: list[Any] = [tokenizer.decode(part) for part in templated[:2]]
    found += [texts.ask("two?") == templated.prompt, tokenizer.decode([texts.end]), pair_encoder(model).writes_roles]
    tokenizer.chat_template = None
    (plain,) = _PairEncoder(tokenizer).encode([pair])
    found += [tokenizer.decode(part) for part in plain[:2]]
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    try:
        _PairEncoder(tokenizer).encode([pair])
    except ValueError as error:
        found.append(str(error))
    return found


def test_pairs_are_written_by_the_chat_template_or_else_end_with_the_end_token(tmp_path: Path) -> None:
    prompt, response, asks_alike, end, writes_roles, plain, plain_response, refused = run_alone(_encoded, tmp_path)
    assert prompt == "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    assert response == "2<|im_end|>\n"
    assert (asks_alike, end) == (True, "<|im_end|>")
    assert writes_roles
    assert (plain, plain_response) == ("two?", "2<|endoftext|>")
    assert "expected a chat template whose text of a prompt begins" in refused


def test_bytes_of_a_pair_end_with_a_byte_that_no_text_has() -> None:
    assert bytes_of_pairs([Pair((USER, {**ANSWER, "content": "é"}))]) == [
        Encoded([*b"two?"], [*"é".encode(), BYTE_END])
    ]
