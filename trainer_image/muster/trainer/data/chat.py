"""Conversations as parts to tokenise, written by the tokenizer's chat template or with its family's marks.

The loss is on what the assistant says and on the end of its turn, nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from muster.storage.conversations import ChatConversation, ChatTurn, turns_of
from muster.trainer.data.chat_template import GUARD, FittedConversation, RenderedText, fit
from muster.trainer.data.tokenizer import ChatMarks, Tokenizer
from muster.trainer.errors import UserError

# A longer conversation is tokenised in stretches: each token of the whole would take some 200 bytes at the same time.
WHOLE_CHARACTERS = 4 << 20


class DocumentPart(NamedTuple):
    """A stretch of a document, which is text to tokenise or ids to take as they are."""

    text: str = ""
    ids: tuple[int, ...] = ()
    loss_mask: bool = True  # whether the loss counts these tokens


def fitted(given: ChatConversation, tokenizer: Tokenizer) -> FittedConversation:
    """The conversation with what the tokenizer writes of it; without a template that is nothing beside the words."""
    if tokenizer.template is not None and not given.plain:
        return tokenizer.template.fitted(given)
    keys = frozenset(key for turn in given.turns for key in turn.more) - {"tool_calls"}
    return FittedConversation(fit(given, {}, keys), {}, keys, keys)


def teaches_no_end(document: Sequence[DocumentPart], tokenizer: Tokenizer) -> bool:
    """Return whether no special token ends the assistant's words, so that a model does not learn to end them."""
    if tokenizer.special is None:
        return False
    lasts = [part.ids[-1] for part in document if part.loss_mask and part.ids]
    return not any(tokenizer.special.fullmatch(tokenizer.spell([last])) for last in lasts)


def parts(given: ChatConversation, tokenizer: Tokenizer, prompted: bool = False) -> tuple[DocumentPart, ...]:
    """A conversation to tokenise. Where it is to be `prompted` with what stands before the loss, no token of a plain
    one reaches from there into the loss. Raises ValueError where it can't be written so, UserError for unknown marks.
    """
    pieces: Iterable[DocumentPart]
    if given.plain:
        pieces = _plain(given, tokenizer, prompted)
    elif tokenizer.template is not None:
        return _rendered(tokenizer.template.render(given, tokenizer.special), tokenizer)
    elif given.tools or any(turn.more.get("tool_calls") or turn.role == "tool" for turn in given.turns):
        raise ValueError("has tools or calls them, which only a chat template can write: give data.chatTemplate")
    else:
        pieces = _marked(given.turns, chat_marks(tokenizer), tokenizer.bos)
    scored = (part._replace(loss_mask=True) for part in pieces) if given.whole else pieces
    return tuple(part for part in scored if part.text or part.ids)


def _rendered(given: RenderedText, tokenizer: Tokenizer) -> tuple[DocumentPart, ...]:
    """Tokenise a template's text as a whole, as at inference. A token that begins with spaces before a stretch in the
    loss, and continues within it, is learnt. The text is tokenised stretch by stretch where a token would otherwise
    cross an edge of the loss with more than such spaces, and where the text is too long."""
    text = given.text
    if len(text) <= WHOLE_CHARACTERS:
        ids, places = tokenizer.encode_rendered(text)
        starts, ends = [start for start, _ in given.spans], {end for _, end in given.spans}
        edges = {*starts, *ends}
        crossed = ((start, edge) for start, end in places for edge in range(start + 1, end) if edge in edges)
        if not any(edge in ends or text[start:edge].strip() for start, edge in crossed):
            lasts = [max(start, end - 1) for start, end in places]
            flags = [(at := bisect_right(starts, last) - 1) >= 0 and last < given.spans[at][1] for last in lasts]
            runs = groupby(zip(ids, flags, strict=True), key=lambda each: each[1])
            return tuple(DocumentPart(ids=tuple(token for token, _ in run), loss_mask=flag) for flag, run in runs)
    return tuple(_stretches(given, tokenizer))


