"""YAML 1.2 scalars, the place of every fault, and nothing that multiplies itself."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muster.documents.document import DEPTH_MAX, VALUES_MAX, DocumentError, TextPlace
from muster.documents.reader import read
from muster.documents.yaml_text import read_yaml, write_yaml
from muster.words.base import DocumentProblem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e3", -1500.0),
        ("+5", 5),
        ("0", 0),
        ("0o10", 8),
        ("0x1F", 31),
        ("off", "off"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-11-20", "2026-11-20"),
        ("2026-13-45", "2026-13-45"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", "1"),
        ("! 1", "1"),
        ("!!float 1", 1.0),
        ("!!map {b: 1}", {"b": 1}),
        ("=", "="),
        ("900Gi", "900Gi"),
        ("10m", "10m"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read_yaml(f"value: {text}\n").data["value"]
    assert (type(found), found) == (type(value), value)


def test_keys_are_text_by_the_same_rules() -> None:
    assert read_yaml("{on: 1, '1': 2, \"true\": 3, '': 4}").data == {"on": 1, "1": 2, "true": 3, "": 4}


def test_merge_keys_and_aliases() -> None:
    text = "base: &b {a: 1, b: 2}\nmine: {<<: *b, b: 3}\nboth: {<<: [{a: 5}, *b]}\n"
    assert read_yaml(text).data == {
        "base": {"a": 1, "b": 2},
        "mine": {"a": 1, "b": 3},
        "both": {"a": 5, "b": 2},
    }


def test_an_alias_is_a_copy() -> None:
    data = read_yaml("a: &x {k: [1]}\nb: *x\n").data
    data["b"]["k"].append(2)
    assert data == {"a": {"k": [1]}, "b": {"k": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("spec:\n  a: 1\n  b: [1, 2\n  c: 3\n", 4, 4, "did not find expected ',' or ']'"),
        ("spec:\n\ta: 1\n", 2, 1, "found character that cannot start any token"),
        ("a: 1\nb: 2\na: 3\n", 3, 1, "the key 'a' stands here and in line 1"),
        ("x:\n  a: 1\n  'a': 1\n", 3, 3, "the key 'a' stands here and in line 2"),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  <<: *x\n", 4, 3, "the key '<<' stands here and in line 3"),
        ("a: 1\n---\nb: 2\n", 2, 1, "a second document starts here"),
        ("a: .inf\n", 1, 4, ".inf is not a number"),
        ("a: 1e999\n", 1, 4, "1e999 is not a number"),
        ("a: 9223372036854775808\n", 1, 4, "9223372036854775808 is a whole number of more than 64 bits"),
        (f"a: {'9' * 401}\n", 1, 4, "is too long for a number"),
        ("a: 010\n", 1, 4, "010 is octal to some readers: write 10, or quote it as text"),
        ("a: -08\n", 1, 4, "-08 is octal to some readers"),
        ("a: !!python/object:os.system x\n", 1, 4, "!!python/object:os.system x has no meaning"),
        ("a: !!set {b}\n", 1, 4, "!!set has no meaning"),
        ("a: !mine x\n", 1, 4, "!mine x has no meaning"),
        ("a: !!int 1.5\n", 1, 4, "!!int 1.5 has no meaning"),
        ("[a]: 1\n", 1, 1, "a key must be text"),
        ("1: x\n", 1, 1, "the key 1 must be text; put it in quotes"),
        ("~: x\n", 1, 1, "the key ~ must be text"),
        ("a: &x [*x]\n", 1, 8, "an alias contains itself"),
        ("a: *nowhere\n", 1, 4, "found undefined alias 'nowhere'"),
        (f"{'k' * 401}: 1\n", 1, 1, "a key may have 400 characters, not 401"),
        ("a: {<<: 3}\n", 1, 9, "<< merges mappings only"),
        ('a: "\\0"\n', 1, 4, "a text with a NUL character"),
        ("a: " + "[" * DEPTH_MAX, 1, 3 + DEPTH_MAX, f"is nested deeper than {DEPTH_MAX} levels"),
    ],
)
def test_faults_are_named_with_their_place(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(DocumentError) as raised:
        read_yaml(text)
    assert raised.value.message.startswith(message)
    assert raised.value.place == TextPlace(line, column)
    assert raised.value.excerpt == (text.splitlines()[line - 1] if line <= text.count("\n") else raised.value.excerpt)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"a: \xe9", r"not UTF-8 text \(byte 3\)"),
        (b"a: \x01", r"a character that YAML does not allow: U\+0001"),
        (b"a: " + b"x" * 1_000_000, "larger than 1,000,000 bytes"),
        (b"%TAG !a! b\n" * 101 + b"---\na: 1\n", "more than 100 lines that start with %"),
    ],
)
def test_what_has_no_place(raw: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as raised:
        read(raw, "yaml")
    assert raised.value.place is None


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n...\n", "\ufeff"])
def test_an_empty_document_holds_nothing(text: str) -> None:
    assert read(text.encode(), "yaml").data is None


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
)
MERGES = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(700)) + "}\nb:\n" + "- {<<: *a}\n" * 2_500
NESTED_MERGES = "a0: &a0 {k: 1}\n" + "\n".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}" for n in range(1, 100)
)
BOMBS = {
    "a billion laughs": LAUGHS,
    "merge keys": MERGES,
    "merge keys of merge keys": NESTED_MERGES,
    "many small values": "[" + "1," * VALUES_MAX + "1]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_built(name: str) -> None:
    with pytest.raises(DocumentError, match=f"holds more than {VALUES_MAX:,} values"):
        read_yaml(BOMBS[name])


def test_depth_is_counted_through_aliases() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, DEPTH_MAX)]
    with pytest.raises(DocumentError, match="is nested deeper than") as raised:
        read_yaml("\n".join(lines))
    assert raised.value.place == TextPlace(DEPTH_MAX - 1, len(f"a{DEPTH_MAX - 2}: &a{DEPTH_MAX - 2} [") + 1)
    assert read_yaml("\n".join(lines[: DEPTH_MAX - 2])).data["a0"] == ["x"]


DOCUMENT = """\
base: &base
  key: 1
