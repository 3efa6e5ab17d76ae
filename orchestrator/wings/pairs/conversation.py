"""Reads a record as a conversation: every key that it has is used, refused by name, or noted as not read.

The keys of a record, by format, from the formats' own documentation:

| format | used |
|---|---|
| prompt/completion (TRL; also lists of messages), prompt/response, question/answer | `system`, `history`, `tools` |
| instruction/output (Alpaca, LLaMA-Factory) | also `input`; answers in `history` are trained too |
| `messages` (OpenAI, TRL, transformers) | `tools`, `functions`, `system` |
| `conversations` (ShareGPT) | `tools`, `system` |

Refused are those of REFUSED, and a bool in one of PREFERENCE. The rest, such as `parallel_tool_calls`, is noted.

The keys of a message are `role` and `content` (ShareGPT: `from` and `value`); `weight` 0 or 1 (OpenAI), `train`
(axolotl) or `loss`, which say whether an answer is trained; `tool_calls`, or its old form `function_call`.
All others (`name`, `tool_call_id`, `reasoning_content`, `thinking`) are handed to the chat template.

Sources: OpenAI's API reference, FineTuneChatRequestInput; hiyouga/LLaMA-Factory data/README.md; huggingface/trl
docs/source/dataset_formats.md; transformers' "Tool use" (arguments of calls are objects, not texts); axolotl
docs/dataset-formats/conversation.qmd. Several text parts of one content are joined by line ends, as vLLM joins them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

MESSAGES, CONVERSATIONS, TOOLS, CALLS = "messages", "conversations", "tools", "tool_calls"
CALL = "function_call"
# The roles of ShareGPT's `from`.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **{role: role for role in ("system", "developer")},
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "function_response"), "tool"),
    **dict.fromkeys((CALL, "tool_call"), CALL),
}
# The keys of the prompt and of the response of a record.
PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = f"{', '.join('/'.join(keys) for keys in PAIR_KEYS)}, {MESSAGES} or {CONVERSATIONS}"
BESIDE = ("system", TOOLS, "functions")  # read in every form
MARKS = ("weight", "train", "loss")  # of an answer: whether it is trained
PREFERENCE = ("label", "kto_tag")  # a bool in them says whether the answer is a good one
REFUSED = ("images", "image", "videos", "audios", "audio", "train_detail", "chat_template_kwargs")
# All columns of a table that are read.
COLUMNS = (
    *dict.fromkeys(key for keys in PAIR_KEYS for key in keys),
    *("input", "history", MESSAGES, CONVERSATIONS, *BESIDE, *PREFERENCE, *REFUSED),
)

Message = Mapping[str, Any]


class Pair(NamedTuple):
    """A conversation up to its last answer that is trained.

    turns: its messages as chat templates read them. untrained: the places of answers that are context. tools: what
    the model may call. place: of the record. unread: the keys of the record that nothing reads.
    """

    turns: tuple[Message, ...]
    untrained: frozenset[int] = frozenset()
    tools: tuple[Message, ...] = ()
    place: str = "data"
    unread: tuple[str, ...] = ()

    @property
    def response(self) -> str:
        """The last answer."""
        return str(self.turns[-1]["content"])

    def answers(self) -> Iterator[int]:
        """The places of what the assistant answers. One with nothing before it answers nothing."""
        yield from (at for at, turn in enumerate(self.turns) if at and turn["role"] == "assistant")

    def extra_keys(self) -> tuple[str, ...]:
        """The keys of messages besides role and content."""
        return tuple(dict.fromkeys(key for turn in self.turns for key in turn if key not in ("role", "content")))

    def check_plain(self) -> None:
        """ValueError if the conversation has calls or tools, which only a chat template can write."""
        found = [key for key in (*self.extra_keys(), *[TOOLS][: len(self.tools)]) if key in (CALLS, TOOLS)]
        if found:
            raise ValueError(
                f"{self.place}: expected texts alone, as the model has no chat template that writes anything else, "
                f"found {' and '.join(found)}; add a chat_template.jinja to the model's folder, or remove them"
            )


def pair_of(place: str, record: Any) -> Pair:
    """A record as a pair. ValueError, which begins with `place`, if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object with {FORMS}, found {type(record).__name__}")
    answers = [
        key for key in (*(answer for _, answer in PAIR_KEYS), MESSAGES, CONVERSATIONS) if record.get(key) is not None
    ]
    if len(answers) > 1:
        raise ValueError(f"{place}: expected one response, found {' and '.join(answers)}; remove all but one of them")
    _refuse(place, record)
    keys: tuple[str, ...] = tuple(answers)
    if MESSAGES not in answers and CONVERSATIONS not in answers:
        keys = next((keys for keys in PAIR_KEYS if keys[0] in record and keys[1] in answers), ())
    if not keys:
        raise ValueError(f"{place}: expected an object with {FORMS}, found the keys {', '.join(record) or 'none'}")
    turns, more = (record[keys[0]], ()) if len(keys) == 1 else _of_texts(place, record, *keys)
    if not isinstance(turns, list) or not all(isinstance(one, dict) for one in turns):
        raise ValueError(f"{place}: expected {keys[0]} of which one after the first is the assistant's, found none")
    read = [_message(place, one) for one in turns]
    known = (*keys, *more, *BESIDE, *PREFERENCE, *REFUSED)
    unread = tuple(key for key in record if key not in known)
    return _conversation(place, keys[0], _after_system(place, record, read), _tools(place, record), unread)