def _stretches(given: RenderedText, tokenizer: Tokenizer) -> Iterator[DocumentPart]:
    edges = [0, *(edge for span in given.spans for edge in span), len(given.text)]
    for number, (start, end) in enumerate(pairwise(edges)):
        flag = number % 2 == 1
        at = start
        for token in tokenizer.special.finditer(given.text, start, end) if tokenizer.special else ():
            yield from _word_parts(given.text[at : token.start()], flag)
            yield DocumentPart(ids=tuple(tokenizer.encode_rendered(token[0])[0]), loss_mask=flag)
            at = token.end()
        yield from _word_parts(given.text[at:end], flag)


def _word_parts(text: str, flag: bool) -> Iterator[DocumentPart]:
    if text:
        yield DocumentPart(text.replace(GUARD, ""), loss_mask=flag)


def _plain(given: ChatConversation, tokenizer: Tokenizer, prompted: bool) -> tuple[DocumentPart, ...]:
    prompt, answer = (turn.content for turn in given.turns)
    return text_parts(divided(prompt, answer, tokenizer, prompted), prompt, answer, tokenizer)


class DividedText(NamedTuple):
    """The ids of a prompt and its answer, tokenised as one text."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # from the first token that holds a character of the answer


def divided(prompt: str, answer: str, tokenizer: Tokenizer, prompted: bool = False) -> DividedText | None:
    """Tokenise a prompt and its answer together, and divide the ids; None where the two must be tokenised one by one:
    they are too long together, nothing would precede the answer, or its first token reaches into a prompt that the
    model is to be `prompted` with."""
    if len(prompt) + len(answer) > WHOLE_CHARACTERS:
        return None
    ids, places = tokenizer.encode_places(prompt + answer)
    edge = len(prompt)
    first = next((at for at, (start, end) in enumerate(places) if end > edge or start >= edge), len(ids))
    reaches = first < len(ids) and places[first][0] < edge
    if (prompted and reaches) or (prompt and not first and not tokenizer.bos):
        return None
    return DividedText(tuple(ids[:first]), tuple(ids[first:]))


def text_parts(split: DividedText | None, prompt: str, answer: str, tokenizer: Tokenizer) -> tuple[DocumentPart, ...]:
    """A prompt and its answer as `divided` found them, with the loss on the answer and the end of the document."""
    both = (
        (DocumentPart(prompt, loss_mask=False), DocumentPart(answer))
        if split is None
        else (DocumentPart(ids=split.prompt, loss_mask=False), DocumentPart(ids=split.answer))
    )
    whole = (DocumentPart(ids=tokenizer.bos, loss_mask=False), *both, DocumentPart(ids=(tokenizer.eos,)))
    return tuple(part for part in whole if part.text or part.ids)


def _marked(turns: Iterable[ChatTurn], marks: ChatMarks, bos: tuple[int, ...]) -> Iterator[DocumentPart]:
    """Each turn as opening mark, content, closing mark; scored where an assistant must learn to say it."""
    yield DocumentPart(ids=bos, loss_mask=False)
    for turn in turns:
        yield DocumentPart(ids=marks.opening.get(turn.role, ()), loss_mask=False)
        yield DocumentPart(text=turn.content, loss_mask=turn.loss_mask)
        yield DocumentPart(ids=marks.closing[:1], loss_mask=turn.loss_mask)
        yield DocumentPart(ids=marks.closing[1:], loss_mask=False)


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
        given = ChatConversation(turns_of(messages, "messages"))
        if tokenizer.template is not None:
            return tokenizer.encode_rendered(tokenizer.template.prompt(given))[0]
        pieces = parts(given, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from None
    ids = [token for part in pieces for token in (part.ids or tokenizer.encode(part.text))]
    return ids + list(chat_marks(tokenizer).opening["assistant"])
