"""Conversations as parts to tokenise: with the marks of the tokenizer's family around each turn.

The loss is on what the assistant says and on the end of its turn, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from muster.trainer.data.conversations import Conversation, Turn, turns_of
from muster.trainer.data.tokenizer import ChatMarks, Tokenizer
from muster.trainer.errors import UserError


class Part(NamedTuple):
    """A stretch of a document, which is text to tokenise or ids to take as they are."""

    text: str = ""
    ids: tuple[int, ...] = ()
    loss_mask: bool = True  # whether the loss counts these tokens


def parts(given: Conversation, tokenizer: Tokenizer) -> tuple[Part, ...]:
    """A conversation to tokenise. Raises ValueError where it can't be written so, UserError for unknown marks."""
    found = _plain(given, tokenizer) if given.plain else _marked(given.turns, chat_marks(tokenizer), tokenizer.bos)
    if given.tools or any(turn.more.get("tool_calls") or turn.role == "tool" for turn in given.turns):
        raise ValueError(
            "has tools or calls them, which only a chat template can write: train with a model that has one"
        )
    scored = (part._replace(loss_mask=True) for part in found) if given.whole else found
    return tuple(part for part in scored if part.text or part.ids)


def _plain(given: Conversation, tokenizer: Tokenizer) -> Iterator[Part]:
    yield Part(ids=tokenizer.bos, loss_mask=False)
    for turn in given.turns:
        yield Part(turn.content, loss_mask=turn.loss_mask)
    yield Part(ids=(tokenizer.eos,))


def _marked(turns: Iterable[Turn], marks: ChatMarks, bos: tuple[int, ...]) -> Iterator[Part]:
    """Each turn as opening mark, content, closing mark; scored where an assistant must learn to say it."""
    yield Part(ids=bos, loss_mask=False)
    for turn in turns:
        yield Part(ids=marks.opening.get(turn.role, ()), loss_mask=False)
        yield Part(text=turn.content, loss_mask=turn.loss_mask)
        yield Part(ids=marks.closing[:1], loss_mask=turn.loss_mask)
        yield Part(ids=marks.closing[1:], loss_mask=False)


def chat_marks(tokenizer: Tokenizer) -> ChatMarks:
    """Raises UserError when the tokenizer's chat marks are not known."""
    if tokenizer.chat is None:
        raise UserError(
            "data.tokenizer: has no chat marks that Muster knows (Llama 3's <|start_header_id|>, ChatML's "
            "<|im_start|>, Gemma's <start_of_turn>); for task sft take an instruct model's tokenizer, or `bytes`"
        )
    return tokenizer.chat


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids after which the assistant speaks next. Raises UserError for a malformed message or unknown marks."""
    marks = chat_marks(tokenizer)
    try:
        given = Conversation(turns_of(messages, "messages"))
        found = parts(given, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from None
    ids = [token for part in found for token in (part.ids or tokenizer.encode(part.text))]
    return ids + list(marks.opening["assistant"])
