"""Judge models by conversations and preferences that none of them was trained on, by transformers alone.

    .venv/bin/python examples/judge_models.py --chat FILE [--preferences FILE] FOLDER…

Prints a JSON list, a mapping for each folder: the mean `loss` per token of what the assistant says; `exact_match`,
the share of the assistant's turns that the model's likeliest answer is; and with preferences `preference_accuracy`, the
share of pairs whose chosen answer the model holds for likelier than the rejected one.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from answer_preferences import Messages, answers, exchanges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, required=True, metavar="FILE", help="conversations as in chat.jsonl")
    parser.add_argument("--preferences", type=Path, metavar="FILE", help="pairs as in preferences.jsonl")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    given = parser.parse_args()
    print(json.dumps([judged(folder, given.chat, given.preferences) for folder in given.folders]))


@torch.no_grad()
def judged(folder: Path, chat: Path, preferences: Path | None) -> dict[str, float]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = {"loss": mean_loss(model, tokenizer, chat), "exact_match": exact_match(model, tokenizer, chat)}
    if preferences is not None:
        found["preference_accuracy"] = preference_accuracy(model, tokenizer, preferences)
    return found


def mean_loss(model: Any, tokenizer: Any, chat: Path) -> float:
    total = count = 0.0
    for prompt, answer in exchanges(chat):
        log_prob, tokens = log_probability(model, tokenizer, prompt, [{"role": "assistant", "content": answer}])
        total, count = total - log_prob, count + tokens
    return total / count


def exact_match(model: Any, tokenizer: Any, chat: Path) -> float:
    asked = list(exchanges(chat))
    said = answers(model, tokenizer, [prompt for prompt, _ in asked], draws=False)
    right = [each.strip() == answer.strip() for each, (_, answer) in zip(said, asked, strict=True)]
    return sum(right) / len(right)


def preference_accuracy(model: Any, tokenizer: Any, preferences: Path) -> float:
    pairs = [json.loads(line) for line in preferences.read_text().splitlines()]
    scores = [
        [log_probability(model, tokenizer, pair["prompt"], pair[side])[0] for side in ("chosen", "rejected")]
        for pair in pairs
    ]
    return sum(chosen > rejected for chosen, rejected in scores) / len(scores)


def log_probability(model: Any, tokenizer: Any, prompt: Messages, answer: Messages) -> tuple[float, int]:
    """Of the answer after the prompt, summed over its tokens, and how many these are."""
    whole = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids, first = torch.tensor([tokenizer(whole)["input_ids"]]), len(tokenizer(before)["input_ids"])
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, first - 1 : -1], dim=-1)
    found = log_probs.gather(1, ids[0, first:, None])
    return float(found.sum()), len(found)


if __name__ == "__main__":
    main()
