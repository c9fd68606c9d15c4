"""What is left out of the training documents, and why: rules, duplicates, leaks. Equal for equal contents, whatever the
files, their number and order."""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as having
from hypothesis import settings
from hypothesis import strategies as st
from tests.unit.data.making import chat_record, config, contents, opened, write_jsonl, write_texts

from muster.recipe.curation import Curation, Quality
from muster.trainer.data import load_tokenizer, reading
from muster.trainer.data import store as stores
from muster.trainer.data.duplicates import bands
from muster.trainer.data.report import data_report
from muster.trainer.data.rules import EVALUATION_DOCUMENTS_MAX, RuleReader, TextRules
from muster.trainer.data.words import WORD, ngrams, word_hashes
from muster.trainer.errors import UserError
from muster.words.base import InvalidDocument

VOCABULARY = [f"word{n}" for n in range(3000)]


def essay(seed: int, words: int = 120) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=words))


def changed(text: str, seed: int, count: int = 1) -> str:
    words = text.split()
    for _ in range(count):
        words[random.Random(seed).randrange(len(words))] = "changed"
    return " ".join(words)


def source(path: Path, texts: list[str]) -> dict[str, Any]:
    return {"source": str(write_jsonl(path, [{"text": text} for text in texts])), "format": "jsonl"}


def left_out(given: Any, cache: Path) -> list[dict[str, int]]:
    report = data_report(opened(given, cache), load_tokenizer("bytes"))
    return [{lost.reason: lost.documents for lost in source.left_out} for source in report.sources]


def trained(given: Any, cache: Path) -> list[list[bytes]]:
    packed = opened(given, cache).packed
    return [sorted(contents(each.documents.store)) for each in packed]


def test_equal_documents_are_dropped_in_all_sources_together(tmp_path: Path) -> None:
    first, second = source(tmp_path / "a.jsonl", ["one", "two", "one"]), source(tmp_path / "b.jsonl", ["two", "three"])
    curated = config([first, second], curation={"exactDuplicates": True})
    assert trained(curated, tmp_path / "cache") == [[b"one", b"two"], [b"three"]]
    assert left_out(curated, tmp_path / "cache") == [{"equal to another document": 1}] * 2
    plain = config([first, second])
    assert opened(plain, tmp_path / "cache").fingerprint != opened(curated, tmp_path / "cache").fingerprint


def test_near_duplicates_are_dropped_and_named_with_what_they_are_like(tmp_path: Path) -> None:
    texts = [essay(n) for n in range(20)]
    copies = [changed(texts[3], 1), changed(texts[3], 2), changed(texts[7], 3)]
    given = config([source(tmp_path / "a.jsonl", [*texts, *copies])], curation={"nearDuplicates": {}})
    data = opened(given, tmp_path / "cache")
    assert data.packed[0].documents.store.meta.documents == 20
    (lost,) = data_report(data, load_tokenizer("bytes")).sources[0].left_out
    assert (lost.reason, lost.documents) == ("nearly equal to another document (similarity 0.8)", 3)
    assert all("(as: " in example for example in lost.examples)
    kept = trained(given, tmp_path / "cache")[0]
    assert sum(text.split()[:5] == texts[3].split()[:5] for text in (each.decode() for each in kept)) == 1


@settings(max_examples=8, deadline=None)
@having(st.integers(0, 2**32), st.integers(1, 3))
def test_the_files_and_their_order_change_nothing(seed: int, files: int) -> None:
    texts = [essay(n, 40) for n in range(8)]
    texts += [changed(texts[0], 1), texts[1], changed(texts[2], 2)]
    order = random.Random(seed).sample(texts, len(texts))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curation = {"exactDuplicates": True, "nearDuplicates": {"similarity": 0.7, "ngram": 3}}
        one = config([source(folder / "one" / "a.jsonl", texts)], curation=curation)
        for number in range(files):
            source(folder / "many" / f"{number}.jsonl", order[number::files])
        many = config([{"source": str(folder / "many"), "format": "jsonl"}], curation=curation)
        a, b = opened(one, folder / "cache1"), opened(many, folder / "cache2")
        assert contents(a.packed[0].documents.store) == contents(b.packed[0].documents.store)
        assert a.fingerprint == b.fingerprint


def test_near_duplicates_never_straddle_a_hold_out(tmp_path: Path) -> None:
    texts = [variant for n in range(60) for variant in (essay(n, 60), changed(essay(n, 60), n))]
    evaluation = {"every": 1, "holdout": 0.3}
    path = source(tmp_path / "a.jsonl", texts)

    def straddling(**curation: Any) -> int:
        data = opened(config([path], evaluation=evaluation, **curation), tmp_path / "cache")
        sides = []
        for packed in (data.packed[0], data.evaluated[0]):
            part = packed.documents
            spelt = contents(part.store)[part.first : part.last]
            sides.append({tuple(text.split()[-3:]) for text in spelt} | {tuple(text.split()[:3]) for text in spelt})
        return len(sides[0] & sides[1])

    assert straddling() > 0, "without curation some do"
    assert straddling(curation={"nearDuplicates": {"drop": False, "similarity": 0.6}}) == 0
    assert straddling(curation={"nearDuplicates": {"similarity": 0.6}}) == 0


