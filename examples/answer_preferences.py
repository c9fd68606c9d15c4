"""Write preferences out of a model's own mistakes: the right answer of a conversation against what the model says.

    .venv/bin/python examples/answer_preferences.py --model FOLDER --chat FILE --to FILE [--draws 2]

The model, in transformers' layout, answers before each turn of the assistant; answers that are the right one make no
pair. What task dpo learns from such pairs is what this model gets wrong now. The same in every run.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS_AT_ONCE = 64
TOKENS_MAX = 96  # of an answer

Messages = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--chat", type=Path, required=True, metavar="FILE", help="conversations as in chat.jsonl")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE")
    parser.add_argument("--draws", type=int, default=2, help="answers that are drawn to each question")
    given = parser.parse_args()
    asked = list(exchanges(given.chat)) * given.draws
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    said = answers(model, tokenizer, [prompt for prompt, _ in asked], draws=True)
    pairs = {
        pair(prompt, right, wrong) for (prompt, right), wrong in zip(asked, said, strict=True) if differ(right, wrong)
    }
    given.to.write_text("".join(sorted(pairs)))


def exchanges(chat: Path) -> Iterator[tuple[Messages, str]]:
    """Of each turn of the assistant what was said before it, and the turn."""
    for line in chat.read_text().splitlines():
        messages = json.loads(line)["messages"]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                yield messages[:number], message["content"]


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: list[Messages], draws: bool) -> list[str]:
    """What the model says to each: drawn by its probabilities, or the likeliest tokens."""
    torch.manual_seed(23)
    tokenizer.padding_side = "left"
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # rows of about one length together
    found: dict[int, str] = {}
    for begin in range(0, len(order), ROWS_AT_ONCE):
        rows = order[begin : begin + ROWS_AT_ONCE]
        given = tokenizer([texts[row] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
        written = model.generate(**given, max_new_tokens=TOKENS_MAX, do_sample=draws, top_k=0)
        said = tokenizer.batch_decode(written[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        found |= dict(zip(rows, said, strict=True))
    return [found[number] for number in range(len(prompts))]


def differ(right: str, said: str) -> bool:
    """Whether an answer is a wrong one that says something."""
    return bool(said.strip()) and said.strip() != right.strip() and "\ufffd" not in said


def pair(prompt: Messages, right: str, wrong: str) -> str:
    """A line of the format `preference`."""
    sides = {name: [{"role": "assistant", "content": said}] for name, said in (("chosen", right), ("rejected", wrong))}
    return json.dumps({"prompt": prompt, **sides}) + "\n"


if __name__ == "__main__":
    main()
