"""Pairs of answers and single answers with a label, as parts to tokenise.

A pair is `{"prompt", "chosen", "rejected"}`, each text or each a list of messages. Where it has no prompt, or has it as
a text beside whole conversations, the prompt is what both sides begin with alike. OpenAI's form of a pair, `{"input":
{"messages"}, "preferred_output", "non_preferred_output"}`, is read too. A single answer is `{"prompt", "completion",
"label": true | false}`. A pair may carry a `margin`, a number that says by how much the chosen answer is better, and
either may say in `tools` what the assistant may call. The names are those of TRL's datasets. In tables of text, lists,
numbers and labels stand as JSON.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from muster.recipe.data_formats import SHAPES, columns_of
from muster.storage.conversations import ChatConversation, ChatTurn, as_bytes, messages_or_text, tools_of, turns_of
from muster.trainer.data import chat
from muster.trainer.data.chat import DividedText, DocumentPart
from muster.trainer.data.chat_template import THOUGHTS, FittedConversation, fit, fit_turn
from muster.trainer.data.tokenizer import Tokenizer

_LABELS = {"true": True, "1": True, "false": False, "0": False}  # as tables of text have them
EQUAL = "chosen and rejected are equal"
NO_ANSWER = "an answer is empty"


class AnswerComparison(NamedTuple):
    """One line of a file, parsed. Of a single answer, `sides` has one entry; of a pair the chosen one comes first."""

    prompt: tuple[ChatTurn, ...] | str
    sides: tuple[tuple[ChatTurn, ...] | str, ...]
    value: float  # the pair's margin, or 1 for a good answer and 0 for a bad one
    kind: str  # what it looked like, in words
    tools: tuple[Mapping[str, Any], ...] = ()  # what the assistant may call, as JSON schemas

    @property
    def fault(self) -> str:
        """Return why nothing can be learnt from it though it is well formed; empty if something can."""
        if any(not _says_something(side) for side in self.sides):
            return NO_ANSWER
        return EQUAL if len(self.sides) == 2 and self.sides[0] == self.sides[1] else ""


def pair(record: object) -> AnswerComparison:
    """Parse a line of format preference. Raises ValueError that says what is wrong and where in the record."""
    fields = _fields(_from_openai(record), ("chosen", "rejected"), SHAPES["preference"])
    margin = 0.0 if fields.get("margin") in (None, "") else _number(fields["margin"])
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"margin is {margin!r}; it must be a number")
    chosen, rejected = _side(fields["chosen"], "chosen"), _side(fields["rejected"], "rejected")
    given = None if fields.get("prompt") is None else _side(fields["prompt"], "prompt")
    if given is None or _are_whole(given, chosen, rejected):
        (prompt, sides), how = _split(chosen, rejected), "a shared beginning"
        if isinstance(given, str) and not any(turn.content.strip() == given.strip() for turn in _turns(prompt)):
            raise ValueError(
                "prompt is a text that is no turn of what chosen and rejected begin with alike; leave it out, or write "
                "it as messages"
            )
    else:
        prompt, sides, how = given, (chosen, rejected), "an explicit prompt"
    _must_be_answers(prompt, sides, ("chosen", "rejected"))
    what = "texts" if isinstance(prompt, str) else "conversations"
    return AnswerComparison(prompt, sides, float(margin), f"pairs of {what} with {how}", _tools(fields, prompt))


def labelled(record: object) -> AnswerComparison:
    """Parse a line of format unpaired-preference. Raises ValueError as `pair` does."""
    fields = _fields(record, ("prompt", "completion", "label"), SHAPES["unpaired-preference"])
    label = _LABELS.get(fields["label"].lower()) if isinstance(fields["label"], str) else fields["label"]
    if label not in (True, False, 0, 1):
        raise ValueError(f"label is {fields['label']!r}; it must be true (a good answer) or false (a bad one)")
    prompt, side = _side(fields["prompt"], "prompt"), _side(fields["completion"], "completion")
    _must_be_answers(prompt, (side,), ("completion",))
    what = "texts" if isinstance(prompt, str) else "conversations"
    kind = f"single answers with labels, as {what}"
    return AnswerComparison(prompt, (side,), float(label), kind, _tools(fields, prompt))


def fitted(one: AnswerComparison, tokenizer: Tokenizer) -> tuple[AnswerComparison, FittedConversation]:
    """The comparison with what the tokenizer writes of its messages, the same of all sides, and what that is."""
    if isinstance(one.prompt, str):
        return one, FittedConversation(ChatConversation(()))
    wholes = [ChatConversation((*one.prompt, *_turns(side)), one.tools) for side in one.sides]
    each_fitted = [chat.fitted(whole, tokenizer) for whole in wholes]
    keys = [frozenset(key for turn in whole.turns for key in turn.more) for whole in wholes]

    def by_all(sets: Iterable[frozenset[str]]) -> frozenset[str]:
        named = [(some, has - some) for some, has in zip(sets, keys, strict=True)]
        return frozenset(key for some, _ in named for key in some if not any(key in rest for _, rest in named))

    renamed = {key: name for each in each_fitted for key, name in each.renamed.items()}
    left_out = by_all(each.left_out for each in each_fitted)

    def fit(turns: tuple[ChatTurn, ...] | str) -> tuple[ChatTurn, ...]:
        return tuple(fit_turn(turn, renamed, left_out & set(THOUGHTS)) for turn in _turns(turns))

    fit_one = one._replace(prompt=fit(one.prompt), sides=tuple(fit(side) for side in one.sides))
    return fit_one, FittedConversation(wholes[0], renamed, by_all(each.unread for each in each_fitted), left_out)


def parts(one: AnswerComparison, tokenizer: Tokenizer) -> tuple[tuple[DocumentPart, ...], ...]:
    """Each side as parts to tokenise, prompt included; only the answer is scored."""
    if isinstance(one.prompt, str):
        return _text_parts(one.prompt, [str(side) for side in one.sides], tokenizer)
    before = tuple(turn._replace(loss_mask=False) for turn in one.prompt)
    return tuple(chat.parts(ChatConversation((*before, *_turns(side)), one.tools), tokenizer) for side in one.sides)


def _text_parts(prompt: str, answers: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[DocumentPart, ...], ...]:
    """Return the parts of each answer after one common prompt. Where an answer's first token reaches into the prompt,
    all answers begin at that token's place, because they must be compared after the same prompt."""
    splits = [chat.divided(prompt, answer, tokenizer) for answer in answers]
    whole = [each for each in splits if each is not None]
    shared = min((_shared(whole[0].prompt, each.prompt) for each in whole), default=0)
    if len(whole) < len(answers) or not shared:
        return tuple(chat.text_parts(None, prompt, answer, tokenizer) for answer in answers)
    divided = (DividedText(each.prompt[:shared], each.prompt[shared:] + each.answer) for each in whole)
    return tuple(
        chat.text_parts(each, prompt, answer, tokenizer) for each, answer in zip(divided, answers, strict=True)
    )


