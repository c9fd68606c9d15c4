"""The tool behind `muster generate` and `muster chat`: what it prints, and what it refuses."""

import io
import json
from pathlib import Path

import pytest
from tests.model_families import write_model

from muster.trainer.convert import generate
from muster.trainer.convert.load_model import LoadedModel, load
from muster.trainer.models.generation import SamplingSettings
from muster.words.names import ExitCode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "qwen3")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(str(folder), "best")


def said(loaded: LoadedModel, prompt: str, tokens: int = 12, stops: tuple[str, ...] = ()) -> str:
    return "".join(generate.continued(loaded, prompt, SamplingSettings(tokens), stops))


def test_a_folders_model_continues_a_text(
    loaded: LoadedModel, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(loaded, "abc")
    assert len(text) >= 3
    asked = ["--checkpoint", str(folder), "--prompt", "abc", "--tokens", "12", "--temperature", "0"]
    assert generate.main(asked) == 0
    assert capsys.readouterr().out == f"abc{text}\n"
    assert generate.main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": folder.as_uri(), "prompt": "abc", "text": text}
    assert said(loaded, "abc", stops=(text[2:4],)) == text[: text.index(text[2:4])]


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a\\x1b[2J\\x9bb\n"), (False, "a\x1b[2J\x9bb\n")])
def test_what_a_model_says_steers_no_terminal(
    is_terminal: bool, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an order is divided between two pieces; a file gets the text as it is."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    assert generate._show(iter(["a\x1b", "[2J\x9b", "b"])) == "a\x1b[2J\x9bb"
    assert capsys.readouterr().out == shown


def test_an_answer_follows_the_models_own_template(loaded: LoadedModel) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    written = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = loaded.tokenizer.encode_rendered(written)[0]
    answer = "".join(generate.answered(loaded, messages, SamplingSettings(10)))
    tokens = generate._pieces(loaded, ids, frozenset(), SamplingSettings(10), ())
    assert "".join(tokens).startswith(answer)
    assert answer != said(loaded, written, 10), "what spells a mark is no mark"


def test_a_conversation_remembers_what_was_said(
    folder: Path, loaded: LoadedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def conversation(*lines: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        given = ["--checkpoint", str(folder), "--interactive", "--tokens", "8", "--temperature", "0", "--json"]
        assert generate.main(given) == 0
        return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]

    first, second = conversation("hi", "", "and you?", "/exit", "never")
    assert conversation("and you?", "/reset", "hi") == [conversation("and you?")[0], first]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    said.append({"role": "user", "content": "and you?"})
    assert second == "".join(generate.answered(loaded, said, SamplingSettings(8)))


def test_what_can_not_be_asked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert generate.main(["--checkpoint", str(tmp_path / "adapter")]) == ExitCode.USER_ERROR
    assert "holds an adapter without its model" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert generate.main(["--checkpoint", str(tmp_path / "empty"), "--json"]) == ExitCode.STORAGE
    assert "holds no checkpoint" in json.loads(capsys.readouterr().err)["error"]
    for wrong in (["--tokens", "0"], ["--top-p", "0"], ["--temperature", "-1"], ["--step", "newest"]):
        with pytest.raises(SystemExit):
            generate.main(["--checkpoint", "x", *wrong])
