"""A model's own chat template: Jinja in a sandbox, and which stretches of what it writes are the assistant's.

The assistant's stretches are what the template marks with {% generation %}; where it has no such marks, they are found
by rendering the conversation up to each of its turns. What can't be told for certain is refused, never guessed: a
user's word in the loss, or an assistant's missing from it, would be seen by nobody.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from muster.storage.conversations import ChatConversation, ChatTurn, with_object_arguments
from muster.trainer.errors import UserError

# Private-use characters that stand around a stretch of the assistant, and in words that spell a special token.
OPEN, CLOSE, GUARD = "\ue0f0", "\ue0f1", "\ue0f2"
# Templates that write today's date get this one, Llama 3.1's own: the same data must be the same tokens tomorrow.
DATE: Final = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

# Special tokens that stand around thoughts: <think>, [THINK], <|START_THINKING|>. An assistant's words that hold one
# mean it, and templates look for it.
THOUGHT_MARKS: Final = re.compile("think|thought|reason", re.IGNORECASE)
# The keys under which a message holds its assistant's thoughts, those first that templates are likely to read.
THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning", "thought", "tool_plan")
SIGNATURES_MAX: Final = 4096  # of conversations that were tried; there are as many as orders of roles

Span = tuple[int, int]
Signature = tuple[object, ...]


@dataclass(frozen=True)
class RenderedText:
    """Text that a template wrote, where GUARD separates words that only spell a special token, and the stretches of it
    that the loss counts."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class FittedConversation:
    """A conversation as a template reads it: `renamed` keys of its messages stand under the name that the template
    looks for. `left_out` change nothing of what it writes of conversations like this one; thoughts of that kind are not
    given to it, all else is, for a template may ask for one value of a key. `unread` are such of which the model sees
    nothing at all; the same thoughts may stand under two keys."""

    given: ChatConversation
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it writes by name (`bos_token`, `eos_token`, …). Where there is one
    `with_tools`, that writes the conversations that have tools, as in transformers."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return the template as a commit holds it. Absent values are left out, so that data prepared before stays the
        same."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @cached_property
    def _plain(self) -> jinja2.Template:
        return self._compiled(self.source)

    @cached_property
    def _of_tools(self) -> jinja2.Template:
        return self._plain if self.with_tools is None else self._compiled(self.with_tools)

    def _compiled(self, source: str) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=DATE.strftime)
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template is not valid Jinja: {error}; correct it, or give data.chatTemplate"
            ) from None

    @cached_property
    def _tried(self) -> dict[Signature, Any]:
        """Findings about conversations by their signature, which holds everything that templates decide by."""
        return {}

    def fitted(self, given: ChatConversation) -> FittedConversation:
        """Return how the template uses the keys of the messages other than role, content and calls. This is found by
        leaving each key out. Thoughts that the template doesn't see are given to it under the other names that thoughts
        have.

        It is found for each conversation anew: a template may decide by the words of a message, as Qwen 3's writes the
        thoughts before a user's message that is a <tool_response>, and leaves out those before another one.
        """
        keys = sorted({key for turn in given.turns for key in turn.more} - {"tool_calls"})
        whole = self._tried_text(given) if keys else None
        read = {key: self._name_read(given, key, whole) for key in keys}
        for key, name in read.items():  # two keys of one message can't both be given under one name
            others = [other for other in keys if other != key and read[other] == name and other in THOUGHTS]
            if name is not None and name != key and any(_differ(given, key, other) for other in others):
                read[key] = None
        seen = [key for key in keys if read[key] is not None and key in THOUGHTS]
        left_out = frozenset(key for key in keys if read[key] is None)
        unread = frozenset(key for key in left_out if key not in THOUGHTS or not _is_said_by(given, key, seen))
        renamed = {key: name for key, name in read.items() if name is not None and name != key}
        return FittedConversation(fit(given, renamed, left_out & set(THOUGHTS)), renamed, unread, left_out)

    def _name_read(self, given: ChatConversation, key: str, whole: str | None) -> str | None:
        """The name under which the template reads a key; None where it does not. `whole` is what it writes of all."""
        if whole is None:  # the template refuses it; who renders it will say why
            return key
        without = self._tried_text(fit(given, {}, frozenset({key})))
        if whole != without:
            return key
        there = {name for turn in given.turns for name in turn.more}
        for name in THOUGHTS if key in THOUGHTS else ():
            if name not in there and self._tried_text(fit(given, {key: name}, frozenset())) not in (None, without):
                return name
        return None

    def _tried_text(self, given: ChatConversation) -> str | None:
        try:
            return self._render([turn.message() for turn in given.turns], given.tools)
        except ValueError:
            return None

    def _remembered(self, about: Signature, given: ChatConversation, find: Callable[[], Any]) -> Any:
        turns = tuple(
            (turn.role, bool(turn.content), *sorted(key for key, value in turn.more.items() if value))
            for turn in given.turns
        )
        signature = (about, turns, bool(given.tools))
        if signature not in self._tried:
            if len(self._tried) >= SIGNATURES_MAX:
                self._tried.clear()
            self._tried[signature] = find()
        return self._tried[signature]

    def _silent(self, given: ChatConversation) -> frozenset[int]:
        """The turns whose words the template does not write, whatever they are."""
        places = [turn._replace(content=f"{GUARD}{at}{GUARD}") for at, turn in enumerate(given.turns)]
        text = self._tried_text(replace(given, turns=tuple(places)))
        return (
            frozenset() if text is None else frozenset(at for at, turn in enumerate(places) if turn.content not in text)
        )

    def prompt(self, given: ChatConversation) -> str:
        """Return the text before the assistant's next turn. Raises ValueError for a conversation that the template
        refuses."""
        turns = self._with_arguments(given.turns, given.tools)
        return self._render([turn.message() for turn in turns], given.tools, prompt=True)

    def render(self, given: ChatConversation, special: re.Pattern[str] | None) -> RenderedText:
        """`special` finds the tokenizer's special tokens in a text. Raises ValueError for what the template refuses, or
        where its stretches can't be told apart."""
        turns = tuple(_guarded(turn, special) for turn in given.turns)
        turns = self._with_arguments(turns, given.tools)
        marked = self._render([turn.message() for turn in turns], given.tools)
        text = marked.replace(OPEN, "").replace(CLOSE, "")
        self._must_be_shown(given, turns, marked)
        if given.whole:
            _must_be_written(given, turns, text, {})
            return RenderedText(text, ((0, len(text)),))
        spans = (
            _marked_spans(marked, turns)
            if OPEN in marked
            else _StretchSearch(self, turns, given.tools, text, special).spans()
        )
        _must_be_written(given, turns, text, spans)
        return RenderedText(text, tuple(span for span in spans.values() if span[0] < span[1]))

    def _must_be_shown(self, given: ChatConversation, turns: Sequence[ChatTurn], marked: str) -> None:
        """Raises ValueError where the template leaves out words that the assistant answers: what it wrote is the same
        whatever they are."""
        for number in sorted(self._remembered(("silent",), given, partial(self._silent, given))):
            turn = turns[number]
            if turn.role == "assistant" or not turn.content.strip():
                continue
            other = (*turns[:number], turn._replace(content=turn.content + GUARD), *turns[number + 1 :])
            if self._tried_text(replace(given, turns=other)) == marked:
                raise ValueError(
                    f"messages[{number}]: the chat template leaves out the words of this turn ({turn.role}); give a "
                    "template that writes them as data.chatTemplate, or leave the turn out of the data"
                )

    def _with_arguments(self, turns: Sequence[ChatTurn], tools: Sequence[Mapping[str, Any]]) -> tuple[ChatTurn, ...]:
        """The turns with the arguments of calls that stand as JSON text as they are where the template writes them so,
        and else as objects, of which it writes JSON itself."""
        texts = [
            call["function"]["arguments"]
            for turn in turns
            for call in turn.more.get("tool_calls", ())
            if isinstance(call["function"]["arguments"], str)
        ]
        if not texts:
            return tuple(turns)
        with suppress(Exception):  # whatever a template raises that takes no text
            written = self._written([turn.message() for turn in turns], tools, prompt=False)
            if all(text in written and _to_json(text) not in written for text in texts):
                return tuple(turns)
        return tuple(turn._replace(more=with_object_arguments(turn.more)) for turn in turns)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool = False
    ) -> str:
        try:
            return self._written(messages, tools, prompt)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        except TypeError:
            pass  # some templates write a call's arguments as they are, and want them as text
        except Exception as error:
            raise ValueError(f"the chat template fails on it: {type(error).__name__}: {error}") from None
        try:
            return self._written([_with_text_arguments(message) for message in messages], tools, prompt)
        except Exception as error:
            raise ValueError(f"the chat template fails on it: {type(error).__name__}: {error}") from None

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        given = {"messages": messages, "tools": list(tools) or None, "documents": None, "add_generation_prompt": prompt}
        return (self._of_tools if tools else self._plain).render(**self.tokens, **given)


