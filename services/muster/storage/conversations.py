"""Records as conversations: openai-chat, ShareGPT, Alpaca, prompt and completion. Every fault says where it is.

    openai-chat        {"messages": [{"role", "content"}, …], "tools": […]}, tool calls included
    sharegpt           {"conversations": [{"from", "value"}, …], "system", "tools"}
    alpaca             {"instruction", "input", "output", "system"}: one question, one answer
    prompt-completion  {"prompt", "completion"}: two texts that are written as they are, or two lists of messages

A list may also stand as JSON text, as in tables. The loss is on what the assistant says, as `trainOn` and the weight of
each message (1, or 0 for one that is only read) leave it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from muster.recipe.data_formats import SHAPES, columns_of

ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SHAREGPT_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS: Final = ("function_call", "tool_call")
# What is read of a message here; all else of it is given to the chat template under its own name, as transformers does.
READ: Final = frozenset({"role", "content", "weight", "tool_calls", "function_call", "from", "value"})
# The columns of a record that each format reads.
COLUMNS: Final[Mapping[str, frozenset[str]]] = {
    "openai-chat": frozenset({"messages", "tools", "functions"}),
    "sharegpt": frozenset({"conversations", "system", "tools", "functions"}),
    "alpaca": frozenset({"instruction", "input", "output", "system"}),
    "prompt-completion": frozenset({"prompt", "completion", "tools", "functions"}),
    "preference": frozenset(
        {"prompt", "chosen", "rejected", "margin", "tools", "functions"}
        | {"input", "preferred_output", "non_preferred_output"}
    ),
    "unpaired-preference": frozenset({"prompt", "completion", "label", "tools", "functions"}),
}

NOTHING: Final[Mapping[str, Any]] = {}


class ChatTurn(NamedTuple):
    """One message."""

    role: str
    content: str
    loss_mask: bool
    more: Mapping[str, Any] = NOTHING  # tool_calls, whose arguments may be JSON text, and all else of the message

    def message(self) -> dict[str, Any]:
        """Return the turn as templates read it."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True)