def test_training_documents_that_hold_text_of_the_evaluation_are_dropped(tmp_path: Path) -> None:
    question = essay(1000, 40)
    texts = [essay(n) for n in range(5)]
    leak = f"{essay(50, 30)} {' '.join(question.upper().split()[10:24])} {essay(51, 30)}"
    near = f"{essay(52, 30)} {' '.join(question.split()[10:22])} {essay(53, 30)}"
    held = source(tmp_path / "held.jsonl", [question])
    evaluation = {"every": 1, "data": [held]}
    train = [source(tmp_path / "a.jsonl", [*texts, leak, near])]
    given = config(train, evaluation=evaluation, curation={"decontamination": {}})
    assert left_out(given, tmp_path / "cache")[0] == {"shares 13 words in a row with the evaluation data": 1}
    (example,) = data_report(opened(given, tmp_path / "cache"), load_tokenizer("bytes")).sources[0].left_out[0].examples
    assert example.startswith(f"{tmp_path / 'a.jsonl'}, line 6: {leak[:40]}")
    by_name = {"every": 1, "sets": {"leaked": {"data": [held]}}}
    assert left_out(config(train, evaluation=by_name, curation={"decontamination": {}}), tmp_path / "cache")[0] == {
        "shares 13 words in a row with the evaluation data": 1
    }
    twelve = config(train, evaluation=evaluation, curation={"decontamination": {"ngram": 12}})
    assert list(left_out(twelve, tmp_path / "cache")[0].values()) == [2]


def test_what_many_evaluation_documents_share_is_no_leak(tmp_path: Path) -> None:
    notice = essay(7, 20)
    for count, dropped in ((EVALUATION_DOCUMENTS_MAX, 1), (EVALUATION_DOCUMENTS_MAX + 1, 0)):
        held = source(tmp_path / f"held{count}.jsonl", [f"{notice} {essay(n)}" for n in range(count)])
        train = source(tmp_path / "a.jsonl", [f"{notice} {essay(500)}", essay(501)])
        given = config([train], evaluation={"every": 1, "data": [held]}, curation={"decontamination": {}})
        assert sum(left_out(given, tmp_path / "cache")[0].values()) == dropped


def test_conversations_are_compared_by_what_is_said_without_the_systems_words(tmp_path: Path) -> None:
    system = ("system", essay(1, 60))
    train = [chat_record(system, ("user", essay(n, 20)), ("assistant", essay(n + 50, 20))) for n in range(10)]
    held = write_jsonl(tmp_path / "h.jsonl", [chat_record(system, ("user", essay(3, 20)), ("assistant", "x"))])
    given = config(
        [{"source": str(write_jsonl(tmp_path / "a.jsonl", train)), "format": "openai-chat"}],
        1024,
        {"every": 1, "data": [{"source": str(held), "format": "openai-chat"}]},
        curation={"decontamination": {}, "nearDuplicates": {}},
    )
    assert left_out(given, tmp_path / "cache")[0] == {"shares 13 words in a row with the evaluation data": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("too short", "minWords"),
        ("word " * 120, "maxWords"),
        ("# words here " * 30, "maxSymbolsPerWord"),
        ("\n".join(f"- point of many {n}" for n in range(12)), "maxBulletLines"),
        ("\n".join(f"sentence {n} that has ten words and then it ends ..." for n in range(8)), "maxEllipsisLines"),
        ("12 34 56 78 " * 20, "minAlphabeticWords"),
        ("a line of words\n" * 20, "maxDuplicateLines"),
        ("ein guter Text mit vielen Wörtern, der bleibt; " * 10, None),
    ],
)
def test_each_rule_of_quality_has_its_threshold(text: str, reason: str | None) -> None:
    quality = Quality(min_words=20, max_words=100)
    look = RuleReader(TextRules(Curation(quality=quality))).look()
    look.add(text)
    verdict = look.verdict()
    assert verdict is None if reason is None else reason in str(verdict)


def test_lengths_and_patterns_drop_and_the_store_holds_nothing_of_the_dropped(tmp_path: Path) -> None:
    texts = ["short", "of a good length", "with lorem ipsum in it", "far too long " * 10, "good as well"]
    curation = {"length": {"minTokens": 8, "maxTokens": 40}, "dropMatching": ["(?i)LOREM"]}
    given = config([source(tmp_path / "a.jsonl", texts)], curation=curation)
    assert trained(given, tmp_path / "cache") == [[b"good as well", b"of a good length"]]
    store = opened(given, tmp_path / "cache").packed[0].documents.store
    assert len(store.tokens) == sum(len(text) + 1 for text in (texts[1], texts[4]))
    assert left_out(given, tmp_path / "cache") == [
        {
            "has fewer tokens than length.minTokens 8": 1,
            "matches dropMatching '(?i)LOREM'": 1,
            "has more tokens than length.maxTokens 40": 1,
        }
    ]