def good_answer(one: AnswerComparison) -> str | None:
    """Return the assistant's first turn of the better answer; None where the only answer is bad."""
    if len(one.sides) == 1 and not one.value:
        return None
    side = one.sides[0]
    return side if isinstance(side, str) else next(turn.content for turn in side if turn.role == "assistant")


def words(one: AnswerComparison) -> str:
    """All that is said, but for the system's words."""
    texts = (
        [side] if isinstance(side, str) else [turn.content for turn in side if turn.role != "system"]
        for side in (one.prompt, *one.sides)
    )
    return "\n".join(text for some in texts for text in some)


def content_hash(one: AnswerComparison, left_out: frozenset[str] = frozenset()) -> int:
    """64 bits of BLAKE2b over prompt, sides and value, whatever the tokenizer, without the keys of messages that are
    `left_out`. Raises ValueError for half a character."""
    state = hashlib.blake2b(digest_size=8)
    for text in (one.prompt, *one.sides):
        if isinstance(text, str):
            state.update(f"{len(text)}:".encode() + text.encode())
        else:
            state.update(f"{len(text)} turns:{fit(ChatConversation(text), {}, left_out).hash()}:".encode())
    state.update(repr(one.value).encode())
    if one.tools:
        state.update(as_bytes(one.tools))
    return int.from_bytes(state.digest(), "little")


