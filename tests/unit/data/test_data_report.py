"""`muster data` says what a model will see: the counts, what is left out with its place, and the samples themselves."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.making import CHATML, chat_record, config, opened, write_jsonl, write_texts, write_tokenizer

from muster.trainer.data import load_tokenizer
from muster.trainer.data.rendering import render
from muster.trainer.data.report import data_report
from muster.trainer.train import data_report as keeping
from muster.trainer.train.inspection import main
from muster.words.base import dump
from muster.words.data_report import DATA_REPORT_KEY, DataReport, report_lines
from muster.words.names import ExitCode
from muster.words.shown_samples import lines


def chats(count: int) -> list[dict[str, Any]]:
    return [chat_record(("user", f"what is {n}+1"), ("assistant", f"it is {n + 1}")) for n in range(count)]


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    told = capsys.readouterr()
    return json.loads(told.out if code == 0 else told.err.splitlines()[-1])


def test_documents_that_are_there_more_than_once_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.trainer.data.report.AT_ONCE", 3)
    texts = [{"text": f"document {n}"} for n in (*range(7), 3, 3, 5)]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    held = {"every": 1, "data": [{"source": str(write_jsonl(tmp_path / "held.jsonl", [{"text": "another"}]))}]}
    report = data_report(
        opened(config([{"source": str(source)}], 32, held), tmp_path / "cache"), load_tokenizer("bytes")
    )
    assert [each.duplicates for each in report.sources] == [3, 0]
    shown = report_lines(report)
    assert "  3 documents (30.0%) have the content of another: curation.exactDuplicates" in shown
    assert sum("content of another" in line for line in shown) == 1


def test_what_the_report_quotes_of_the_data_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = "\x1b[2J\x9b31m \u202e"
    silent = chat_record(("user", f"{orders} and a question that is longer than a sample"), ("assistant", "no"))
    path = write_jsonl(tmp_path / "in.jsonl", [*chats(2), silent | {f"note{orders}": "x"}])
    asked = [str(path), "--sequence-length", "32"]
    assert main([*asked, "--no-color"]) == 0
    printed = capsys.readouterr()
    assert r"    <|user|>\x1b[2J\x9b31m \u202e and a question" in printed.out, (
        "how the document that is left out begins"
    )
    assert r"columns that are not read: note\x1b[2J\x9b31m \u202e" in printed.err
    assert not set(printed.out + printed.err) & set(orders[0] + "\x9b\u202e")


def test_every_source_is_counted_and_what_is_left_out_has_a_reason(tmp_path: Path) -> None:
    silent = chat_record(("user", "a question that is longer than a sample of tokens"), ("assistant", "no"))
    long = chat_record(("user", "hi"), ("assistant", "an answer that is longer than a sample of tokens"))
    train = write_jsonl(tmp_path / "train.jsonl", [*chats(10), silent, long])
    held = write_jsonl(tmp_path / "held.jsonl", chats(2))
    given = config(
        [{"source": str(train), "format": "openai-chat"}],
        32,
        {"every": 1, "data": [{"source": str(held)}]},
        packing=False,
    )
    report = data_report(opened(given, tmp_path / "cache"), load_tokenizer("bytes"))
    first, second = report.sources
    sizes = [len(f"what is {n}+1it is {n + 1}") + 4 for n in range(10)]  # with the marks of two turns
    assert (first.use, first.format, first.documents) == ("training", "openai-chat", 12)
    assert (first.truncated, first.samples) == (1, 11)
    assert first.filled == pytest.approx((sum(sizes) + 32) / (11 * 32))
    assert [(lost.reason, lost.documents) for lost in first.left_out] == [
        ("the assistant does not speak within their first 32 tokens", 1)
    ]
    assert first.left_out[0].examples[0].startswith("<|user|>a question that is longer")
    assert sum(each.documents for each in first.lengths) == 12
    assert [(each.first, each.last, each.documents) for each in first.lengths] == [(16, 31, 10), (32, 63, 2)]
    assert (second.use, second.documents, second.samples) == ("evaluation", 2, 2)
    assert any("2 of 2 evaluation documents" in warning for warning in report.warnings), "they are in the training set"
    shown = "\n".join(report_lines(report))
    assert "1 document (8.3%) is longer than a sample and is truncated" in shown
    assert DataReport.model_validate_json(report.model_dump_json(by_alias=True)) == report


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_sample_is_shown_with_the_loss_on_the_assistants_words_alone(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(write_tokenizer(tmp_path / "t.json", CHATML)))
    train = write_jsonl(tmp_path / "train.jsonl", chats(6))
    spec = "bytes" if kind == "bytes" else str(tmp_path / "t.json")
    given = config([{"source": str(train), "format": "openai-chat"}], 256, tokenizer=spec)
    architecture = {
        "dim": 16,
        "layers": 1,
        "heads": 1,
        "kvHeads": 1,
        "ffnDim": 16,
        "vocabSize": 400,
        "maxPositions": 256,
    }
    given = given.model_copy(update={"model": type(given.model).model_validate({"architecture": architecture})})
    data = opened(given, tmp_path / "cache")
    shown = [render(data.train.sample(0, index), tokenizer) for index in range(data.train.samples_per_epoch)]
    learnt = {part.text for sample in shown for part in sample.stretches if part.learnt}
    end = "<|end|>" if kind == "bytes" else "<|im_end|>"
    assert learnt == {f"it is {n + 1}{end}" for n in range(6)}
    read = "".join(part.text for sample in shown for part in sample.stretches if not part.learnt)
    assert all(f"what is {n}+1" in read for n in range(6))
    assert sum(sample.tokens + sample.padding for sample in shown) == 256 * len(shown)


def test_samples_are_plain_or_coloured_and_never_speak_to_the_terminal(tmp_path: Path) -> None:
    record = chat_record(("user", "clear \x1b[2J it"), ("assistant", "no"))
    train = write_jsonl(tmp_path / "train.jsonl", [record])
    data = opened(config([{"source": str(train), "format": "openai-chat"}], 64), tmp_path / "cache")
    shown = render(data.train.sample(0, 0), load_tokenizer("bytes"))
    assert "clear \\x1b[2J it<|end|><|assistant|>⟦no<|end|>⟧" in lines(shown, colour=False)
    assert "\x1b[32mno<|end|>\x1b[0m" in lines(shown, colour=True)
    assert "\x1b[2J" not in lines(shown, colour=True)


def test_all_faults_are_told_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, stranger = chat_record(("user", "a"), ("assistant", "")), chat_record(("bot", "a"))
    path = write_jsonl(tmp_path / "bad.jsonl", [*chats(1), empty, stranger])
    with path.open("a") as file:
        file.write("{oops\n" + json.dumps(stranger) + "\n")
    told = inspected(capsys, str(path), code=ExitCode.USER_ERROR)["error"]
    assert told.startswith("4 faults:\n")
    for line, words in ((2, "empty assistant turn"), (3, "is 'bot'"), (4, "is not valid JSON"), (5, "is 'bot'")):
        assert any(f"{path}, line {line}: " in each and words in each for each in told.splitlines())


def test_a_job_is_inspected_with_the_tokenizer_and_template_that_it_will_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cache"))
    train = write_jsonl(tmp_path / "train.jsonl", chats(3))
    given = config([{"source": str(train), "format": "openai-chat"}], 64)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(dump(given))))
    told = inspected(capsys, "--job", "--samples", "1")
    assert told["sources"][0]["documents"] == 3
    assert told["samplesPerStep"] == 8
    assert any("every step sees some of them again" in warning for warning in told["warnings"])
    assert [part["learnt"] for part in told["samples"][0]["stretches"]][:2] == [False, True]
    assert list((tmp_path / "cache" / "tokens").iterdir()), "the job finds it prepared"
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"task": "sft"})))
    assert "training.model" in inspected(capsys, "--job", code=ExitCode.USER_ERROR)["error"]


def test_pairs_are_shown_side_by_side_and_those_that_teach_nothing_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "q", "chosen": "yes", "rejected": "no"}, {"prompt": "q", "chosen": "x", "rejected": "x"}]
    path = write_jsonl(tmp_path / "pairs.jsonl", records)
    told = inspected(capsys, str(path), "--sequence-length", "64", "--samples", "1")
    (source,) = told["sources"]
    assert source["leftOut"] == [
        {"reason": "chosen and rejected are equal", "documents": 1, "examples": [f"{path}, line 2"]}
    ]
    assert told["samples"][0]["compares"] == ["chosen", "rejected"]
    learnt = [part["text"] for part in told["samples"][0]["stretches"] if part["learnt"]]
    assert learnt == ["yes<|eos|>", "no<|eos|>"]


def test_a_bare_file_takes_a_tokenizer_and_says_what_it_cant_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_texts(tmp_path / "texts", ["the quick brown fox " * 40])
    tokenizer = write_tokenizer(tmp_path / "t.json", CHATML)
    told = inspected(capsys, str(folder), "--tokenizer", str(tokenizer), "--sequence-length", "64")
    assert told["sources"][0]["format"] == "text"
    assert told["sources"][0]["tokens"] < 800, "BPE and not bytes"
    assert "does not exist" in inspected(capsys, str(tmp_path / "no"), code=ExitCode.USER_ERROR)["error"]
    assert "give --job or an address" in inspected(capsys, code=ExitCode.USER_ERROR)["error"]


def test_the_report_is_kept_with_the_job_and_a_store_that_fails_is_only_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = opened(config([{"source": str(write_texts(tmp_path / "t", ["a text"]))}]), tmp_path / "cache")
    keeping.keep_report(str(tmp_path / "job"), data, load_tokenizer("bytes"))
    kept = DataReport.model_validate_json((tmp_path / "job" / DATA_REPORT_KEY).read_text())
    (shown,) = kept.shown
    assert kept == data_report(data, load_tokenizer("bytes")).model_copy(update={"shown": (shown,)})
    assert [(part.text, part.learnt) for part in shown.stretches] == [("a", False), (" text<|eos|>", True)]
    (tmp_path / "file").write_text("")
    keeping.keep_report(str(tmp_path / "file" / "job"), data, load_tokenizer("bytes"))
    assert "could not be kept" in capsys.readouterr().err


def test_what_a_file_shares_with_held_out_data_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole documents, and stretches of 13 words in others, without a job."""
    story = " ".join(f"word{n}" for n in range(30))
    said = [chat_record(("user", "tell"), ("assistant", text)) for text in ("one", "two", f"once {story} more")]
    train = write_jsonl(tmp_path / "train.jsonl", said)
    held = write_jsonl(tmp_path / "held.jsonl", [said[0], chat_record(("user", "well?"), ("assistant", story))])
    told = inspected(capsys, str(train), "--evaluation", str(held))
    training, evaluation = told["sources"]
    assert (evaluation["use"], evaluation["source"], evaluation["documents"]) == ("evaluation", str(held), 2)
    (leak,) = training["leftOut"]
    assert (leak["documents"], "evaluation" in leak["reason"]) == (1, True), leak
    assert f"{train}, line 3" in leak["examples"][0]
    assert any("1 of 2 evaluation documents" in warning for warning in told["warnings"])
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}])
    assert inspected(capsys, str(pairs), "--evaluation", str(pairs), "--sequence-length", "64")["warnings"]
    refused = inspected(capsys, str(train), "--evaluation", str(pairs), code=ExitCode.USER_ERROR)["error"]
    assert f"--evaluation {pairs} is preference, and {train} is for task sft" in refused
