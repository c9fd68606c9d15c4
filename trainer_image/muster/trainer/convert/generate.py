"""`python -m muster.trainer.convert.generate --checkpoint FOLDER`: text from a commit or a model's folder.

It continues a text, or answers as the assistant of a conversation; with --interactive it holds one, line by line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from muster.trainer.convert.load_model import CPU, LoadedModel, load
from muster.trainer.data import chat_prompt
from muster.trainer.data.answers import ends_of_turn, text_of, until
from muster.trainer.errors import UserError, exit_code
from muster.trainer.models.generation import SamplingSettings, generate
from muster.words.text import with_codes

LEAVE, FORGET = "/exit", "/reset"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        loaded = load(options.checkpoint, options.step)
        if options.interactive:
            _converse(loaded, options)
        else:
            _answer_once(loaded, options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        code = exit_code(error)
        if code == 1:
            raise
        print(json.dumps({"error": str(error)}) if options.json else error, file=sys.stderr)
        return code
    return 0


def continued(loaded: LoadedModel, prompt: str, sampling: SamplingSettings, stops: Sequence[str] = ()) -> Iterator[str]:
    """Yield the continuation of a text, piece by piece."""
    tokenizer = loaded.tokenizer
    ids = [*tokenizer.bos, *tokenizer.encode(prompt)] or [tokenizer.eos]
    return _pieces(loaded, ids, frozenset({tokenizer.eos}), sampling, stops)


def answered(
    loaded: LoadedModel, messages: Sequence[dict[str, Any]], sampling: SamplingSettings, stops: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the assistant's answer to `messages`, as the model's own chat template writes them, piece by piece. Raises
    UserError where the tokenizer has neither a template nor marks."""
    return _pieces(loaded, chat_prompt(loaded.tokenizer, messages), ends_of_turn(loaded.tokenizer), sampling, stops)


def _pieces(
    loaded: LoadedModel, ids: list[int], ends: frozenset[int], sampling: SamplingSettings, stops: Sequence[str]
) -> Iterator[str]:
    definition, tokenizer = loaded.definition, loaded.tokenizer
    if max(ids) >= definition.vocab_size:
        raise UserError("the prompt has tokens that the model does not know: the tokenizer is not the model's")
    vocab = min(tokenizer.vocab_size, definition.vocab_size)
    tokens = generate(loaded.module, ids, ends, vocab, sampling, definition.position_limit, CPU)
    return until(text_of(tokens, ids, tokenizer), stops)


def _answer_once(loaded: LoadedModel, options: argparse.Namespace) -> None:
    if options.chat:
        pieces = answered(
            loaded, [*_system(options), _message("user", options.prompt)], _sampling(options), options.stop
        )
    else:
        pieces = continued(loaded, options.prompt, _sampling(options), options.stop)
    if options.json:
        print(json.dumps({"model": loaded.name, "prompt": options.prompt, "text": "".join(pieces)}))
        return
    _show(pieces if options.chat else itertools.chain((options.prompt,), pieces))


def _converse(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """One turn per line of standard input, until it ends."""
    said = _system(options)
    _print(f"{loaded.name}; {FORGET} begins anew, {LEAVE} or Ctrl-D ends")
    while True:
        _print("> ", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == LEAVE:
            return
        if line.strip() == FORGET:
            said = _system(options)
        elif line.strip():
            said.append(_message("user", line.rstrip("\n")))
            pieces = answered(loaded, said, _sampling(options), options.stop)
            said.append(_message("assistant", _one_document(pieces) if options.json else _show(pieces)))


def _show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; all that they say together. What a model says steers no terminal."""
    text, is_terminal = "", sys.stdout.isatty()
    for piece in pieces:
        print(with_codes(piece) if is_terminal else piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text


def _one_document(pieces: Iterator[str]) -> str:
    """Print an answer as JSON; the answer."""
    text = "".join(pieces)
    print(json.dumps({"text": text}), flush=True)
    return text


def _print(line: str, end: str = "\n") -> None:
    """Tell a person who types. What is piped in gets answers alone."""
    if sys.stdin.isatty():
        print(line, end=end, file=sys.stderr, flush=True)


def _system(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [_message("system", options.system)] if options.system else []


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _sampling(options: argparse.Namespace) -> SamplingSettings:
    return SamplingSettings(options.tokens, options.temperature, options.top_p, options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muster.trainer.convert.generate", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a job's checkpoint folder (<checkpoint.uri>/<job uid>), or a model's folder as export writes it",
    )
    parser.add_argument("--step", type=_step, default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--prompt", default="", help="the text to continue; with --chat, what the user says")
    parser.add_argument("--chat", action="store_true", help="answer as the assistant, by the model's chat template")
    parser.add_argument("--interactive", action="store_true", help="hold a conversation: a line of input is a turn")
    parser.add_argument("--system", default="", help="what stands before a conversation as the system's words")
    parser.add_argument("--tokens", type=_count, default=128, help="at most so many tokens (default: 128)")
    parser.add_argument("--temperature", type=_at_least_0, default=0.8, help="0 takes the likeliest (default: 0.8)")
    parser.add_argument("--top-p", type=_share, default=1.0, help="of the likeliest with this probability (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _step(text: str) -> int | str:
    if text in ("best", "last"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be best, last or a step, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _at_least_0(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