spec:
  training:
    data:
      train:
        - source: x
          formt: text
  merged:
    <<: *base
    other: 2
  alias: *base
metadata:
  labels: {kueue.x-k8s.io/queue-name: a, kueue: b}
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("spec.training.data.train[0].formt", (8, 11)),
        ("spec.training.data.train[0]", (7, 11)),
        ("spec.training.data.train[7].source", (6, 7)),
        ("spec.training.batch", (4, 3)),
        ("spec.merged.key", (2, 3)),
        ("spec.merged.other", (11, 5)),
        ("spec.alias.key", (2, 3)),
        ("metadata.labels.kueue.x-k8s.io/queue-name", (14, 12)),
        ("metadata.labels.kueue", (14, 42)),
        ("status", None),
        ("", None),
    ],
)
def test_the_place_of_a_path(path: str, place: tuple[int, int] | None) -> None:
    document = read_yaml(DOCUMENT)
    assert document.place_of(path) == place
    problem = DocumentProblem(path, "is wrong")
    assert document.located(problem) == DocumentProblem(path, "is wrong", None, *(place or (None, None)))


TEXT = st.one_of(
    st.text(),
    st.sampled_from(
        ["on", "no", "1e-4", "010", "1_000", "~", "<<", "=", "0o7", "0b1", ".5", "2026-11-20", "a: b", "-"]
    ),
)
DATA = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=10,
)


@given(DATA)
def test_what_is_written_reads_back_the_same(data: object) -> None:
    text = write_yaml({"data": data})
    if "\\0" in text:  # the writer can say it, the reader refuses it
        return
    assert read_yaml(text).data == {"data": data}


@given(st.dictionaries(st.text("abcdefgno"), st.sampled_from(["on", "1e-4", "off", "y", "0o17"]), max_size=5))
def test_what_is_written_is_the_same_text_to_a_reader_of_yaml_1_1(data: dict[str, str]) -> None:
    assert yaml.safe_load(write_yaml(data)) == data