def _from_openai(record: object) -> object:
    """OpenAI's form of a pair in our names; anything else as it is."""
    if not isinstance(record, dict) or "preferred_output" not in record or "chosen" in record:
        return record
    given = record.get("input")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise ValueError('input is not {"messages": [{"role": …, "content": …}, …]}')
    return {
        "tools": given.get("tools"),
        "prompt": given["messages"],
        "chosen": record["preferred_output"],
        "rejected": record.get("non_preferred_output"),
    }


def _fields(record: object, needed: tuple[str, ...], description: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"is not {description}")
    if missing := [name for name in needed if record.get(name) is None]:
        raise ValueError(f"is not {description}: it has no {missing[0]} (its fields: {columns_of(record)})")
    return record


def _tools(fields: Mapping[str, Any], prompt: tuple[ChatTurn, ...] | str) -> tuple[Mapping[str, Any], ...]:
    tools = tools_of(fields)
    if tools and isinstance(prompt, str):
        raise ValueError("tools stand beside texts; only a conversation's template can write them")
    return tools


def _number(value: object) -> object:
    """The number that a text of a table is, where it is one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _side(given: object, at: str) -> tuple[ChatTurn, ...] | str:
    content = messages_or_text(given)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return turns_of(content, at)
    raise ValueError(f"{at} is neither text nor a list of messages")


def _split(
    chosen: tuple[ChatTurn, ...] | str, rejected: tuple[ChatTurn, ...] | str
) -> tuple[tuple[ChatTurn, ...] | str, tuple[tuple[ChatTurn, ...] | str, ...]]:
    """The prompt, which is what both sides begin with alike, and what is left of each."""
    shared = _shared(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and chosen != rejected:
        # A word is not divided: tokenizers put the space before a word into its first token.
        while shared and not chosen[shared : shared + 1].isspace():
            shared -= 1
    elif chosen == rejected:  # no prompt can be told apart; it is left out anyway
        shared = max(0, shared - 1)
    if not shared:
        raise ValueError("chosen and rejected begin with nothing alike, so that there is no prompt; give `prompt`")
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _are_whole(prompt: tuple[ChatTurn, ...] | str, *sides: tuple[ChatTurn, ...] | str) -> bool:
    """Return whether the prompt is a text and the sides are whole conversations, which begin with it."""
    return isinstance(prompt, str) and all(not isinstance(side, str) and side[0].role != "assistant" for side in sides)


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    if isinstance(one, str) is not isinstance(other, str):
        raise ValueError("one of chosen and rejected is text and the other a list of messages")
    different = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def _must_be_answers(
    prompt: tuple[ChatTurn, ...] | str, sides: tuple[tuple[ChatTurn, ...] | str, ...], names: tuple[str, ...]
) -> None:
    if not prompt:
        raise ValueError("prompt is empty; an answer must answer something")
    for side, name in zip(sides, names, strict=True):
        if isinstance(side, str) is not isinstance(prompt, str):
            kinds = ("text", "a list of messages")
            at, of = kinds if isinstance(prompt, str) else kinds[::-1]
            raise ValueError(f"prompt is {at}, but {name} is {of}; write both alike")
        if isinstance(side, tuple) and side and side[0].role != "assistant":
            raise ValueError(f"{name} begins with the {side[0].role}'s turn; after the prompt the assistant must speak")


def _says_something(side: tuple[ChatTurn, ...] | str) -> bool:
    """Return whether an answer has words or calls a tool."""
    if isinstance(side, str):
        return bool(side)
    return any(turn.loss_mask and (turn.content or turn.more.get("tool_calls")) for turn in side)


def _turns(side: tuple[ChatTurn, ...] | str) -> tuple[ChatTurn, ...]:
    assert not isinstance(side, str), "prompt and sides are of one kind"
    return side
