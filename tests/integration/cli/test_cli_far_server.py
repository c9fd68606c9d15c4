"""A server on another machine: it is sent the files that a job names by relative paths, and sends the models it makes.

127.1 is 127.0.0.1 to the network, and to the command line some machine that shares no folder with this one.
"""

import io
import json
import tarfile
from pathlib import Path

import httpx2
import pytest
import torch
import yaml
from tests.integration.cli.house import House
from tests.polling import WAIT_SECONDS_MAX
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long
FORM = {"format": "transformers", "dtype": "keep"}


@pytest.fixture(scope="module")
def far(platform: House) -> House:
    """The platform of this module, as commands reach it that know its address and a token."""
    platform.environ["MUSTER_SERVER"] = platform.url.replace("127.0.0.1", "127.1")
    platform.environ["MUSTER_TOKEN"] = platform.state.admin_token.read_text().strip()
    return platform


@pytest.fixture(scope="module")
def trained(far: House) -> str:
    """The id of a job that has trained and committed."""
    result = far.muster("submit", str(far.job_file("first")), "--yes", "--follow", "--json", "--server", far.url)
    return str(json.loads(result.stdout.splitlines()[-1])["id"])


@pytest.fixture(scope="module")
def archive(far: House, trained: str) -> bytes:
    """The model of a real commit as the API sends it, cut in its middle and gone on with."""
    headers = {"authorization": f"Bearer {far.environ['MUSTER_TOKEN']}"}
    with httpx2.Client(base_url=far.url, headers=headers, timeout=WAIT_SECONDS_MAX) as client:
        path = f"/api/v1/jobs/{trained}/checkpoints/12:export"
        while (told := client.get(path, headers={"accept": "application/json"})).status_code == 202:
            pass  # each asks for ten seconds
        size = told.json()["bytes"]
        with client.stream("GET", path, params=FORM) as cut:
            tag, begun = cut.headers["etag"], next(cut.iter_bytes(size // 2 + 1))
        rest = client.get(path, params=FORM, headers={"range": f"bytes={len(begun)}-", "if-range": tag})
        assert rest.status_code == 206
    assert len(begun) < size == len(begun) + len(rest.content)
    return begun + rest.content


def files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        return {each.name.partition("/")[2]: tar.extractfile(each).read() for each in members}  # type: ignore[union-attr]


def test_transformers_opens_what_the_api_makes_of_a_real_commit(far: House, archive: bytes, tmp_path: Path) -> None:
    for name, data in files_of(archive).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    words = next(iter(sorted(far.corpus().glob("*.txt")))).read_bytes()
    text = torch.tensor([list(words[at : at + 32]) for at in range(0, 32 * 16, 32)])
    with torch.no_grad():
        loss = model(text, labels=text).loss.item()
    told = far.ask("metrics", "first")
    assert loss < told["points"][0]["loss"] - 0.05, "it has learnt something"
    assert loss == pytest.approx(told["evaluations"][-1]["loss"], abs=0.2), "on other text of the same kind"
    assert json.loads((tmp_path / "muster.json").read_text())["step"] == 12


def test_a_model_is_fetched_from_another_machine_also_after_a_cut(
    far: House, trained: str, archive: bytes, tmp_path: Path
) -> None:
    expected = files_of(archive)
    part = tmp_path / f"model.unfinished.{trained[:8]}.12.transformers.keep.False" / "model.safetensors.part"
    part.parent.mkdir()
    part.write_bytes(expected["model.safetensors"][:1_000])  # as a command left it that was killed
    (part.parent / "config.json").write_bytes(expected["config.json"])
    told = far.ask("export", "first", "--to", str(tmp_path / "model"))
    assert (told["state"], told["step"]) == ("ready", 12)
    found = {path.relative_to(tmp_path / "model").as_posix(): path for path in (tmp_path / "model").rglob("*")}
    assert {name: path.read_bytes() for name, path in found.items() if path.is_file()} == expected
    again = far.muster("export", "first", "--to", str(tmp_path / "model"), expect=2)
    assert "is there already" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_of_this_machine_are_uploaded_and_named_by_their_ids(far: House, tmp_path: Path) -> None:
    texts = [json.dumps({"text": f"once upon a time there were {number}"}) for number in range(50)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{text}\n" for text in texts))
    job = yaml.safe_load(far.job_file("uploads").read_text())
    data = job["spec"]["training"]["data"]
    data["train"] = [{"source": "texts.jsonl"}, {"source": "./texts.jsonl"}]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))

    refused = far.muster("submit", str(path), "--dry-run", expect=2)
    assert "is relative to this file, and the server is another machine" in refused.stderr
    assert far.ask("files", "ls")["items"] == []
    made = far.ask("submit", str(path), "--yes", "--set", "suspend=true")  # test_client_notebook.py trains on one
    (file,) = far.ask("files", "ls")["items"]
    assert (file["name"], file["purpose"], file["samples"]) == ("texts.jsonl", "fine-tune", 50)
    assert [source["source"] for source in made["spec"]["training"]["data"]["train"]] == [file["id"]] * 2

    with (tmp_path / "texts.jsonl").open("a") as file_of_texts:
        file_of_texts.write("oops\n")
    job["metadata"]["name"] = "wrong"
    path.write_text(yaml.safe_dump(job))
    failed = far.muster("submit", str(path), "--yes", expect=1)
    assert "texts.jsonl, line 51" in failed.stderr
    assert "wrong" not in {each["name"] for each in far.ask("ls")["items"]}
    data["train"] = [{"source": "*.jsonl"}]
    path.write_text(yaml.safe_dump(job))
    assert "uploads single files" in far.muster("submit", str(path), "--yes", expect=2).stderr
