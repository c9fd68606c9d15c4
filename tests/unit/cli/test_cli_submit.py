"""From a file to the document that is sent: overrides, paths, the plan, and faults with their lines."""

import copy
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster.cli import submit
from muster.cli.cluster_client import ClusterClient
from muster.cli.cluster_connection import NamedCluster
from muster.cli.cluster_objects import ClusterObjects
from muster.cli.errors import CliError, ExitStatus
from muster.cli.job_file import read_job_file
from muster.cli.output import show_error
from muster.client.address import Server
from muster.client.connection import Connection

TEXT = """\
metadata: {name: mine}
spec:
  training:
    data:
      train:
        - {source: texts/*.txt}
        - source: ~/more.jsonl
        - {source: s3://bucket/x}
        - {source: builtin://python-stdlib}
      tokenizer: tok/tokenizer.json
    evaluation:
      data: [{source: /absolute}, {source: held-out}]
"""
PLAN: dict[str, Any] = {
    "accepted": True,
    "job": {
        "name": "mine",
        "namespace": "default",
        "spec": {
            "training": {
                "task": "pretrain",
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "/a"}, {"source": "/b"}]},
                "batch": {"tokensPerStep": 16_384},
                "length": {"steps": 2_000},
                "precision": "bf16",
                "parallel": {"shard": "fsdp"},
                "optimizer": {"clipNorm": 1.0, "skipSpikes": False},
            },
            "gang": {"nodes": {"min": 2, "max": 4}, "gpusPerNode": 8},
            "checkpoint": {"uri": "s3://ckpt/team", "every": "auto"},
        },
    },
    "parameters": 1_017_728,
    "ranksPerNode": 8,
    "worldSize": {"min": 16, "max": 32},
    "accumulation": [{"nodes": 2, "ranks": 16, "microSteps": 2}, {"nodes": 4, "ranks": 32, "microSteps": 1}],
    "samplesPerStep": 64,
    "refusals": [],
    "warnings": [{"path": "spec.checkpoint.uri", "message": "is not versioned"}],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    return path


def test_paths_are_relative_to_the_file(file: Path) -> None:
    document = submit.prepare(str(file), None, [], local=True)
    training = document.data["spec"]["training"]
    folder = str(file.parent)
    assert [source["source"] for source in training["data"]["train"]] == [
        f"{folder}/texts/*.txt",
        str(Path.home() / "more.jsonl"),
        "s3://bucket/x",
        "builtin://python-stdlib",
    ]
    assert training["data"]["tokenizer"] == f"{folder}/tok/tokenizer.json"
    assert [source["source"] for source in training["evaluation"]["data"]] == ["/absolute", f"{folder}/held-out"]


def test_a_relative_path_to_another_machine_is_refused_with_its_line(file: Path) -> None:
    with pytest.raises(CliError, match="a relative path does not reach the workers") as raised:
        submit.prepare(str(file), None, [], local=False)
    (fault,) = raised.value.faults
    assert (fault.problem.path, fault.line) == ("spec.training.data.train[0].source", 6)
    assert raised.value.exit_code == ExitStatus.USAGE


def test_files_of_this_machine_are_sent_once_each_to_the_jobs_project(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "tok.json"):
        (tmp_path / name).write_text("{}")
    training = (
        "{data: {train: [{source: a.jsonl}, {source: ./a.jsonl}], tokenizer: tok.json},"
        " evaluation: {data: [{source: b.jsonl}]}}"
    )
    path = tmp_path / "job.yaml"
    path.write_text(f"metadata: {{labels: {{muster.dev/project: nlp}}}}\nspec: {{training: {training}}}")
    sent: list[tuple[str | None, dict[Path, str]]] = []

    def send(project: str | None) -> Any:
        def upload(purposes: dict[Path, str]) -> dict[Path, str]:
            sent.append((project, purposes))
            return {each: f"file-{each.name}" for each in purposes}

        return upload

    data = submit.prepare(str(path), None, [], local=False, send=send).data["spec"]["training"]
    purposes = {"a.jsonl": "fine-tune", "tok.json": "user_data", "b.jsonl": "evals"}
    assert sent == [("nlp", {tmp_path / name: purpose for name, purpose in purposes.items()})]
    assert [source["source"] for source in data["data"]["train"]] == ["file-a.jsonl"] * 2
    assert (data["data"]["tokenizer"], data["evaluation"]["data"][0]["source"]) == ("file-tok.json", "file-b.jsonl")


