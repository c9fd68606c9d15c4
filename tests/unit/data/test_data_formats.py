"""Every format in every container is the same documents, the format is found by looking, and what is wrong is named."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.unit.data.making import config, contents, opened, stored, write_jsonl

from muster.recipe.data_config import Source
from muster.recipe.data_formats import FORMATS, looks_like
from muster.recipe.training import TrainingConfig
from muster.storage import records, sources
from muster.storage.conversations import conversation
from muster.storage.data_format import of_known_format
from muster.storage.data_shape import examine, look_at
from muster.storage.records import read_records
from muster.trainer.data import prepare
from muster.trainer.errors import UserError
from muster.words.base import parse

CHAT = [
    {"messages": [{"role": "user", "content": f"question {n}, «é»"}, {"role": "assistant", "content": f"answer\n{n}"}]}
    for n in range(5)
]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "jsonl": [{"text": f'text, "{n}"\nof two lines é'} for n in range(5)],
    "openai-chat": CHAT,
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": f"b{n}"}]} for n in range(5)
    ],
    "alpaca": [{"instruction": "add", "input": f"{n} and 1", "output": f"{n + 1}"} for n in range(5)],
    "prompt-completion": [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(5)],
    "preference": [
        {"prompt": f"{n}+1=", "chosen": f" {n + 1}", "rejected": f" {n}", "margin": n / 2} for n in range(5)
    ],
    "unpaired-preference": [
        {"prompt": f"{n}+1=", "completion": f" {n + n % 2}", "label": bool(n % 2)} for n in range(5)
    ],
}
ASKED = [{"role": "user", "content": "1+1="}]


def answer(words: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": words}]


# Of the same formats, by lists of messages.
OF_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "prompt-completion": [{"prompt": ASKED, "completion": answer(f"{n}")} for n in range(5)],
    "preference": [
        {"prompt": ASKED, "chosen": answer(f"two {n}"), "rejected": answer(f"{n}"), "margin": n} for n in range(5)
    ],
    "unpaired-preference": [{"prompt": ASKED, "completion": answer(f"{n}"), "label": n == 2} for n in range(5)],
}


def as_array(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(found, indent=2))


def as_csv(path: Path, found: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in one.items()} for one in found
        )


def as_gzip(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in found).encode()))


def as_zstd(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_bytes(zstd("".join(json.dumps(one) + "\n" for one in found).encode()))


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def as_parquet(path: Path, found: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(found), path, row_group_size=2)


def as_arrow(path: Path, found: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(found)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


CONTAINERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.json": as_array,
    "a.csv": as_csv,
    "a.jsonl.gz": as_gzip,
    "a.jsonl.zst": as_zstd,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
}


@pytest.mark.parametrize(
    ("format", "found"),
    [*RECORDS.items(), *OF_MESSAGES.items()],
    ids=[*RECORDS, *(f"{name}-of-messages" for name in OF_MESSAGES)],
)
def test_every_container_holds_the_same_documents(tmp_path: Path, format: str, found: list[dict[str, Any]]) -> None:
    """And `auto` finds the format of each by looking."""
    lines = write_jsonl(tmp_path / "lines.jsonl", found)
    expected = stored(lines, tmp_path / "cache", format=format)
    assert expected.meta.documents == 5
    for name, write in CONTAINERS.items():
        write(tmp_path / name, found)
        made = stored(tmp_path / name, tmp_path / name[2:])
        assert made.meta.contents == expected.meta.contents, name
        assert made.meta.kinds == expected.meta.kinds, name
        assert made.tokens.tolist() == expected.tokens.tolist(), name
        assert (made.loss_mask is None) == (expected.loss_mask is None)
        if made.loss_mask is not None and expected.loss_mask is not None:
            assert made.loss_mask.tolist() == expected.loss_mask.tolist()


def test_columns_have_other_names(tmp_path: Path) -> None:
    theirs = write_jsonl(
        tmp_path / "theirs.jsonl",
        [{"q": one["prompt"], "a": one["completion"]} for one in RECORDS["prompt-completion"]],
    )
    ours = write_jsonl(tmp_path / "ours.jsonl", RECORDS["prompt-completion"])
    columns = parse(Source, {"source": "x", "columns": {"prompt": "q", "completion": "a"}}).columns
    made = stored(theirs, tmp_path / "cache", columns=columns)
    assert made.meta.contents == stored(ours, tmp_path / "cache").meta.contents
    with pytest.raises(UserError, match=r"line 1: has no column 'q' \(its columns: completion, prompt\); change the"):
        stored(ours, tmp_path / "cache", columns=columns)


def test_tool_calls_and_names_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    read = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add"}}
    messages = [
        {"role": "user", "content": "?", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "two"},
    ]
    found = conversation({"messages": messages, "tools": json.dumps([tool])}, "openai-chat")
    assert found.tools == (tool,)
    assert found.turns == (
        ("user", "?", False, {"name": "ada"}),
        ("assistant", "", True, {"tool_calls": [call]}),  # the arguments as they stand
        ("tool", "2", False, {"tool_call_id": "1"}),
        ("assistant", "two", True, {}),
    )
    of_objects = conversation({"messages": [*messages[:1], {**messages[1], "tool_calls": [read]}]}, "openai-chat")
    assert of_objects.hash() == conversation({"messages": messages[:2]}, "openai-chat").hash()
    shared = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    again = conversation({"conversations": shared, "tools": [tool]}, "sharegpt")
    assert [turn.role for turn in again.turns] == [turn.role for turn in found.turns]
    assert again.turns[1].more["tool_calls"][0]["function"] == read["function"]


def test_the_older_functions_column_is_the_tools() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
    ]
    found = conversation({"messages": messages, "functions": [function]}, "openai-chat")
    tools = [{"type": "function", "function": function}]
    assert found == conversation({"messages": messages, "tools": tools}, "openai-chat")
    assert found.tools == tuple(tools)
    for wrong, words in (
        ({"functions": [{"x": 1}]}, r"functions\[0\] is not"),
        ({"functions": [function], "tools": tools}, "two forms of one thing"),
    ):
        with pytest.raises(ValueError, match=words):
            conversation({"messages": messages, **wrong}, "openai-chat")


@pytest.mark.parametrize(
    ("train_on", "scored"),
    [("assistant", "1010101"), ("last", "0000001"), ("completion", "0000101"), ("all", "1010101")],
)
def test_what_of_a_conversation_is_learnt(train_on: str, scored: str) -> None:
    roles = ["assistant", "user", "assistant", "user", "assistant", "tool", "assistant"]
    found = conversation({"messages": [{"role": role, "content": "x"} for role in roles]}, "openai-chat", train_on)
    assert "".join(str(int(turn.loss_mask)) for turn in found.turns) == scored
    assert found.whole == (train_on == "all")


def test_files_that_lie_beside_a_data_set_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    (folder / "data").mkdir(parents=True)
    as_parquet(folder / "data" / "train-00000.parquet", CHAT)
    (folder / "README.md").write_text("# A data set")
    (folder / "dataset_info.json").write_text("{}")
    assert stored(folder, tmp_path / "cache").meta.documents == 5
    assert stored(folder, tmp_path / "cache", format="openai-chat").meta.documents == 5


def test_a_data_set_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(CHAT).save_to_disk(tmp_path / "saved", num_shards=2)
    lines = write_jsonl(tmp_path / "lines.jsonl", CHAT)
    expected = stored(lines, tmp_path / "cache")
    for format in ("auto", "openai-chat"):
        made = stored(tmp_path / "saved", tmp_path / format, format=format)
        assert (made.meta.contents, made.tokens.tolist()) == (expected.meta.contents, expected.tokens.tolist())
    (path,) = (tmp_path / "saved").glob("data-00001-*.arrow")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow: is not a stream of Arrow that can be read"):
        stored(tmp_path / "saved", tmp_path / "cut")


@pytest.mark.parametrize("format", ["auto", "openai-chat"])
def test_parts_of_a_data_set_are_not_learnt_from_together(tmp_path: Path, format: str) -> None:
    published = tmp_path / "published"
    (published / "data").mkdir(parents=True)
    as_parquet(published / "data" / "train-00000-of-00001.parquet", CHAT)
    as_parquet(published / "data" / "test-00000-of-00001-0abc.parquet", CHAT[:2])
    named = rf"\(test, train\), .*; name one of them: {published}/data/train\* or {published}/data/test\*$"
    with pytest.raises(UserError, match=named):
        stored(published, tmp_path / "cache", format=format)
    assert stored(f"{published}/data/train*", tmp_path / "cache", format=format).meta.documents == 5
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(CHAT) for name in ("train", "validation")})
    both.save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"name one of them: .*/saved/validation or .*/saved/train$"):
        stored(tmp_path / "saved", tmp_path / "cache", format=format)
    assert stored(tmp_path / "saved" / "train", tmp_path / "cache", format=format).meta.documents == 5


def test_files_that_are_called_otherwise_are_of_no_part(tmp_path: Path) -> None:
    for name in ("test-taking.jsonl", "training-plans.jsonl", "evals.jsonl", "train.jsonl"):
        write_jsonl(tmp_path / name, CHAT)
    assert stored(tmp_path, tmp_path / "cache").meta.documents == 20


def test_text_and_records_side_by_side_are_not_guessed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS["jsonl"])
    (tmp_path / "b.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"holds records \(.*a\.jsonl\) and other files \(.*b\.py\); name the source's"):
        stored(tmp_path, tmp_path / "cache")
    assert stored(tmp_path, tmp_path / "cache", format="text").meta.documents == 2


def test_columns_that_no_format_has_are_listed(tmp_path: Path) -> None:
    as_parquet(tmp_path / "a.parquet", [{"review": "good", "stars": 5}])
    with pytest.raises(UserError, match=r"row 1: has columns that no format has: review, stars\. Say which they are"):
        stored(tmp_path / "a.parquet", tmp_path / "cache")
    with pytest.raises(UserError, match=r"row 1: has no field 'text' \(its fields: review, stars\)"):
        stored(tmp_path / "a.parquet", tmp_path / "cache", format="jsonl")


def test_a_format_that_is_not_the_tasks_is_refused_when_it_is_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS["sharegpt"])
    lines: list[str] = []
    with pytest.raises(
        UserError, match="format sharegpt is not for task pretrain, which reads text, jsonl, and its files"
    ):
        opened(config([{"source": str(path)}]), tmp_path / "cache")
    with pytest.raises(ValueError, match="format jsonl is not for task sft, which reads openai-chat, sharegpt"):
        config([{"source": "a", "format": "openai-chat"}, {"source": "b", "format": "jsonl"}])
    opened(sft(path), tmp_path / "cache", lines)
    assert any(f"{path} is in format sharegpt, as its files look" in line for line in lines)


def sft(path: Path, **keys: Any) -> TrainingConfig:
    document = {
        "task": "sft",
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": str(path), **keys}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 1},
    }
    return parse(TrainingConfig, document)


def test_the_plan_confirms_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    as_parquet(path, RECORDS["sharegpt"])
    shape = look_at(sft(path))
    assert shape is not None
    assert (shape.formats, shape.documents) == (("sharegpt",), 5)
    wrong = sft(path).model_copy(update={"task": "pretrain"})
    ((where, words),) = examine(wrong).faults
    assert where == "data.train[0].format"
    assert "format sharegpt is not for task pretrain" in words


def test_a_look_does_not_follow_a_loop_of_links(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", RECORDS["jsonl"])
    (tmp_path / "in" / "up").symlink_to(tmp_path / "in")
    for where in (tmp_path / "in", tmp_path / "in" / "**"):
        data = {"train": [{"source": str(where), "format": "jsonl"}], "sequenceLength": 64}
        shape = look_at(sft(where).model_copy(update={"task": "pretrain", "data": parse(type(sft(where).data), data)}))
        assert shape is not None
        assert shape.documents == 5


DAMAGED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a .gz that ends early": (
        "a.jsonl.gz",
        lambda: gzip.compress(b'{"text": "x"}\n' * 9)[:-9],
        "not a whole gzip file",
    ),
    "a .zst that ends early": ("a.jsonl.zst", lambda: zstd(b'{"text": "x"}\n' * 9)[:-3], "not a whole zstd file"),
    "a .zst that is none": ("a.jsonl.zst", lambda: b"PK" * 9, "not a whole zstd file"),
    "mixed encodings": (
        "a.json",
        lambda: '[{"text": "é"}, {"text": "'.encode() + b'\xe9"}]',
        r"is not UTF-8 text: .* at byte 27",
    ),
    "mixed encodings in CSV": ("a.csv", lambda: b"text\nok\ncaf\xe9\n", "line 3: is not UTF-8 text"),
    "an array that ends early": (
        "a.json",
        lambda: b'[{"text": "x"}, {"text": ',
        r"element 2: is not valid JSON: .*the file ends early",
    ),
    "an array without end": (
        "a.json",
        lambda: b'[{"text": "x"}',
        r"element 2: is not valid JSON: a comma or \] should .*ends early",
    ),
    "an array of texts": ("a.json", lambda: b'["x"]', "element 1: is no object"),
    "two arrays": ("a.json", lambda: b'[{"text": "x"}] []', "something follows the end of the array"),
    "one object over many lines": ("a.json", lambda: b'{\n"text": "x"\n}', "one object over many lines: write one"),
    "a row that is too long": (
        "a.csv",
        lambda: b"text,n\na,1\nb,c,2\n",
        "line 3: has 3 fields, but the header names 2",
    ),
    "a CSV without header": ("a.csv", lambda: b"x,x\n1,2\n", "line 1: is no header"),
    "an open quote": ("a.csv", lambda: b'text\n"a\n', "is not valid CSV"),
    "a Parquet file that is none": ("a.parquet", lambda: b"PAR1 and no more", "is not a Parquet file that can be read"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, fault: str) -> None:
    name, data, message = DAMAGED[fault]
    (tmp_path / name).write_bytes(data())
    with pytest.raises(UserError, match=rf"{name}.*{message}"):
        stored(tmp_path / name, tmp_path / "cache", format="jsonl")


def test_an_element_that_is_longer_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 16)
    texts = ["é" * 100, "short", '[{]}"\\' * 20]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert sorted(contents(stored(tmp_path / "a.json", tmp_path / "cache"))) == sorted(text.encode() for text in texts)
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 64)
    with pytest.raises(UserError, match="element 1: is longer than 0 MiB, or not valid JSON"):
        stored(tmp_path / "a.json", tmp_path / "other")


def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    as_parquet(path, RECORDS["jsonl"])
    read = records._rows_of_parquet

    def rewritten(file: sources.SourceFile) -> Iterator[records.Record]:
        yield from read(file)
        as_parquet(path, RECORDS["jsonl"][:2])

    monkeypatch.setattr(records, "_rows_of_parquet", rewritten)
    with pytest.raises(UserError, match="changed while it was being read"):
        stored(path, tmp_path / "cache", format="jsonl")


def test_what_a_table_lacks_in_a_row_is_not_there(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]}]
    as_parquet(tmp_path / "a.parquet", rows)
    (file,) = sources.find(str(tmp_path / "a.parquet"), "auto")
    assert [record.value for record in read_records(file, {})] == rows


def test_times_that_python_can_not_hold_are_text_and_need_no_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nanoseconds, the year 10000 and time zones, in columns that nobody reads and within messages."""
    monkeypatch.setitem(sys.modules, "pandas", None)  # an import of it fails
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("ns"))])
    turns = [{"role": "user", "content": "a", "at": 1}, {"role": "assistant", "content": "b", "at": None}]
    oslo = pa.timestamp("ns", "Europe/Oslo")
    table = pa.table(
        {
            "messages": pa.array([turns], pa.list_(turn)),
            "nanoseconds": pa.array([1], oslo),
            "late": pa.array([2932897], pa.date32()),
            "later": pa.array([253402300800], pa.timestamp("s")),
            "lasted": pa.array([1], pa.duration("ns")),
            "by name": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.time64("ns"))),
            "some": pa.array([[1]], pa.large_list(oslo)),
            "one": pa.array([[1]], pa.list_(pa.timestamp("ns"), 1)),
            "often": pa.array([1], pa.timestamp("ns")).dictionary_encode(),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        (file,) = sources.find(str(tmp_path / name), "auto")
        (record,) = read_records(file, {})
        one = "1970-01-01 00:00:00.000000001"
        assert record.value["messages"][0] == {"role": "user", "content": "a", "at": one}
        assert record.value["nanoseconds"] == record.value["often"] == one
        assert record.value["some"] == record.value["one"] == [one]
        assert record.value["late"] == "10000-01-01"
        assert record.value["by name"] == [("a", "00:00:00.000000001")]
        assert conversation(record.value, "openai-chat").turns[1].content == "b"


