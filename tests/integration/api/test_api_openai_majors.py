"""OpenAI's client in each of its majors, against a whole platform: upload, train, follow, pause, cancel, ask what was
trained; lost replies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.api.openai_house import MODELS, chat_file, models_file
from tests.integration.api.test_api_clients import fetched, run
from tests.integration.cli.house import House
from tests.model_families import write_model

# The oldest that is supported, the last of 2.x, and 3.x, which speaks by another HTTP library.
TINY_MODEL = Path(__file__).parents[3] / "examples" / "tiny-model"
VERSIONS = ("1.66.0", "2.54.0", "3.57.0")

CLIENT = """
import json, sys, time
import openai

url, token, training_data, tuned = sys.argv[1:]
http = __import__("httpx2" if openai.__version__.startswith("3.") else "httpx")
openai._base_client.INITIAL_RETRY_DELAY = openai._base_client.MAX_RETRY_DELAY = 0.001

class Cutting(http.HTTPTransport):
    lose = 0

    def handle_request(self, request):
        reply = super().handle_request(request)
        if request.method == "POST" and self.lose:
            self.lose -= 1
            reply.read()
            raise http.ReadError("the connection was cut", request=request)
        return reply

transport = Cutting()
carrier = http.Client(transport=transport, timeout=120)
client = openai.OpenAI(base_url=url + "/v1", api_key=token, http_client=carrier)
jobs = client.fine_tuning.jobs
assert {model.id for model in client.models.list()} >= {"tiny", "spoken"}

transport.lose = 2
with open(training_data, "rb") as data:
    training_file = client.files.create(file=data, purpose="fine-tune").id
assert [file.id for file in client.files.list() if file.filename == "chat.jsonl"][:1] == [training_file]
assert client.files.wait_for_processing(training_file, poll_interval=0.1).status == "processed"
with open(training_data, "rb") as data:
    content = data.read()
assert client.files.content(training_file).read() == content
said = {"filename": "parts.jsonl", "mime_type": "application/jsonl", "purpose": "fine-tune"}
upload = client.uploads.create(bytes=len(content), **said)
parts = [client.uploads.parts.create(upload.id, data=piece).id for piece in (content[:99], content[99:])]
joined = client.uploads.complete(upload.id, part_ids=parts).file.id
assert client.files.wait_for_processing(joined, poll_interval=0.1).status == "processed"
assert client.files.delete(joined).deleted
try:
    client.files.create(file=b"x", purpose="assistants")
    raise SystemExit("an unknown purpose was taken")
except openai.BadRequestError as error:
    assert error.param == "purpose", error.param

def create(lose=0, **more):
    transport.lose = lose
    return jobs.create(model="tiny", training_file=training_file, **more)

seen, deadline = {}, time.monotonic() + 600
while True:
    tuned = jobs.retrieve(tuned.id if seen else tuned)
    for event in jobs.list_events(tuned.id, limit=3):  # newest first, page after page
        if event.id in seen:
            break
        seen[event.id] = event.x_type
    if tuned.status in ("succeeded", "failed", "cancelled"):
        break
    assert time.monotonic() < deadline, (tuned, seen)
    time.sleep(0.5)
assert tuned.status == "succeeded", (tuned, seen)
assert {event.id: event.x_type for event in jobs.list_events(tuned.id)} == seen
assert {"job.created", "checkpoint.committed", "job.succeeded"} <= set(seen.values()), seen
checkpoints = list(jobs.checkpoints.list(tuned.id))
assert checkpoints[0].step_number == 8 and checkpoints[0].metrics.train_loss > 0, checkpoints
assert tuned.fine_tuned_model in [model.id for model in client.models.list()]
question = [{"role": "user", "content": "What is a gang?"}]
for model in (tuned.fine_tuned_model, checkpoints[0].fine_tuned_model_checkpoint):
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0, answer