def _refuse(place: str, one: Mapping[str, Any]) -> None:
    """ValueError for keys that would change what is trained, and are not read here."""
    for key in (key for key in REFUSED if one.get(key)):
        raise ValueError(
            f"{place}: expected texts alone, found {key}, which is not read here; remove it, or the record"
        )
    for key in (key for key in PREFERENCE if isinstance(one.get(key), bool)):
        raise ValueError(
            f"{place}: expected answers to learn, found {key}, which divides good ones from bad; keep the good ones, "
            "and remove the key"
        )


def _of_texts(place: str, record: Mapping[str, Any], asked: str, answered: str) -> tuple[Any, tuple[str, ...]]:
    """The messages of a prompt and a response, and the keys besides them that were read."""
    prompt, response = record[asked], record[answered]
    if isinstance(prompt, list) and isinstance(response, list):  # TRL: the completion alone is trained
        context = [
            one | {"train": False} if isinstance(one, dict) and one.get("role") == "assistant" else one
            for one in prompt
        ]
        return [*context, *response], ()
    prompt, response = text_of(place, asked, prompt), text_of(place, answered, response)
    if not prompt:
        raise ValueError(f"{place}: expected a text as its {asked}, found an empty one")
    more = text_of(place, "input", record.get("input") or "") if asked == "instruction" else ""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in history):
        raise ValueError(f"{place}: expected a history of pairs [prompt, response], found {history!r:.60}")
    texts = [*(text for one in history for text in one), f"{prompt}\n{more}" if more else prompt, response]
    roles = ("user", "assistant") * (len(history) + 1)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return turns, ("history", *(("input",) if asked == "instruction" else ()))


def _after_system(place: str, record: Mapping[str, Any], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns after a system text that the record has beside them."""
    system = text_of(place, "system", record.get("system") or "")
    own = turns[0]["content"] if turns and turns[0]["role"] == "system" else ""
    if system and own and own != system:
        raise ValueError(f"{place}: expected one system text, found another as the first message; remove one of them")
    return [{"role": "system", "content": system}, *turns] if system and not own else turns


def _message(place: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it, with its marks."""
    _refuse(place, one)
    kept = {key: value for key, value in one.items() if value is not None and key not in ("from", "value")}
    role, content = one.get("from", one.get("role")), one.get("value", one.get("content"))
    if "from" in one and role not in ROLES:
        raise ValueError(f"{place}: expected conversations with `from` of {', '.join(ROLES)}, found {role!r}")
    role = ROLES[role] if "from" in one else text_of(place, "role", role)
    if role == CALL:
        role, kept[CALLS], content = "assistant", content, None
    if CALL in kept:
        kept[CALLS] = kept.pop(CALL)
    if kept.get(CALLS):
        if role != "assistant":
            raise ValueError(f"{place}: expected {CALLS} in messages of the assistant, found them in one of {role}")
        kept[CALLS] = [_function(place, call) for call in _listed(place, CALLS, kept[CALLS])]
    else:
        kept.pop(CALLS, None)
    if isinstance(content, list):
        content = "\n".join(_part(place, part) for part in content)
    if content is None and CALLS in kept:
        return ({"content": None} if {"content", "from"} & one.keys() else {}) | kept | {"role": role}
    return kept | {"role": role, "content": text_of(place, "content", content)}


def _part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise ValueError(f"{place}: expected text parts as its content, found {kind}; remove it, or the record")
    return text_of(place, "content", part.get("text"))


def _listed(place: str, key: str, value: Any) -> list[Any]:
    """A list of objects, or one; either also as the text of its JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{place}: expected {key} as a list of objects, found {value!r:.60}")
    return found


def _function(place: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """A tool or a call as templates read it: under `function`, and with its arguments as an object."""
    function = dict(one["function"]) if isinstance(one.get("function"), dict) else dict(one)
    text_of(place, "function's name", function.get("name"))
    if isinstance(function.get("arguments"), str):
        (function["arguments"],) = _listed(place, "arguments", function["arguments"] or "{}")
    return {"type": "function", **(one if "function" in one else {}), "function": function}


def _tools(place: str, record: Mapping[str, Any]) -> tuple[Message, ...]:
    found = [(key, record[key]) for key in (TOOLS, "functions") if record.get(key)]
    return tuple(_function(place, one) for key, value in found for one in _listed(place, key, value))


def _conversation(
    place: str, key: str, turns: list[dict[str, Any]], tools: tuple[Message, ...], unread: tuple[str, ...]
) -> Pair:
    """The turns as a pair, by the marks of its answers."""
    untrained, last = set(), 0
    for at, turn in enumerate(turns):
        marks = [turn.pop(mark) for mark in MARKS if mark in turn]
        if wrong := [mark for mark in marks if mark not in (0, 1)]:
            raise ValueError(f"{place}: expected 0, 1, true or false as the weight of a message, found {wrong[0]!r}")
        is_answer = turn["role"] == "assistant"
        if not is_answer and 1 in marks:
            raise ValueError(
                f"{place}: expected weights of the assistant's messages alone, found one of {turn['role']}"
            )
        if is_answer and 0 in marks:
            untrained.add(at)
        elif is_answer:
            last = at
    if last == 0:
        raise ValueError(
            f"{place}: expected {key} of which one after the first is the assistant's, found none to learn"
        )
    return Pair(tuple(turns[: last + 1]), frozenset(untrained), tools, place, unread)


def text_of(place: str, key: str, value: Any) -> str:
    """The value of a key. ValueError if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text as its {key}, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise ValueError(f"{place}: expected a text as its {key}, found half a character ({half})") from None
    return value