def test_reading_stops_where_it_is_told_to(tmp_path: Path) -> None:
    """Looking at the first record of a large file reads a block of it, not all."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 100 + b'"}\n' * 100_000)
    seen: list[int] = []
    (file,) = sources.find(str(path), "auto")
    reading = read_records(file, {}, lambda block: seen.append(len(block)))
    next(reading)
    reading.close()
    assert sum(seen) <= sources.BLOCK_BYTES


def test_a_line_of_two_gigabytes_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """And so is an element of an array. The file is sparse: it takes no disk."""
    script = (
        "import sys; from muster.storage import records, sources\n"
        "(file,) = sources.find(sys.argv[1], 'auto')\n"
        "try: list(records.read_records(file, {}))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        # Not ru_maxrss, which begins with what the parent had when it made this process.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    for name, start in (("a.jsonl", b'{"text": "'), ("a.json", b'[{"text": "'), ("a.csv", b'text\n"')):
        path = tmp_path / name
        with open(path, "wb") as made:
            made.write(start)
            made.truncate(2 << 30)
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        error, memory = done.stdout.strip().splitlines()
        assert error.startswith("UserError")
        assert "64 MiB" in error
        assert int(memory) < 700 << 10, f"{name}: {memory} KiB"


def test_every_format_is_some_tasks(tmp_path: Path) -> None:
    for format, found in RECORDS.items():
        assert looks_like(found[0]) == format
        assert any(format in formats for formats in FORMATS.values())
    assert looks_like(["x"]) is looks_like({"x": 1}) is None
    assert of_known_format(Source(source="builtin://python-stdlib"), ())[0].format == "text"
    assert prepare.with_formats(sft(tmp_path, format="alpaca"), lambda line: None) == sft(tmp_path, format="alpaca")
