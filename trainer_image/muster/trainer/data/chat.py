"""Conversations in the openai-chat format: `{"messages": [{"role", "content"}, …]}`, as parts to tokenise.

The loss is on what the assistant says and on the end of its turn, nowhere else; `"weight": 0` on an assistant message
(OpenAI's fine-tuning format) takes that turn out too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from muster.trainer.data.tokenizer import ChatMarks, Tokenizer
from muster.trainer.errors import UserError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Part(NamedTuple):
    """A stretch of a document, which is text to tokenise or ids to take as they are."""

    text: str = ""
    ids: tuple[int, ...] = ()
    loss_mask: bool = True  # whether the loss counts these tokens


class Turn(NamedTuple):
    role: str
    content: str
    loss_mask: bool


def conversation(record: object) -> tuple[Turn, ...]:
    """The turns of one parsed line. Raises ValueError saying what is wrong and where in the record."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise ValueError('is not {"messages": [{"role": …, "content": …}, …]}')
    turns = tuple(_turn(message, f"messages[{number}]") for number, message in enumerate(messages))
    if not any(turn.loss_mask for turn in turns):
        raise ValueError("has no assistant message to learn from (one with weight 0 does not count)")
    return turns


def _turn(message: object, at: str) -> Turn:
    if not isinstance(message, dict):
        raise ValueError(f'{at} is not {{"role": …, "content": …}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{at}.role is {role!r}; known are {', '.join(ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"{at} calls a tool; tool calls can't be trained on yet")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{at}.weight is {weight!r}; it must be 0 or 1")
    return Turn(ROLES[role], _content(message.get("content"), f"{at}.content"), role == "assistant" and bool(weight))


def _content(content: object, at: str) -> str:
    """Text, or a list of text parts, which are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
        raise ValueError(f"{at} has a part that is not text; only text can be trained on")
    raise ValueError(f"{at} is {'missing' if content is None else f'a {type(content).__name__}'}; it must be text")


def parts(turns: Iterable[Turn], marks: ChatMarks, bos: tuple[int, ...]) -> tuple[Part, ...]:
    """Each turn as opening mark, content, closing mark; scored where an assistant must learn to say it."""
    found = [Part(ids=bos, loss_mask=False)] if bos else []
    for turn in turns:
        found.append(Part(ids=marks.opening[turn.role], loss_mask=False))
        found.append(Part(text=turn.content, loss_mask=turn.loss_mask))
        found.append(Part(ids=marks.closing[:1], loss_mask=turn.loss_mask))
        found.append(Part(ids=marks.closing[1:], loss_mask=False))
    return tuple(part for part in found if part.text or part.ids)


def content_hash(turns: Iterable[Turn]) -> int:
    """64 bits of BLAKE2b over roles and contents, whatever the tokenizer. Raises ValueError for half a character."""
    state = hashlib.blake2b(digest_size=8)
    for turn in turns:
        content = turn.content.encode()
        state.update(f"{turn.role}:{int(turn.loss_mask)}:{len(content)}:".encode())
        state.update(content)
    return int.from_bytes(state.digest(), "little")


def chat_marks(tokenizer: Tokenizer) -> ChatMarks:
    """Raises UserError when the tokenizer's chat marks are not known."""
    if tokenizer.chat is None:
        raise UserError(
            "data.tokenizer: has no chat marks that Muster knows (Llama 3's <|start_header_id|>, ChatML's "
            "<|im_start|>, Gemma's <start_of_turn>); for task sft take an instruct model's tokenizer, or `bytes`"
        )
    return tokenizer.chat


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The ids after which the assistant speaks next. Raises UserError for a malformed message or unknown marks."""
    marks = chat_marks(tokenizer)
    try:
        turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]
    except ValueError as error:
        raise UserError(str(error)) from None
    ids: list[int] = []
    for part in parts(turns, marks, tokenizer.bos):
        ids += part.ids or tokenizer.encode(part.text)
    return ids + list(marks.opening["assistant"])
