"""open_data: from a configuration to samples, the same whatever the files are called."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.data.making import chat_record, config, opened, write_jsonl, write_texts, write_tokenizer

from muster.trainer.config import DataParallel
from muster.trainer.data import RankLoader, SampleSet, load_tokenizer, open_data
from muster.trainer.errors import UserError
from muster.words.checkpoint import DataCursor


def texts(dataset: SampleSet, epoch: int = 0) -> Counter[str]:
    """The words of an epoch's documents, which are short enough to be in one sample each."""
    found: Counter[str] = Counter()
    for index in range(dataset.samples_per_epoch):
        sample = dataset.sample(epoch, index)
        for number in range(int(sample.documents.max()) + 1):
            found[bytes(t for t in sample.tokens[sample.documents == number].tolist() if t < 256).decode()] += 1
    return found


def words(folder: Path, name: str, count: int) -> dict[str, Any]:
    records = [{"text": f"{name}{number:05}"} for number in range(count)]
    return {"source": str(write_jsonl(folder / f"{name}.jsonl", records)), "format": "jsonl"}


def test_training_alone(tmp_path: Path) -> None:
    lines: list[str] = []
    data = opened(config([words(tmp_path, "a", 10)], packing=False), tmp_path / "cache", lines)
    assert data.evaluation is None
    assert texts(data.train) == Counter(f"a{number:05}" for number in range(10))
    assert lines[-1] == "data: training: 10 documents, 70 tokens, 10 samples of 16 tokens per epoch"


def test_the_count_of_documents_leaves_out_those_that_give_no_sample(tmp_path: Path) -> None:
    """The line before names two of three as too long to be learnt from."""
    records = [chat_record(("user", "x" * length), ("assistant", "y")) for length in (1, 40, 40)]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    lines: list[str] = []
    given = config([{"source": str(path), "format": "openai-chat"}], truncation="drop")
    data = opened(given, tmp_path / "cache", lines)
    assert data.train.samples_per_epoch == 1
    assert any("2 conversations are left out" in line for line in lines), lines
    assert any(line.startswith("data: training: 1 document, 6 tokens, 1 sample ") for line in lines), lines


