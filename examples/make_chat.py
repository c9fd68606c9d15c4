"""Write examples/chat.jsonl: small conversations in the openai-chat format, the same in every run.

    python examples/make_chat.py [--to FILE --seed N]

Made up by templates, so that there is no licence to mind and a tiny model has something that it can learn. Another seed
makes other conversations of the same kind.
"""

import argparse
import json
import random
from pathlib import Path

TARGET = Path(__file__).with_name("chat.jsonl")
CONVERSATIONS = 480
WORDS = (
    *("anchor", "beacon", "candle", "dragon", "ember", "falcon", "garden", "harbor"),
    *("island", "jungle", "kettle", "lantern", "meadow", "needle", "orchard"),
)
NAMES = (
    *("Ada", "Barbara", "Claude", "Donald", "Edsger", "Frances", "Grace"),
    *("Hedy", "Ivan", "Joan", "Katherine", "Linus", "Margaret", "Niklaus"),
)
GLOSSARY = {
    "job": "what a user wants trained",
    "gang": "the workers that must run together",
    "attempt": "one life of the gang, numbered from one",
    "worker": "one node's share of the gang",
    "rank": "one training process",
    "commit": "a checkpoint that is complete, and so the only thing to resume from",
    "signal": "an observation about one attempt, never a command",
    "cause": "why an attempt ended",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=TARGET, metavar="FILE")
    parser.add_argument("--seed", type=int, default=17)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    kinds = (upper, length, add, greet, define, repeat)
    with given.to.open("w") as file:
        for number in range(CONVERSATIONS):
            turns = [turn for _ in range(dice.choice((1, 1, 2))) for turn in kinds[dice.randrange(len(kinds))](dice)]
            opening = [{"role": "system", "content": "You answer briefly."}] if number % 3 == 0 else []
            file.write(json.dumps({"messages": [*opening, *turns]}) + "\n")


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def upper(dice: random.Random) -> list[dict[str, str]]:
    word = dice.choice(WORDS)
    return exchange(f"Write {word} in capital letters.", word.upper())


def length(dice: random.Random) -> list[dict[str, str]]:
    word = dice.choice(WORDS)
    return exchange(f"How many letters has {word}?", f"{word} has {len(word)} letters.")


def add(dice: random.Random) -> list[dict[str, str]]:
    left, right = dice.randint(1, 9), dice.randint(1, 9)
    return exchange(f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}.")


def greet(dice: random.Random) -> list[dict[str, str]]:
    name = dice.choice(NAMES)
    return exchange(f"Hello, I am {name}.", f"Hello {name}, how can I help?")


def define(dice: random.Random) -> list[dict[str, str]]:
    word = dice.choice(list(GLOSSARY))
    return exchange(f"In Muster, what is a {word}?", f"{word.capitalize()}: {GLOSSARY[word]}.")


def repeat(dice: random.Random) -> list[dict[str, str]]:
    word, times = dice.choice(WORDS), dice.randint(2, 4)
    return exchange(f"Say {word} {times} times.", " ".join([word] * times))


if __name__ == "__main__":
    main()
