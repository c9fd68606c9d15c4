"""Conversations as parts to tokenise, written by the tokenizer's chat template or with its family's marks.

The loss is on what the assistant says and on the end of its turn, nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from muster.storage.conversations import Conversation, Turn, turns_of
from muster.trainer.data.chat_template import GUARD, Rendered
from muster.trainer.data.tokenizer import ChatMarks, Tokenizer
from muster.trainer.errors import UserError

# A longer conversation is tokenised in stretches: each token of the whole would take some 200 bytes at the same time.
WHOLE_CHARACTERS = 4 << 20


class Part(NamedTuple):
    """A stretch of a document, which is text to tokenise or ids to take as they are."""

    text: str = ""
    ids: tuple[int, ...] = ()
    loss_mask: bool = True  # whether the loss counts these tokens


def parts(given: Conversation, tokenizer: Tokenizer) -> tuple[Part, ...]:
    """A conversation to tokenise. Raises ValueError where it can't be written so, UserError for unknown marks."""
    if given.plain:
        found = _plain(given, tokenizer)
    elif tokenizer.template is not None:
        return _rendered(tokenizer.template.render(given, tokenizer.special), tokenizer)
    elif given.tools or any(turn.more.get("tool_calls") or turn.role == "tool" for turn in given.turns):
        raise ValueError("has tools or calls them, which only a chat template can write: give data.chatTemplate")
    else:
        found = _marked(given.turns, chat_marks(tokenizer), tokenizer.bos)
    scored = (part._replace(loss_mask=True) for part in found) if given.whole else found
    return tuple(part for part in scored if part.text or part.ids)


def _rendered(given: Rendered, tokenizer: Tokenizer) -> tuple[Part, ...]:
    """What a template wrote, tokenised as a whole, as at inference. It is tokenised in stretches where the whole would
    be wrong: where words spell a special token, where a token would reach over the end of the loss, and where the whole
    is too long."""
    if GUARD not in given.text and len(given.text) <= WHOLE_CHARACTERS:
        ids, places = tokenizer.encode_rendered(given.text)
        edges = {edge for span in given.spans for edge in span}
        if not any(edge in edges for start, end in places for edge in range(start + 1, end)):
            starts = [start for start, _ in given.spans]
            flags = [(at := bisect_right(starts, place) - 1) >= 0 and place < given.spans[at][1] for place, _ in places]
            runs = groupby(zip(ids, flags, strict=True), key=lambda each: each[1])
            return tuple(Part(ids=tuple(token for token, _ in run), loss_mask=flag) for flag, run in runs)
    return tuple(_stretches(given, tokenizer))


def _stretches(given: Rendered, tokenizer: Tokenizer) -> Iterator[Part]:
    edges = [0, *(edge for span in given.spans for edge in span), len(given.text)]
    for number, (start, end) in enumerate(pairwise(edges)):
        flag = number % 2 == 1
        at = start
        for found in tokenizer.special.finditer(given.text, start, end) if tokenizer.special else ():
            yield from _word_parts(given.text[at : found.start()], flag)
            yield Part(ids=tuple(tokenizer.encode_rendered(found[0])[0]), loss_mask=flag)
            at = found.end()
        yield from _word_parts(given.text[at:end], flag)


def _word_parts(text: str, flag: bool) -> Iterator[Part]:
    if text:
        yield Part(text.replace(GUARD, ""), loss_mask=flag)


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
            "the tokenizer has no chat template, and no chat marks that Muster knows (Llama 3's <|start_header_id|>, "
            "ChatML's <|im_start|>, Gemma's <start_of_turn>); name a template's file in data.chatTemplate, or take an "
            "instruct model or its tokenizer"
        )
    return tokenizer.chat


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids after which the assistant speaks next. Raises UserError for a malformed message or unknown marks."""
    try:
        given = Conversation(turns_of(messages, "messages"))
        if tokenizer.template is not None:
            return tokenizer.encode_rendered(tokenizer.template.prompt(given))[0]
        found = parts(given, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from None
    ids = [token for part in found for token in (part.ids or tokenizer.encode(part.text))]
    return ids + list(chat_marks(tokenizer).opening["assistant"])
