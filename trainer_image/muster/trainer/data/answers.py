"""Text out of generated tokens, as soon as it is certain, and where an answer ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from muster.storage.conversations import ChatConversation, ChatTurn
from muster.trainer.data.chat import parts
from muster.trainer.data.tokenizer import Tokenizer

# So many tokens before a text tell a tokenizer what it is a continuation of (a space, half a character).
CONTEXT_TOKENS = 8


def ends_of_turn(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end what the assistant says: the end of a document, and the special token behind a turn, as the
    chat template writes it or the tokenizer's family has it."""
    ends = {tokenizer.eos}
    if tokenizer.chat is not None:
        ends.add(tokenizer.chat.end_of_turn)
    return frozenset({*ends, *after_turn(tokenizer)})


def after_turn(tokenizer: Tokenizer) -> dict[int, tuple[int, ...]]:
    """Return the ids that are written after the last turn of a conversation, by the special token that ends the
    assistant's turn. Empty where the tokenizer writes no turns, or none that a special token ends."""
    if tokenizer.chat is None and tokenizer.template is None:
        return {}
    try:
        written = parts(ChatConversation((ChatTurn("user", "a", False), ChatTurn("assistant", "b", True))), tokenizer)
    except ValueError:  # a template that refuses so short a conversation
        return {}
    ids = [(token, part.loss_mask) for part in written for token in (part.ids or tokenizer.encode(part.text))]
    last = max((number for number, (_, learnt) in enumerate(ids) if learnt), default=None)
    if last is None or tokenizer.decode([ids[last][0]]):  # special tokens are left out
        return {}
    return {ids[last][0]: tuple(token for token, _ in ids[last + 1 :])}


def text_of(tokens: Iterable[int], before: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens that follow `before`, piece by piece, as soon as no later token can change it."""
    ids = list(before[-CONTEXT_TOKENS:])
    begin, end = 0, len(ids)
    for token in tokens:
        ids.append(token)
        yielded, whole = tokenizer.decode(ids[begin:end]), tokenizer.decode(ids[begin:])
        if whole.endswith("\ufffd"):  # half a character
            continue
        if len(whole) > len(yielded):
            yield whole[len(yielded) :]
        begin, end = end, len(ids)
    if end < len(ids):
        yield tokenizer.decode(ids[begin:])[len(tokenizer.decode(ids[begin:end])) :]


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces up to the first of `stops` in what they say together. What may be the beginning of one is held back
    until more is known."""
    pending = ""
    for piece in pieces:
        pending += piece
        at_stop = min((at for stop in stops if (at := pending.find(stop)) >= 0), default=-1)
        if at_stop >= 0:
            if at_stop:
                yield pending[:at_stop]
            return
        keep = max((size for stop in stops for size in range(1, len(stop)) if pending.endswith(stop[:size])), default=0)
        if len(pending) > keep:
            yield pending[: len(pending) - keep]
            pending = pending[len(pending) - keep :]
    if pending:
        yield pending