def fit(given: ChatConversation, renamed: Mapping[str, str], left_out: frozenset[str]) -> ChatConversation:
    """The conversation with these keys of its messages renamed and left out."""
    if not renamed and not left_out:
        return given
    return replace(given, turns=tuple(fit_turn(turn, renamed, left_out) for turn in given.turns))


def fit_turn(turn: ChatTurn, renamed: Mapping[str, str], left_out: frozenset[str]) -> ChatTurn:
    """One turn of it."""
    return turn._replace(more={renamed.get(key, key): value for key, value in turn.more.items() if key not in left_out})


def _differ(given: ChatConversation, key: str, other: str) -> bool:
    return any(key in turn.more and turn.more.get(other, turn.more[key]) != turn.more[key] for turn in given.turns)


def _is_said_by(given: ChatConversation, key: str, others: Sequence[str]) -> bool:
    """Return whether, in each message that has the key, one of the other keys has the same value."""
    return all(turn.more[key] in [turn.more.get(other) for other in others] for turn in given.turns if key in turn.more)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: what the model is to write itself."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    def written(arguments: Any) -> str:
        return arguments if isinstance(arguments, str) else _to_json(arguments)

    calls = [
        {**call, "function": {**call["function"], "arguments": written(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _guarded(turn: ChatTurn, special: re.Pattern[str] | None) -> ChatTurn:
    """The turn with a GUARD inside each special token that its words spell, so that they stay words; but for marks of
    thoughts that the assistant says."""
    if special is None:
        return turn
    means_thoughts = turn.role == "assistant"

    def guarded(match: re.Match[str]) -> str:
        token = match[0]
        return token if means_thoughts and THOUGHT_MARKS.search(token) else token[0] + GUARD + token[1:]

    def guard(value: Any) -> Any:
        if isinstance(value, str):
            if any(mark in value for mark in (OPEN, CLOSE, GUARD)):
                raise ValueError("holds a private-use character that Muster needs (U+E0F0 to U+E0F2); leave it out")
            return special.sub(guarded, value)
        if isinstance(value, Mapping):
            return {key: guard(inner) for key, inner in value.items()}
        return [guard(inner) for inner in value] if isinstance(value, list) else value

    return turn._replace(content=guard(turn.content), more={key: guard(value) for key, value in turn.more.items()})


def _must_be_written(given: ChatConversation, turns: Sequence[ChatTurn], text: str, spans: Mapping[int, Span]) -> None:
    """Raises ValueError where the template leaves out what the assistant is to learn. Thoughts are the template's own
    affair: many leave out old ones."""
    advice = "give a template that writes it as data.chatTemplate"
    for tool in given.tools:
        name = str((tool.get("function") or tool).get("name", ""))
        if name and name not in text:
            raise ValueError(f"has the tool {name!r}, which the chat template does not write; {advice}")
    for number, turn in enumerate(turns):
        # Of what is only read, too: a tool's answer that follows would come from nowhere.
        start, end = spans.get(number, (0, len(text)))
        for call in turn.more.get("tool_calls", ()):
            if call["function"]["name"] not in text[start:end]:
                raise ValueError(f"messages[{number}] calls a tool, which the chat template does not write; {advice}")
    for number, (start, end) in spans.items():
        turn, written = turns[number], text[start:end]
        if turn.content.rpartition("</think>")[2].strip() not in written:
            raise ValueError(f"messages[{number}]: the chat template leaves out words of the assistant; {advice}")


def _marked_spans(marked: str, turns: Sequence[ChatTurn]) -> dict[int, Span]:
    spans, at, begun = list[Span](), 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            begun = at
        elif piece == CLOSE:
            spans.append((begun, at))
        else:
            at += len(piece)
    spoken = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    if len(spans) != len(spoken):
        raise ValueError(
            f"has {len(spoken)} assistant turns, but the chat template marks {len(spans)} with {{% generation %}}; "
            "correct the template, or give data.chatTemplate"
        )
    return {number: span for number, span in zip(spoken, spans, strict=True) if turns[number].loss_mask}


def _common(one: str, other: str) -> str:
    """Return the common beginning of both texts."""
    places = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return one[: next(places, min(len(one), len(other)))]


@dataclass(frozen=True)
class _StretchSearch:
    """The search for the assistant's stretches in what a template without marks wrote."""

    template: ChatTemplate
    turns: Sequence[ChatTurn]
    tools: Sequence[Mapping[str, Any]]
    text: str
    special: re.Pattern[str] | None

    def spans(self) -> dict[int, Span]:
        """Return the stretch of each turn in the loss, by the number of the turn."""
        by_number, before = dict[int, Span](), 0
        for number, turn in enumerate(self.turns):
            if turn.loss_mask:
                start = self._start(number)
                if start < before:
                    raise self._ambiguous(number)
                before = self._end(number, start)
                by_number[number] = (start, before)
        return by_number

    def _upto(self, number: int, prompt: bool = False, also: Sequence[ChatTurn] = ()) -> str:
        messages = [turn.message() for turn in (*self.turns[:number], *also)]
        try:
            return self.template._render(messages, self.tools, prompt)
        except ValueError as error:
            raise ValueError(f"{self._ambiguous(number)}: {error}") from None

    def _start(self, number: int) -> int:
        """Return the position in the text at which the prompt for this turn ends. A prompt may begin the turn itself
        (`<think>`), and the turn need not continue that beginning: then the prompt counts only as far as it precedes
        any answer."""
        prompt, before = self.text, ""
        if number or not self._needs_a_turn:
            prompt, before = self._upto(number, prompt=True), self._upto(number)
            if self.text.startswith(prompt):
                return len(prompt)
        for later in (self.turns[number + 1 :], ()):
            other = self._upto(number, also=(ChatTurn("assistant", GUARD, True), *later))
            common = _common(prompt, other)
            if len(common) >= len(before) and self.text.startswith(common):
                return len(common)
        raise self._ambiguous(number)

    @cached_property
    def _needs_a_turn(self) -> bool:
        """Return whether the template writes no prompt before the first turn, like one that reads `messages[0]`."""
        try:
            self.template._render([], self.tools, prompt=True)
        except ValueError:
            return True
        return False

    def _end(self, number: int, start: int) -> int:
        """Return the end of the turn, after its special token. What templates write after that (a line end, the end of
        the text) is not learnt."""
        upto = self._upto(number + 1)
        specials = self.special.finditer(upto, start) if self.special else ()
        closings = [match for match in specials if not THOUGHT_MARKS.search(match[0])]
        trailing = [match for match in closings if not self._has_text(upto[match.end() :])]
        for end in (*(match.end() for match in reversed(trailing)), *([] if trailing else [len(upto)])):
            if self.text.startswith(upto[:end]):
                return end
        # The template writes a turn otherwise when others follow it (Qwen 3 leaves out old thoughts).
        if len(closings) != 1 or not trailing or (at := self.text.find(closings[0][0], start)) < 0:
            raise self._ambiguous(number)
        return at + len(closings[0][0])

    def _has_text(self, text: str) -> bool:
        """Return whether the text has anything but special tokens and space."""
        return bool((self.special.sub("", text) if self.special else text).strip())

    def _ambiguous(self, number: int) -> ValueError:
        return ValueError(
            f"messages[{number}] can't be found for certain in what the chat template writes; mark the assistant's "
            "words in it with {% generation %} and give it as data.chatTemplate, or set trainOn: last"
        )