@pytest.mark.parametrize(
    ("documents", "holdout", "words"),
    [
        (2, 0.01, r"evaluation.holdout 0.01 of 2 documents holds out 1 of them \(50%\).*set holdout to 0.5"),
        (5, 0.01, r"holds out 1 of them \(20%\)"),
    ],
)
def test_a_hold_out_of_far_more_than_was_asked_for_is_refused(
    tmp_path: Path, documents: int, holdout: float, words: str
) -> None:
    source = {"source": str(write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{n}"} for n in range(documents)]))}
    with pytest.raises(UserError, match=words):
        opened(
            config([source | {"format": "jsonl"}], packing=False, evaluation={"every": 1, "holdout": holdout}),
            tmp_path / "cache",
        )


def test_a_hold_out_of_more_than_was_asked_for_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{n}"} for n in range(20)])
    source = {"source": str(path), "format": "jsonl"}
    opened(config([source], packing=False, evaluation={"every": 1, "holdout": 0.01}), tmp_path / "cache", lines)
    assert (
        "data: warning: evaluation.holdout 0.01 of 20 documents holds out 1 of them (5%), "
        "for a document is held out whole"
    ) in lines


def test_the_hold_out_is_disjoint_and_the_same_for_any_files(tmp_path: Path) -> None:
    records = [{"text": f"w{number % 150}"} for number in range(200)]  # a third of them twice
    one = {"source": str(write_jsonl(tmp_path / "one.jsonl", records)), "format": "jsonl"}
    write_jsonl(tmp_path / "many" / "z.jsonl", records[120:])
    write_jsonl(tmp_path / "many" / "b.jsonl", records[:120])
    many = {"source": str(tmp_path / "many"), "format": "jsonl"}
    held = {"every": 1, "holdout": 0.2}
    data = opened(config([one], packing=False, evaluation=held), tmp_path / "cache")
    assert data.evaluation is not None
    train, evaluation = texts(data.train), texts(data.evaluation)
    assert train + evaluation == Counter(record["text"] for record in records)
    assert not train.keys() & evaluation.keys()
    assert evaluation
    again = opened(config([many], packing=False, evaluation=held), tmp_path / "cache")
    assert again.evaluation is not None
    assert texts(again.evaluation) == evaluation
    assert again.fingerprint == data.fingerprint
    for index in range(data.train.samples_per_epoch):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(data.train.sample(1, index)[:4], again.train.sample(1, index)[:4], strict=True)
        )


def test_the_fingerprint_follows_what_decides_the_samples(tmp_path: Path) -> None:
    a, b = words(tmp_path, "a", 5), words(tmp_path, "b", 5)

    def fingerprint(train: list[dict[str, Any]], **keys: Any) -> str:
        return opened(config(train, **keys), tmp_path / "cache").fingerprint

    different = [
        fingerprint([a]),
        fingerprint([b]),
        fingerprint([a, b]),
        fingerprint([a, {**b, "weight": 2.0}]),
        fingerprint([a], length=8),
        fingerprint([a], packing=False),
        fingerprint([a], evaluation={"every": 1, "holdout": 0.2}),
    ]
    assert len(set(different)) == len(different)
    shutil.copy(a["source"], tmp_path / "other.jsonl")
    assert fingerprint([{**a, "source": str(tmp_path / "other.jsonl")}]) == different[0]


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    sources = [{**words(tmp_path, "a", 30), "weight": 0.75}, {**words(tmp_path, "b", 20), "weight": 0.25}]
    train = opened(config(sources, packing=False), tmp_path / "cache").train
    assert train.samples_per_epoch == 79  # the first of which b gives 20: 79 - round(0.75 · 79)
    counts = Counter(word[0] for word in texts(train).elements())
    assert counts == {"a": 59, "b": 20}
    two = texts(train, 0) + texts(train, 1)
    assert {count for word, count in two.items() if word[0] == "a"} <= {3, 4}  # its own epochs go on


def test_evaluation_reads_every_sample_once(tmp_path: Path) -> None:
    lines: list[str] = []
    apart = [{**words(tmp_path, "b", 7), "weight": 9.0}, words(tmp_path, "c", 31)]
    given = config([words(tmp_path, "a", 10)], packing=False, evaluation={"every": 1, "data": apart})
    evaluation = opened(given, tmp_path / "cache", lines).evaluation
    assert evaluation is not None
    assert set(texts(evaluation).values()) == {1}
    assert len(texts(evaluation)) == evaluation.samples_per_epoch == 38
    assert not any("warning" in line for line in lines)


def test_sets_are_opened_by_name_and_know_the_source_of_a_sample(tmp_path: Path) -> None:
    b, c, d = words(tmp_path, "b", 7), {**words(tmp_path, "c", 31), "name": "sea"}, words(tmp_path, "d", 3)
    held = {"every": 1, "holdout": 0.1, "sets": {"two": {"data": [b, c]}, "one": {"data": [d]}}}
    data = opened(config([words(tmp_path, "a", 20)], packing=False, evaluation=held), tmp_path / "cache")
    assert data.evaluation is not None
    assert data.held_out == (data.evaluation, data.sets["two"], data.sets["one"])
    two = data.sets["two"]
    assert two.names == ("0", "sea")
    assert set(texts(data.sets["one"])) == {f"d{number:05}" for number in range(3)}
    for index in range(two.samples_per_epoch):
        letter = chr(two.sample(0, index).tokens[0])
        assert two.names[two.source_of(0, index)] == {"b": "0", "c": "sea"}[letter]
    alone = opened(
        config([words(tmp_path, "a", 20)], packing=False, evaluation={"every": 1, "holdout": 0.1}), tmp_path / "cache"
    )
    assert alone.fingerprint == data.fingerprint, "sets decide nothing of what is trained on"


def test_training_on_the_evaluation_data_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    a = words(tmp_path, "a", 10)
    opened(config([a], evaluation={"every": 1, "data": [a, words(tmp_path, "b", 3)]}), tmp_path / "cache", lines)
    (warning,) = [line for line in lines if "warning" in line and "evaluation" in line]
    assert "10 of 10 evaluation documents of" in warning


def test_a_source_that_is_held_out_whole_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    many = [words(tmp_path, f"s{number}-", 1) for number in range(12)]
    data = opened(config(many, packing=False, evaluation={"every": 1, "holdout": 0.5}), tmp_path / "cache", lines)
    assert data.evaluation is not None
    assert len([line for line in lines if "its weight has no effect" in line]) == data.evaluation.samples_per_epoch


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    source = {"source": str(write_texts(tmp_path / "in", ["all in one", "all in one"]))}
    with pytest.raises(UserError, match=r"same content \(a text file is one document\); add files, use format jsonl"):
        opened(config([source], evaluation={"every": 1, "holdout": 0.1}), tmp_path / "cache")


def test_chats_are_packed_whole(tmp_path: Path) -> None:
    records = [chat_record(("user", f"{number:04}"), ("assistant", "y" * (1 + number % 9))) for number in range(50)]
    source = {"source": str(write_jsonl(tmp_path / "c.jsonl", records)), "format": "openai-chat"}
    packed = opened(config([source], length=64), tmp_path / "cache").train
    apart = opened(config([source], length=64, packing=False), tmp_path / "cache").train
    assert apart.samples_per_epoch == 50
    assert packed.samples_per_epoch < 20
    for epoch in (0, 1):
        assert texts(packed, epoch) == texts(apart, epoch) == texts(apart, 7)


def test_samples_outside_of_an_epoch_are_refused(tmp_path: Path) -> None:
    train = opened(config([words(tmp_path, "a", 10)]), tmp_path / "cache").train
    for epoch, index in [(0, -1), (0, train.samples_per_epoch), (-1, 0)]:
        with pytest.raises(IndexError):
            train.sample(epoch, index)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    given = config([words(tmp_path, "a", 3)])
    with pytest.raises(UserError, match=r"has 307 tokens, the model only 260; choose a model with a larger vocabulary"):
        open_data(given, load_tokenizer(str(write_tokenizer(tmp_path / "t.json", ["</s>"]))), tmp_path, lambda _: None)


def test_samples_and_their_order_outlive_versions(tmp_path: Path) -> None:
    """Written down when this was made. Another result changes the data of resumed jobs: then raise ORDER_VERSION."""
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": text} for text in ("alpha", "beta", "gamma", "delta", "epsilon")]
    )
    source = {"source": str(path), "format": "jsonl"}
    train = opened(config([source], length=8), tmp_path / "cache").train
    read = [
        ["".join(chr(t) if t < 256 else "|" for t in train.sample(epoch, index).tokens) for index in range(4)]
        for epoch in (0, 1)
    ]
    assert read == ORDER