class ChatConversation:
    """The turns of one document."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # what the assistant may call, as JSON schemas
    plain: bool = False  # prompt and completion as they are: no template stands around them
    whole: bool = False  # whether the loss is on every token

    def hash(self) -> int:
        """64 bits of BLAKE2b over all that is said, whatever the tokenizer. Raises ValueError for half a character,
        which no tokenizer takes: it is to be asked for before the conversation is tokenised."""
        state = hashlib.blake2b(digest_size=8)
        for turn in self.turns:
            content = turn.content.encode()
            state.update(f"{turn.role}:{int(turn.loss_mask)}:{len(content)}:".encode())
            state.update(content)
            if turn.more:
                state.update(as_bytes(with_object_arguments(turn.more)))
        beside = {"tools": list(self.tools), "plain": self.plain, "whole": self.whole}
        if any(beside.values()):
            state.update(as_bytes(beside))
        return int.from_bytes(state.digest(), "little")


def as_bytes(value: object) -> bytes:
    """Equal values as equal bytes. Raises ValueError for half a character."""
    json.dumps(value, ensure_ascii=False, default=repr).encode()
    return json.dumps(value, sort_keys=True, default=repr).encode()


def with_object_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message, or its `more`, with the arguments of its calls as objects, where they stand as JSON text."""

    def parsed(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {**call, "function": {**call["function"], "arguments": read}}

    calls = [parsed(call) for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def conversation(record: object, format: str, train_on: str = "assistant") -> ChatConversation:
    """The conversation of a record, with the loss where `train_on` wants it. Raises ValueError saying what is wrong and
    where in the record."""
    if not isinstance(record, Mapping) or not (read := _OF_FORMAT[format](record)):
        fields = f" (its fields: {columns_of(record)})" if isinstance(record, Mapping) else ""
        raise ValueError(f"is not {SHAPES[format]}{fields}")
    turns = read.turns
    for number, turn in enumerate(turns):
        if turn.loss_mask and not turn.content and not turn.more.get("tool_calls"):
            raise ValueError(
                f"{_at(format, number)} is an empty assistant turn, which has nothing to learn: leave it out, or give "
                "it weight 0"
            )
        if turn.role == "tool" and not any(earlier.role in ("assistant", "tool") for earlier in turns[:number][-1:]):
            raise ValueError(f"{_at(format, number)} is a tool's answer, but no assistant's turn stands before it")
    if not any(turn.loss_mask for turn in turns):
        raise ValueError("has no assistant message to learn from (one with weight 0 does not count)")
    read = _with_loss_on(read, train_on)
    if not any(turn.loss_mask for turn in read.turns):
        raise ValueError(f"has no assistant message to learn from where trainOn {train_on} looks for it")
    return read


def _at(format: str, number: int) -> str:
    if format in ("openai-chat", "sharegpt"):
        return f"{'messages' if format == 'openai-chat' else 'conversations'}[{number}]"
    return f"turn {number + 1}"


def _with_loss_on(read: ChatConversation, train_on: str) -> ChatConversation:
    turns = read.turns
    if train_on == "all":
        return replace(read, whole=True)
    if train_on == "last":
        last = max(number for number, turn in enumerate(turns) if turn.role == "assistant")
        turns = tuple(turn._replace(loss_mask=turn.loss_mask and number == last) for number, turn in enumerate(turns))
    elif train_on == "completion":
        asked = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)
        turns = tuple(turn._replace(loss_mask=turn.loss_mask and number > asked) for number, turn in enumerate(turns))
    return replace(read, turns=turns)


def _openai(record: Mapping[str, Any]) -> ChatConversation | None:
    messages = _listed(record.get("messages"), "messages")
    if messages is None:
        return None
    return ChatConversation(turns_of(messages, "messages"), tools_of(record))


def _sharegpt(record: Mapping[str, Any]) -> ChatConversation | None:
    turns = _listed(record.get("conversations"), "conversations")
    if turns is None:
        return None
    read_turns = [_sharegpt_turn(turn, f"conversations[{number}]") for number, turn in enumerate(turns)]
    return ChatConversation((*_system(record), *read_turns), tools_of(record))


def _sharegpt_turn(turn: object, at: str) -> ChatTurn:
    if not isinstance(turn, Mapping):
        raise ValueError(f'{at} is not {{"from": …, "value": …}}')
    role, value = turn.get("from"), _content(turn.get("value"), f"{at}.value")
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        raise ValueError(f"{at}.from is {role!r}; known are {', '.join(SHAREGPT_ROLES)}")
    learnt = _weight(turn, at) and SHAREGPT_ROLES[role] == "assistant"
    if role in CALLS:
        calls = _listed(f"[{value}]" if value.lstrip().startswith("{") else value, f"{at}.value")
        called = {"tool_calls": [_call(call, f"{at}.value") for call in calls or ()]}
        return ChatTurn("assistant", "", learnt, {**_more(turn), **called})
    return ChatTurn(SHAREGPT_ROLES[role], value, learnt, _more(turn))


def _more(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rest of a message that is not read here. Null counts as missing, because tables have every key in
    every row."""
    return _without_nulls({name: value for name, value in message.items() if name not in READ})


def _alpaca(record: Mapping[str, Any]) -> ChatConversation | None:
    if not {"instruction", "output"} <= record.keys():
        return None
    asked = _content(record["instruction"], "instruction")
    if about := _content(record.get("input") or "", "input"):
        asked = f"{asked}\n\n{about}"
    answer = ChatTurn("assistant", _content(record["output"], "output"), True)
    return ChatConversation((*_system(record), ChatTurn("user", asked, False), answer))


def _prompt_completion(record: Mapping[str, Any]) -> ChatConversation | None:
    if not {"prompt", "completion"} <= record.keys():
        return None
    prompt, completion = messages_or_text(record["prompt"]), messages_or_text(record["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if tools_of(record):
            raise ValueError("tools stand beside texts; only a conversation's template can write them")
        return ChatConversation((ChatTurn("user", prompt, False), ChatTurn("assistant", completion, True)), plain=True)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise ValueError("prompt and completion must both be text, or both lists of messages")
    before = tuple(turn._replace(loss_mask=False) for turn in turns_of(prompt, "prompt"))
    return ChatConversation((*before, *turns_of(completion, "completion")), tools_of(record))


_OF_FORMAT: Final = {
    "openai-chat": _openai,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt-completion": _prompt_completion,
}


def _system(record: Mapping[str, Any]) -> tuple[ChatTurn, ...]:
    words = _content(record.get("system") or "", "system")
    return (ChatTurn("system", words, False),) if words else ()


def turns_of(messages: Sequence[object], at: str) -> tuple[ChatTurn, ...]:
    """A list of messages that stands at `at` in its record. Raises ValueError."""
    return tuple(turn(message, f"{at}[{number}]") for number, message in enumerate(messages))


def turn(message: object, at: str) -> ChatTurn:
    """Parse one message, which is at `at` in its record. Raises ValueError."""
    if not isinstance(message, Mapping):
        raise ValueError(f'{at} is not {{"role": …, "content": …}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{at}.role is {role!r}; known are {', '.join(ROLES)}")
    calls = _listed(message.get("tool_calls"), f"{at}.tool_calls") or []
    if message.get("function_call"):  # OpenAI's older form of the same
        calls = [*calls, message["function_call"]]
    if calls and role != "assistant":
        raise ValueError(f"{at} calls a tool, which only an assistant may")
    more = _more(message)
    if calls:
        more["tool_calls"] = [_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)]
    content = message.get("content")
    words = "" if content is None and calls else _content(content, f"{at}.content")
    return ChatTurn(ROLES[role], words, _weight(message, at) and role == "assistant", more)


def _weight(message: Mapping[str, Any], at: str) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{at}.weight is {weight!r}; it must be 0 or 1")
    return bool(weight)


def _content(content: object, at: str) -> str:
    """Return the text, or the joined parts of a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
        raise ValueError(f"{at} has a part that is not text; only text can be trained on")
    raise ValueError(f"{at} is {'missing' if content is None else f'a {type(content).__name__}'}; it must be text")


def _call(call: object, at: str) -> dict[str, Any]:
    """A tool call as templates read it. Its arguments stay JSON text where they are such, as in OpenAI's format: some
    templates write them as they stand."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'{at} is not {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments", {})
    read = arguments = {} if arguments == "" else arguments
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            raise ValueError(f"{at}.function.arguments is not valid JSON") from None
    if not isinstance(read, Mapping):
        raise ValueError(f"{at}.function.arguments is a {type(read).__name__}; it must be an object")
    if function is call:  # as the older form has it
        around = {name: value for name, value in call.items() if name not in ("name", "arguments")}
        own: Mapping[str, Any] = {"name": call["name"]}
    else:
        around, own = dict(call), function
    made = _without_nulls({**around, "function": _without_nulls({**own, "arguments": arguments})})
    return made if "type" in made else {"type": "function", **made}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if inner is not None}


def tools_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the assistant's tools as JSON schemas: the column `tools`, or OpenAI's older `functions`. Raises
    ValueError."""
    tools = _listed(record.get("tools"), "tools") or []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f'tools[{number}] is not {{"type": "function", "function": {{"name": …}}}}')
    functions = _listed(record.get("functions"), "functions") or []
    for number, function in enumerate(functions):
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f'functions[{number}] is not {{"name": …, "parameters": …}}')
    if tools and functions:
        raise ValueError("has tools and functions, which are two forms of one thing: leave one of them out")
    return tuple(tools) or tuple({"type": "function", "function": function} for function in functions)


def messages_or_text(value: object) -> object:
    """The list of messages that a text is the JSON of, as tables of text hold it; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        if parsed and isinstance(parsed, list) and all(isinstance(each, Mapping) and "role" in each for each in parsed):
            return parsed
    return value


def _listed(value: object, at: str) -> list[Any] | None:
    """A list, or one that stands as JSON text in a column of a table; None where there is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except ValueError:
            raise ValueError(f"{at} is text, but not the JSON of a list") from None
    return value if isinstance(value, list) else None