before = {job.id for job in jobs.list()}
method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 8}}}
made = [create(lose, suffix="v", seed=1, method=method) for lose in (0, 1, 2, 0)]
ids = [job.id for job in made]
assert len(set(ids)) == 4 and {job.id for job in jobs.list(limit=2)} - before == set(ids), ids
assert made[0].method.supervised.hyperparameters.n_epochs == 3
assert jobs.retrieve(ids[0]).status in ("queued", "running")
events = list(jobs.list_events(ids[0], limit=1))
assert "chosen: n_epochs 3" in events[-1].message, events
assert list(jobs.checkpoints.list(ids[0])) == []

def act(job, what):
    if hasattr(jobs, what):
        return getattr(jobs, what)(job).id
    return client.post(f"/fine_tuning/jobs/{job}/{what}", cast_to=object)["id"]

assert act(ids[1], "pause") == ids[1]
assert act(ids[1], "resume") == ids[1]
for job in ids:
    jobs.cancel(job)

try:
    create(method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 0}}})
    raise SystemExit("a wrong field was taken")
except openai.BadRequestError as error:
    assert error.param == "method.supervised.hyperparameters.n_epochs", error.param

asked = {"model": "spoken", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
whole = client.chat.completions.create(**asked)
pieces, usage = [], None
for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
    pieces += [choice.delta.content or "" for choice in chunk.choices]
    usage = chunk.usage or usage
assert "".join(pieces) == whole.choices[0].message.content
assert whole.usage.completion_tokens == usage.completion_tokens > 0
scored = client.completions.create(model="spoken", prompt=[[1, 2, 3], [4, 5]], max_tokens=1, echo=True, logprobs=1)
assert [len(choice.logprobs.token_logprobs) for choice in scored.choices] == [4, 3]
streamed = client.completions.create(model="spoken", prompt="abc", max_tokens=3, temperature=0, stream=True)
assert "".join(chunk.choices[0].text for chunk in streamed)
try:
    client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
    raise SystemExit("tools were taken")
except openai.BadRequestError as error:
    assert error.param == "tools", error.param
print(json.dumps(ids))
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One platform for all majors, with a model that has something to say."""
    folder = tmp_path_factory.mktemp("openai")
    (folder / "model").mkdir()
    write_model(folder / "model", "qwen3")
    spoken = {"spec": {"training": {"model": {"source": (folder / "model").as_uri()}}}}
    small = {"model": {"source": TINY_MODEL.as_uri()}, "data": {"sequenceLength": 64}, "optimizer": {"lr": 0.002}}
    models = {**MODELS["models"], "spoken": spoken, "small": {"spec": {"training": small}}}
    there = House(folder)
    there.environ["MUSTER_API_BASE_MODELS_FILE"] = str(models_file(folder, {"models": models}))
    try:
        there.up("--stop-jobs")
        yield there
    finally:
        there.close()


@pytest.fixture(scope="module")
def tuned(house: House, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that trains: the first client follows it to its end, and the others read of it what there is to read."""
    data = Path(chat_file(tmp_path_factory.mktemp("tuned")).removeprefix("file://"))
    numbers: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 8}}}
    token = house.state.admin_token.read_text().strip()
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key=token, timeout=120) as client:
        file = client.files.create(file=data, purpose="fine-tune").id
        made = client.fine_tuning.jobs.create(model="small", training_file=file, suffix="real", method=numbers)
    return made.id


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_openais_client_of_each_major_speaks_to_it(version: str, house: House, tuned: str, tmp_path: Path) -> None:
    tools = fetched(
        f"openai-{version}",
        [sys.executable, "-m", "venv", "."],
        ["bin/python", "-m", "pip", "install", "-q", f"openai=={version}"],
    )
    (tmp_path / "use.py").write_text(CLIENT)
    data = chat_file(tmp_path).removeprefix("file://")
    token = house.state.admin_token.read_text().strip()
    said = run(tools / "bin/python", "use.py", house.url, token, data, tuned, folder=tmp_path)
    assert len(json.loads(said)) == 4