ORDER = [["alpha|ep", "silon|de", "lta|beta", "|gamma||"], ["alpha|ep", "silon|be", "ta|gamma", "|delta||"]]


def test_ranks_come_and_go_without_changing_a_token(tmp_path: Path) -> None:
    """Two mixed sources, attempts of 2, 1 and 3 ranks: together they train on what one rank would have."""
    sources = [{**words(tmp_path, "a", 40), "weight": 0.7}, {**words(tmp_path, "b", 9), "weight": 0.3}]
    train = opened(config(sources), tmp_path / "cache").train

    def tokens(loaders: list[RankLoader], steps: int) -> tuple[list[list[int]], DataCursor]:
        rows: list[list[int]] = []
        cursor = None
        for _ in range(steps):
            got = [loader.next() for loader in loaders]
            for micro in zip(*(batch.micro for batch in got), strict=True):
                rows += [row for part in micro for row in part.tokens.tolist()]
            cursor = got[0].cursor
        for loader in loaders:
            loader.close()
        assert cursor is not None
        return rows, cursor

    start = cursor = DataCursor(seed=7, epoch=0, sample=0)
    pieced: list[list[int]] = []
    for ranks, micro_batch in ((2, 1), (1, 3), (3, 2)):
        loaders = [
            RankLoader(train, cursor, 6, micro_batch, DataParallel(ranks, (rank,)), "cpu") for rank in range(ranks)
        ]
        rows, cursor = tokens(loaders, 4)
        pieced += rows
    whole, end = tokens([RankLoader(train, start, 6, 6, DataParallel(1, (0,)), "cpu")], 12)
    assert pieced == whole
    assert cursor == end
    assert end.epoch > 0
