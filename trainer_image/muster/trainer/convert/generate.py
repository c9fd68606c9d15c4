"""`python -m muster.trainer.convert.generate --checkpoint FOLDER`: continue a text with a commit's weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from muster.trainer.checkpoint import read_commit
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import Tokenizer, tokenizer_from_commit
from muster.trainer.errors import UserError, exit_code
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.from_commit import definition_of


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        definition, model, tokenizer = load_model(options.checkpoint, options.step)
        prompt = [*tokenizer.bos, *tokenizer.encode(options.prompt)]
        tokens = list(sample(definition, model, tokenizer, prompt, options.tokens, options.temperature, options.seed))
    except Exception as error:
        code = exit_code(error)
        if code == 1:
            raise
        print(error, file=sys.stderr)
        return code
    print(options.prompt + tokenizer.decode(tokens))
    return 0


def load_model(folder: str, step: int | Literal["best", "last"]) -> tuple[ModelDefinition, nn.Module, Tokenizer]:
    """The model of a commit in fp32 on the CPU, and the tokenizer that it was trained with. Raises StorageError."""
    commit = read_commit(folder, step)
    definition = definition_of(commit, folder, None)
    if definition.scores is not None:
        raise UserError(
            f"the commit at step {commit.step} in {folder} scores texts (task {commit.config.get('task')}) and writes "
            "none; export it and open it with AutoModelForSequenceClassification"
        )
    model = definition.build(torch.float32, "none")
    definition.fill(model, torch.device("cpu"), 0, values=False)
    begin_with(folder, commit.step, model)
    return definition, model.eval(), tokenizer_from_commit(commit.tokenizer)


@torch.no_grad()
def sample(
    definition: ModelDefinition,
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: list[int],
    count: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """At most `count` tokens that follow the prompt. It ends before the end of the document. At temperature 0 each
    token is the likeliest.

    Raises UserError where the prompt has tokens that the model does not know.
    """
    tokens = prompt or [tokenizer.eos]
    if max(tokens) >= definition.vocab_size:
        raise UserError("the prompt has tokens that the model does not know: the tokenizer is not the model's")
    dice = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = choose(
            _next_logits(model, tokens[-(definition.position_limit or len(tokens)) :])[: tokenizer.vocab_size],
            temperature,
            dice,
        )
        if chosen == tokenizer.eos:
            return
        tokens = [*tokens, chosen]
        yield chosen


def choose(logits: Tensor, temperature: float, dice: torch.Generator) -> int:
    """The next id, which is the likeliest one at temperature 0, else drawn. `logits` is [vocab]."""
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=dice))


def _next_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """The logits [vocab] of the next token. `tokens` is as much of the end of the text as the model has positions."""
    seen = torch.tensor([tokens])
    positions = torch.arange(seen.shape[1])[None]
    out: Tensor = model(seen, positions, torch.zeros_like(seen))
    return out[0, -1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muster.trainer.convert.generate", description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="a job's checkpoint folder: <checkpoint.uri>/<job uid>")
    parser.add_argument("--step", type=_step, default="best", help="best, last, or a step (default: best)")
    parser.add_argument("--prompt", default="", help="the text to continue")
    parser.add_argument("--tokens", type=int, default=128, help="at most so many tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    return parser


def _step(text: str) -> int | str:
    if text in ("best", "last"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be best, last or a step, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