def test_a_conversation_that_is_taken_back_leaves_no_trace_in_the_loss(tmp_path: Path) -> None:
    records = [chat_record(("user", "q"), ("assistant", "a" * size)) for size in (3, 60, 5)]
    path = {"source": str(write_jsonl(tmp_path / "a.jsonl", records)), "format": "openai-chat"}
    few = {"source": str(write_jsonl(tmp_path / "b.jsonl", [records[0], records[2]])), "format": "openai-chat"}
    short = config([path], 64, curation={"length": {"maxTokens": 30}})
    cut = opened(short, tmp_path / "cache").packed[0].documents.store
    want = opened(config([few], 64), tmp_path / "cache").packed[0].documents.store
    for name in ("tokens", "loss_mask", "hashes", "starts", "bounds", "firsts"):
        assert np.array_equal(getattr(cut, name), getattr(want, name)), name
    assert cut.meta.learnt == want.meta.learnt == 3 + 5 + 2


def test_a_long_text_file_is_looked_at_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 50)
    texts = ["\n".join(essay(n, 10) for n in range(20)), "\n".join(essay(n + 40, 10) for n in range(20)) + " lorem"]
    folder = write_texts(tmp_path / "texts", [*texts, essay(90)])
    held = source(tmp_path / "h.jsonl", [" ".join(texts[0].split()[100:120])])
    given = config(
        [{"source": str(folder), "format": "text"}],
        evaluation={"every": 1, "data": [held]},
        curation={"decontamination": {}, "dropMatching": ["lorem$"], "nearDuplicates": {}},
    )
    assert trained(given, tmp_path / "cache") == [[essay(90).encode()]]


def test_settings_of_curation_are_part_of_what_is_cached(tmp_path: Path) -> None:
    path = source(tmp_path / "a.jsonl", ["a text", "another text"])
    keys = {
        opened(config([path], curation=curation), tmp_path / "cache").packed[0].documents.store.meta.key
        for curation in ({"dropMatching": ["q"]}, {"dropMatching": ["z"]}, {"quality": {"minWords": 1}}, {})
    }
    assert len(keys) == 4
    again: list[str] = []
    opened(config([path], curation={"dropMatching": ["q"]}), tmp_path / "cache", again)
    assert not any("prepared" in line for line in again)


def test_all_dropped_is_refused_with_the_reasons(tmp_path: Path) -> None:
    given = config([source(tmp_path / "a.jsonl", ["a text", "b text"])], curation={"dropMatching": ["text"]})
    with pytest.raises(UserError, match="has nothing to train on: 2 lines are left out: matches dropMatching 'text'"):
        opened(given, tmp_path / "cache")


@pytest.mark.parametrize(
    ("curation", "words"),
    [
        ({"dropMatching": ["("]}, "unclosed group"),
        ({"dropMatching": [r"(a)\1"]}, "backreferences are not supported"),
        ({"decontamination": {}}, "there is none of them; leave it out, or give evaluation.data"),
        ({"nearDuplicates": {"drop": False}}, "on one side of evaluation.holdout"),
        ({"nearDuplicates": {"similarity": 0.2}}, "must be at least 0.5"),
        ({"length": {"minTokens": 9, "maxTokens": 8}}, "nothing would be kept"),
        ({"quality": {"minwords": 3}}, "minWords"),
    ],
)
def test_settings_that_make_no_sense_are_refused(curation: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        config([{"source": "x"}], curation=curation)
    assert words in str(caught.value)


def test_a_pattern_takes_time_in_proportion_to_the_text(tmp_path: Path) -> None:
    look = RuleReader(TextRules(Curation(drop_matching=("(a+)+$",)))).look()
    look.add("a" * 200_000 + "b")  # Python's own re would take longer than the universe is old
    assert look.verdict() is None


def test_words_are_those_of_any_script_and_their_case_is_no_matter() -> None:
    assert np.array_equal(word_hashes("Hello, World!"), word_hashes("hello world"))
    assert WORD.findall("今日は abc") == ["今", "日", "は", "abc"]
    assert len(ngrams(word_hashes("a b c"), 4)) == 0
    assert np.array_equal(ngrams(word_hashes("x a b c"), 3)[1:], ngrams(word_hashes("a b c"), 3))


def test_bands_find_the_pairs_that_were_asked_for() -> None:
    for similarity in (0.5, 0.7, 0.8, 0.9, 1.0):
        count, values = bands(similarity)
        assert count * values <= stores.SKETCH_VALUES
        assert 1 - (1 - similarity**values) ** count >= 0.9
