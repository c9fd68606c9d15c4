"""JSON is read strictly and with places, to the same data as the standard library's reader where that is right."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.documents.document import DEPTH_MAX, VALUES_MAX, DocumentError, TextPlace
from muster.documents.json_text import read_json
from muster.documents.reader import read
from muster.documents.yaml_text import read_yaml

DATA = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('ab.[]\n"\\é'), inner, max_size=4)),
    max_leaves=20,
)


@given(DATA, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_whatever_json_says_is_read(data: object, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
    found = read_json(text).data
    assert found == data
    assert repr(found) == repr(json.loads(text))


@given(st.text('[]{},:"\\ \n0123456789.-+eEtrufalsnNI'))
def test_what_the_standard_library_refuses_is_refused(text: str) -> None:
    try:
        found = read_json(text).data
    except DocumentError:
        return
    assert repr(found) == repr(json.loads(text))


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ('{"a": 1,\n}', 2, 1, "expected a key in double quotes"),
        ('{"a" 1}', 1, 6, "expected ':'"),
        ('{"a": 1 "b": 2}', 1, 9, "expected ',' or '}'"),
        ("[1\n 2]", 2, 2, "expected ',' or ']'"),
        ("[1,]", 1, 4, "expected a value"),
        ('{"a": NaN}', 1, 7, "NaN is not a word of JSON"),
        ('{"a": 1e999}', 1, 7, "1e999 is not a number"),
        ('{"a": 9223372036854775808}', 1, 7, "9223372036854775808 is a whole number of more than 64 bits"),
        ('{"a": 1' + "0" * 5_000 + "}", 1, 7, "is too long for a number"),
        ('{"a": 1,\n "a": 2}', 2, 2, "the key 'a' stands here and in line 1"),
        ('{"a": "x', 1, 7, "unterminated string"),
        ('{"a": "x\ny"}', 1, 9, "invalid control character"),
        (r'{"a": "\ud800"}', 1, 7, "a text with half a surrogate pair"),
        (r'{"a": "\u0000"}', 1, 7, "a text with a NUL character"),
        (r'{"\u0000": 1}', 1, 2, "a text with a NUL character"),
        ('{"a": 1} x', 1, 10, "the document has ended"),
        (f'{{"{"k" * 401}": 1}}', 1, 2, "a key may have 400 characters, not 401"),
        ("", 1, 1, "the document ends too early"),
        ("[" * 100_000, 1, DEPTH_MAX + 1, f"is nested deeper than {DEPTH_MAX} levels"),
        ("[" + "1," * VALUES_MAX + "1]", 1, 2 * VALUES_MAX, f"holds more than {VALUES_MAX:,} values"),
    ],
)
def test_faults_are_named_with_their_place(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(DocumentError) as raised:
        read_json(text)
    assert raised.value.message.startswith(message)
    assert raised.value.place == TextPlace(line, column)


def test_places_of_values() -> None:
    document = read(b'\xef\xbb\xbf{\n\t"spec": {"train": [\n1, {"source":"x"}]}}', "json")
    assert document.place_of("spec.train[1].source") == TextPlace(3, 5)
    assert document.place_of("spec.train[0]") == TextPlace(3, 1)
    assert document.place_of("spec.absent") == TextPlace(2, 2)


@pytest.mark.parametrize("text", ['{"a": 1e-4, "b": [true, null, "on", -0.5]}', "[1.0, 10, {}]"])
def test_json_is_the_same_as_yaml(text: str) -> None:
    assert repr(read_json(text).data) == repr(read_yaml(text).data)