@pytest.mark.parametrize("wrong", ["data: {train: [{source: '*.jsonl'}]}", "model: {source: folder}"])
def test_what_is_no_single_file_is_sent_to_no_other_machine(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(f"spec: {{training: {{{wrong}, tokenizer: x, evaluation: {{data: [{{source: a.jsonl}}]}}}}}}")
    with pytest.raises(CliError, match="does not reach the workers"):
        submit.prepare(str(path), None, [], local=False, send=lambda _: lambda _: pytest.fail("nothing may be sent"))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1",
        "spec: 1",
        "spec: {training: []}",
        "spec: {training: {data: {train: 3}}}",
        "spec: {training: {data: {train: [1, null, {source: 5}], tokenizer: 7}, evaluation: {data: x}}}",
    ],
)
def test_nonsense_is_left_for_the_server_to_refuse(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    before = read_job_file(str(path)).data
    assert submit.prepare(str(path), None, [], local=False).data == before


def test_a_sweep_is_told_its_command(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("sweep: {parameters: {}}\nspec: {}\n")
    with pytest.raises(CliError, match="is a sweep") as raised:
        submit.prepare(str(path), None, [], local=True)
    assert raised.value.next_step == f"muster sweep {path}"
    assert submit.prepare(str(path), None, [], local=True, sweep=True).data["sweep"] == {"parameters": {}}


def test_the_name_and_the_settings_win(file: Path) -> None:
    document = submit.prepare(str(file), "other", ["training.length.steps=5"], local=True)
    assert document.data["metadata"]["name"] == "other"
    assert document.data["spec"]["training"]["length"] == {"steps": 5}


def test_the_plan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    submit.show_plan(PLAN)
    shown = capsys.readouterr()
    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert rows == [
        "job mine (default)",
        "training pretrain muster-1m, 1.02M parameters",
        "data /a",
        "/b",
        "gang 2 to 4 workers × 8 GPUs = world size 16 to 32",
        "batch 16,384 tokens = 64 samples per step; 2 micro-steps on 16 ranks, 1 micro-step on 32 ranks",
        "length 2,000 steps",
        "precision bf16, shard: fsdp",
        "gradient clipped to a norm of 1; every batch with finite numbers is learnt from",
        "checkpoints s3://ckpt/team (every: auto)",
    ]
    assert shown.err == "warning: spec.checkpoint.uri: is not versioned\n"


def test_the_plan_says_who_would_make_room(capsys: pytest.CaptureFixture[str]) -> None:
    costs = {"uncommittedGpuSeconds": 3600.0, "restartGpuSeconds": 1800.0}
    own = {"project": "nlp", "id": "1", "job": "base", "gpus": 8, "nodes": 1, "nodesKept": 3, **costs}
    hidden = {"project": "another project", "id": None, "job": None, "gpus": 1, "nodes": 1, "nodesKept": 0, **costs}
    why = {"because": "which has priority 0 where this job has 5"}
    admission = {
        "verdict": "preempts", "code": "AwaitingPreemption", "because": "gang needs 2 nodes", "nodes": 0,
        "allowedBy": "the quota of project nlp (preempts)", "evictions": [own | why, hidden | why],
    }  # fmt: skip
    submit.show_plan(PLAN | {"admission": admission})
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    cost = "its restart costs 0.5 GPU-hours, a checkpoint that fails 1 more"
    assert rows[rows.index("queue preempts: gang needs 2 nodes") :] == [
        "queue preempts: gang needs 2 nodes",
        "allowed by the quota of project nlp (preempts)",
        f"nlp/base, {why['because']}, gives up 8 GPUs and goes on with 3 nodes; {cost}",
        f"a gang of another project, {why['because']}, gives up 1 GPU and queues again; {cost}",
    ]
    unknown = {"verdict": "unknown", "because": "no operator runs here", "allowedBy": None, "evictions": []}
    submit.show_plan(PLAN | {"admission": unknown})
    assert "can't be foreseen: no operator runs here" in capsys.readouterr().out


def test_a_dry_run_in_a_cluster_without_an_api_says_that_the_queue_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(ClusterObjects, "create", lambda _, submission, dry_run: asked.append(dry_run))
    client = ClusterClient(NamedCluster("desk", "team", api=None))
    data = {"train": [{"source": "s3://bucket/a"}], "sequenceLength": 16}
    training = {
        "model": {"preset": "muster-1m"}, "data": data, "batch": {"tokensPerStep": 16}, "length": {"steps": 1},
    }  # fmt: skip
    spec = {"training": training, "gang": {"nodes": 1, "gpusPerNode": 0}}
    submit.show_plan(client.plan({"metadata": {"name": "job"}, "spec": spec}))
    assert asked == [True]
    assert "can't be foreseen: only Muster's API can ask the operator" in " ".join(capsys.readouterr().out.split())


def test_one_of_a_thing_is_not_told_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    plan = copy.deepcopy(PLAN) | {
        "ranksPerNode": 1, "worldSize": {"min": 1, "max": 1}, "samplesPerStep": 1,
        "accumulation": [{"nodes": 1, "ranks": 1, "microSteps": 1}],
    }  # fmt: skip
    plan["job"]["spec"]["gang"] = {"nodes": {"min": 1, "max": 1}, "gpusPerNode": 0}
    plan["job"]["spec"]["training"]["length"] = {"steps": 1}
    submit.show_plan(plan)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "gang 1 worker × 1 CPU process = world size 1" in rows
    assert "batch 16,384 tokens = 1 sample per step; 1 micro-step on 1 rank" in rows
    assert "length 1 step" in rows


def answering(status: int, body: dict[str, Any]) -> Connection:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, json=body))
    return Connection(Server("http://127.0.0.1:1", "test"), transport=transport)


