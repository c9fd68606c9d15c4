"""Write examples/preferences.jsonl: for questions of examples/chat.jsonl the right answer, and one to another question.

    python examples/make_preferences.py

A tiny model can learn to prefer the answer that fits. The same in every run.
"""

import json
import random
from pathlib import Path

TARGET = Path(__file__).with_name("preferences.jsonl")
PAIRS = 240


def main() -> None:
    dice = random.Random(23)
    lines = TARGET.with_name("chat.jsonl").read_text().splitlines()
    exchanges = [json.loads(line)["messages"][-2:] for line in lines]
    with TARGET.open("w") as file:
        for question, answer in exchanges[:PAIRS]:
            wrong = dice.choice([other for _, other in exchanges if other != answer])
            file.write(json.dumps({"prompt": [question], "chosen": [answer], "rejected": [wrong]}) + "\n")


if __name__ == "__main__":
    main()
