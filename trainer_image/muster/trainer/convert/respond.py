"""`python -m muster.trainer.convert.respond --checkpoint FOLDER`: a loaded model that answers requests, line by line.

Each line of standard input is a request in JSON: {"messages"} for a conversation or {"prompt"} (text or ids) for a text
to continue, with "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "echo"; or {"cancel": true}, which
ends the answer that is being written. Lines of standard output: {"ready"} once the model is loaded; then for each
request any number of {"text"} and one {"done"} or {"error"}. Requests are answered one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from muster.trainer.convert.load_model import CPU, LoadedModel, load
from muster.trainer.data import chat_prompt
from muster.trainer.data.answers import ends_of_turn, text_of, until
from muster.trainer.errors import StorageError, UserError, exit_code
from muster.trainer.models.generation import SamplingSettings, generate

ROWS_AT_ONCE = 128  # of logits, whose log-probabilities take vocabulary × 4 bytes each


@dataclass
class WrittenAnswer:
    """Counts of an answer while it is written. `written` are its ids."""

    prompt: list[int]
    max_tokens: int
    written: list[int] = field(default_factory=list)
    exhausted: bool = False

    @property
    def finish_reason(self) -> str:
        """`length` where only the number of tokens ended it."""
        return "length" if self.exhausted and len(self.written) >= self.max_tokens else "stop"

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.written)}


class ModelResponder:
    """Answers requests by a loaded model. `cancelled` is set by whoever reads the requests."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.cancelled = threading.Event()

    def respond(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines of one answer. Raises UserError for what can't be asked of this model."""
        tokenizer = self._loaded.tokenizer
        chat = "messages" in request
        prompt = chat_prompt(tokenizer, request["messages"]) if chat else self._ids(request["prompt"])
        ends = ends_of_turn(tokenizer) if chat else frozenset({tokenizer.eos})
        self._must_fit(prompt)
        answer = WrittenAnswer(prompt, int(request["max_tokens"]))
        echoed = tokenizer.spell(prompt) if request.get("echo") else ""
        if echoed:
            yield {"text": echoed}
        tokens = self._tokens(answer, ends, request)
        for piece in until(text_of(tokens, prompt, tokenizer), request.get("stop") or ()):
            yield {"text": piece}
        done: dict[str, Any] = {"finish_reason": answer.finish_reason, **answer.usage()}
        if request.get("logprobs") is not None:
            done["logprobs"] = self._logprobs(answer, int(request["logprobs"]), bool(request.get("echo")))
        yield {"done": done}

    def _tokens(self, answer: WrittenAnswer, ends: frozenset[int], request: dict[str, Any]) -> Iterator[int]:
        definition = self._loaded.definition
        vocab = min(self._loaded.tokenizer.vocab_size, definition.vocab_size)
        sampling = SamplingSettings(answer.max_tokens, request["temperature"], request["top_p"], request["seed"])
        chosen = generate(
            self._loaded.module, answer.prompt, ends, vocab, sampling, definition.position_limit, CPU
        ) if answer.max_tokens else iter(())  # fmt: skip
        for token in chosen:
            if self.cancelled.is_set():
                return
            answer.written.append(token)
            yield token
        answer.exhausted = True

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if isinstance(prompt, str):
            return [*tokenizer.bos, *tokenizer.encode(prompt)] or [tokenizer.eos]
        return list(prompt) or [tokenizer.eos]

    def _must_fit(self, prompt: Sequence[int]) -> None:
        definition = self._loaded.definition
        if max(prompt) >= definition.vocab_size or min(prompt) < 0:
            raise UserError(
                f"the prompt has the token {max(prompt)}, and the model knows {definition.vocab_size:,} of them"
            )
        if definition.position_limit is not None and len(prompt) > definition.position_limit:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens, and the model sees {definition.position_limit:,}; shorten it"
            )

    @torch.no_grad()
    def _logprobs(self, answer: WrittenAnswer, top: int, echo: bool) -> dict[str, list[Any]]:
        """Return the log-probability of each token before temperature, by one pass over prompt and answer. The very
        first token has none."""
        ids = [*answer.prompt, *answer.written]
        limit = self._loaded.definition.position_limit
        if limit is not None and len(ids) > limit:
            raise UserError(f"logprobs of {len(ids):,} tokens are asked for, and the model sees {limit:,}; shorten it")
        numbers = range(0 if echo else len(answer.prompt), len(ids))
        by_token: list[tuple[float | None, dict[str, float] | None]] = [(None, None)] * len(ids)
        for number, scores in self._scores(ids):
            best = scores.topk(top) if top else None
            by_token[number] = (float(scores[ids[number]]), self._named(best) if best is not None else None)
        texts = [self._loaded.tokenizer.spell(ids[number : number + 1]) for number in numbers]
        offsets = [sum(map(len, texts[:number])) for number in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [by_token[number][0] for number in numbers],
            "top_logprobs": [by_token[number][1] for number in numbers],
            "text_offset": offsets,
        }

    def _scores(self, ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(place, fp32 [vocab]): the log-probabilities of the token at each place but the first."""
        definition = self._loaded.definition
        vocab = min(self._loaded.tokenizer.vocab_size, definition.vocab_size)
        tokens = torch.tensor([ids], device=CPU)
        positions = torch.arange(len(ids), device=CPU)[None]
        logits = self._loaded.module(tokens, positions, torch.zeros_like(tokens))[0]
        for begin in range(0, len(ids) - 1, ROWS_AT_ONCE):
            rows = logits[begin : min(begin + ROWS_AT_ONCE, len(ids) - 1), :vocab]
            yield from enumerate(torch.log_softmax(rows.float(), dim=-1), begin + 1)

    def _named(self, best: Any) -> dict[str, float]:
        """Return the values by the tokens' text, the likeliest last: where several tokens have the same text, the
        likeliest one counts."""
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return {self._loaded.tokenizer.spell([token]): value for token, value in reversed(pairs)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m muster.trainer.convert.respond", description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="a job's checkpoint folder, or a model's folder")
    parser.add_argument("--step", required=True, help="best, last, or a step")
    parser.add_argument("--of-job", action="store_true", help="the folder is a job's, whatever lies in it")
    options = parser.parse_args(arguments)
    try:
        step = options.step if options.step in ("best", "last") else int(options.step)
        responder = ModelResponder(load(options.checkpoint, step, within_memory=True, of_job=options.of_job))
    except Exception as error:
        _send({"error": str(error) or type(error).__name__})
        return exit_code(error)
    _send({"ready": True})
    requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, responder.cancelled), daemon=True).start()
    while (request := requests.get()) is not None:
        responder.cancelled.clear()
        try:
            for line in responder.respond(request):
                _send(line)
        except (UserError, StorageError) as error:
            _send({"error": str(error), "of": "request"})
        except Exception as error:
            _send({"error": f"the model failed: {type(error).__name__}: {error}"})
            return 1
    return 0


def _read(requests: queue.SimpleQueue[dict[str, Any] | None], cancelled: threading.Event) -> None:
    """Pass requests on until standard input ends; a cancellation overtakes what is being written."""
    for line in sys.stdin:
        request = json.loads(line)
        if "cancel" in request:
            cancelled.set()
        else:
            requests.put(request)
    cancelled.set()  # whoever asked has gone
    requests.put(None)


def _send(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    # At once: nothing is to be saved, and torch takes seconds to take itself apart while nobody is there any more.
    os._exit(main())