def test_what_the_server_refuses_gets_file_and_line(file: Path) -> None:
    body = {
        "code": "invalid_job",
        "errors": [{"path": "spec.training.data.train[1].source", "message": "is not there"}],
    }
    document = submit.prepare(str(file), None, [], local=True)
    with pytest.raises(CliError) as raised:
        submit.request_plan(answering(422, body), document)
    (fault,) = raised.value.faults
    assert (raised.value.file, fault.line, fault.column) == (str(file), 7, 11)
    assert fault.excerpt == "        - source: ~/more.jsonl"


@pytest.mark.parametrize(
    ("assignment", "path", "setting"),
    [
        ("training.data.tokenizer=nowhere", "spec.training.data.tokenizer", "--set training.data.tokenizer=nowhere"),
        ("training.optimizer={lr: x}", "spec.training.optimizer.lr", "--set training.optimizer={lr: x}"),
        ("trainng.length.steps=5", "spec.trainng", "--set trainng.length.steps=5"),
        ("training.length.steps=x", "spec.training.data.train[1].source", ""),
        ("training.data.tokenizer=nowhere", "spec.training.data", ""),
    ],
)
def test_a_fault_of_a_setting_names_the_setting(
    file: Path, assignment: str, path: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was shown at a line of the file that was in order."""
    document = submit.prepare(str(file), None, [assignment], local=True)
    body = {"code": "invalid_job", "errors": [{"path": path, "message": "is wrong"}]}
    with pytest.raises(CliError) as raised:
        submit.request_plan(answering(422, body), document)
    (fault,) = raised.value.faults
    assert (fault.setting, fault.line is None) == (setting, bool(setting))
    show_error(raised.value)
    assert (f"\n  {setting}\n" in capsys.readouterr().err) is bool(setting)
    assert raised.value.document()["error"]["problems"][0].get("setting", "") == setting


def test_what_a_submission_would_be_refused_for_stops_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = {"code": "name_taken", "path": "metadata.name", "message": "job mine exists already"}
    document = submit.prepare(str(file), None, [], local=True)
    with pytest.raises(CliError, match="the server would refuse mine") as raised:
        submit.request_plan(answering(200, {**PLAN, "accepted": False, "refusals": [refusal]}), document)
    show_error(raised.value)
    assert capsys.readouterr().err.count("job mine exists already") == 1
    assert (raised.value.exit_code, raised.value.code) == (ExitStatus.FAILED, "name_taken")
    assert raised.value.faults[0].line == 1


def test_the_plan_shows_paths_without_detours() -> None:
    from muster.plan.plan_words import plan_facts

    plan = copy.deepcopy(PLAN)
    training = plan["job"]["spec"]["training"]
    training["model"] = {"source": "/home/w/../m/tiny"}
    training["data"]["train"] = [{"source": "/home/w/./a.jsonl"}, {"source": "s3://bucket/a/../b"}]
    facts = dict(plan_facts(plan))
    assert facts["training"].startswith("pretrain /home/m/tiny,")
    assert facts["data"] == "/home/w/a.jsonl\ns3://bucket/a/../b"
