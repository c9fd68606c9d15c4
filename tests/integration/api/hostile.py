"""Bodies that are made to cost more than they weigh, from a seed: each is (content type, body)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.integration.api.platform import document

JSON, YAML = "application/json", "application/yaml"
Body = tuple[str, bytes]


def bodies(number: int, seed: int = 0) -> list[Body]:
    """`number` bodies, every kind of them in turn."""
    dice = random.Random(seed)
    return [KINDS[index % len(KINDS)](dice) for index in range(number)]


def _numbers_as_variables(dice: random.Random) -> Body:
    """Faults times secrets."""
    env = [{"name": f"A{n}", "value": dice.randrange(10**6)} for n in range(dice.randrange(1_000, 20_000))]
    return JSON, json.dumps(document(runtime={"env": env})).encode()


def _unknown_keys(dice: random.Random) -> Body:
    words = [f"{dice.choice(['training', 'gang', 'runtime'])}{n}" for n in range(dice.randrange(1_000, 19_000))]
    return JSON, json.dumps(document(**dict.fromkeys(words, 1))).encode()


def _long_keys(dice: random.Random) -> Body:
    return JSON, json.dumps(document(**{"x" * dice.randrange(100_000, 900_000): 1})).encode()


def _merge_keys(dice: random.Random) -> Body:
    keys = ", ".join(f"k{n}: {n}" for n in range(dice.randrange(100, 3_000)))
    return YAML, (f"a: &a {{{keys}}}\nb:\n" + "- {<<: *a}\n" * dice.randrange(500, 20_000)).encode()


def _laughs(dice: random.Random) -> Body:
    width = dice.randrange(2, 12)
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * width)}]" for n in range(1, 60)]
    return YAML, "\n".join(lines).encode()


def _deep(dice: random.Random) -> Body:
    begin, end = dice.choice([("[", "]"), ('{"a":', "}")])
    depth = dice.randrange(10, 90_000)
    return dice.choice([JSON, YAML]), (begin * depth + "1" + end * depth).encode()


def _many_values(dice: random.Random) -> Body:
    item = dice.choice(["1,", "[],", '"",', "{},"])
    return dice.choice([JSON, YAML]), ("[" + item * dice.randrange(10_000, 300_000) + "1]").encode()


def _labels(dice: random.Random) -> Body:
    wanted = document()
    wanted["metadata"]["labels"] = {f"l{n}": "v" * 64 for n in range(dice.randrange(1_000, 9_000))}
    return JSON, json.dumps(wanted).encode()


def _directives(dice: random.Random) -> Body:
    return YAML, b"".join(b"%%TAG !a%d! b\n" % n for n in range(dice.randrange(1_000, 40_000))) + b"---\na: 1\n"


def _huge_numbers(dice: random.Random) -> Body:
    digits = "9" * dice.randrange(20, 900_000)
    return dice.choice([JSON, YAML]), f'{{"spec": {{"priority": {digits}}}}}'.encode()


def _noise(dice: random.Random) -> Body:
    return dice.choice([JSON, YAML]), dice.randbytes(dice.randrange(1, 100_000))


def _yaml_noise(dice: random.Random) -> Body:
    letters = dice.choices("&*a<:{}[],-?!%|>'\"\n #~x01", k=dice.randrange(10, 100_000))
    return YAML, "".join(letters).encode()


def _long_secrets(dice: random.Random) -> Body:
    env = [{"name": f"A{n}", "value": "s" * dice.randrange(1, 50), "x": n} for n in range(dice.randrange(500, 5_000))]
    return JSON, json.dumps(document(runtime={"env": env})).encode()


KINDS: tuple[Callable[[random.Random], Body], ...] = (
    _numbers_as_variables,
    _unknown_keys,
    _long_keys,
    _merge_keys,
    _laughs,
    _deep,
    _many_values,
    _labels,
    _directives,
    _huge_numbers,
    _noise,
    _yaml_noise,
    _long_secrets,
)
