"""Jobs by the command line, on a real platform with real gangs: from bad input to a finished model."""

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.integration.cli.house import MUSTER, House
from tests.polling import WAIT_SECONDS_MAX, eventually


@pytest.fixture(scope="module")
def finished(platform: House) -> str:
    """A job that was submitted, watched and has succeeded."""
    generate = {"prompts": ["ab"], "maxTokens": 4}
    evaluation = {"every": 6, "holdout": 0.1, "samples": 8, "generate": generate}
    file = platform.job_file("first", evaluation=evaluation)
    result = platform.muster("submit", str(file), "--yes", "--follow", "--json")
    job = json.loads(result.stdout.splitlines()[-1])
    assert job["status"]["phase"] == "Succeeded"
    assert job["status"]["progress"]["step"] == 12
    assert "first succeeded: step 12/12, loss" in result.stderr
    assert "the checkpoint of step 12 is saved" in result.stderr
    return "first"


def test_a_finished_job_in_every_view(platform: House, finished: str) -> None:
    assert [job["name"] for job in platform.ask("ls", "--phase", "succeeded")["items"]] == ["first"]
    assert platform.ask("ls", "--live")["items"] == []
    table = platform.muster("ls").stdout.splitlines()
    assert table[0].split()[:4] == ["NAME", "PHASE", "STEP", "LOSS"]
    assert table[1].split()[:3] == ["first", "Succeeded", "12/12"]

    shown = platform.muster("get", finished).stdout
    for word in ("Succeeded", "step 12/12", "GOODPUT", "productive", "checkpoints/", "step 12", "samples of step 12"):
        assert word in shown
    assert "  > ab\n" in shown
    steps = platform.ask("metrics", finished)
    assert [point["step"] for point in steps["points"]] == list(range(1, 13))
    assert [entry["step"] for entry in steps["evaluations"]] == [0, 6, 12]
    assert "EVALUATION LOSS" in platform.muster("metrics", finished).stdout
    commits = platform.ask("checkpoints", "ls", finished)
    assert [commit["step"] for commit in commits["items"]][-1] == 12
    assert "best" in platform.muster("checkpoints", "ls", finished).stdout
    why = platform.ask("why", finished)
    assert why["phase"] == "Succeeded"
    assert why["best"].startswith("The best checkpoint is step ")
    assert "length: the run had 12 steps; few batches teach little" in why["warnings"]
    assert "The best checkpoint is step " in platform.muster("why", finished).stdout


def test_logs_of_every_worker_outlive_it(platform: House, finished: str) -> None:
    logs = platform.ask("logs", finished, "--worker", "all")
    assert [page["worker"] for page in logs["items"]] == [0, 1]
    records = [json.loads(line) for line in logs["items"][0]["text"].splitlines() if line.startswith("{")]
    assert [record["step"] for record in records if record.get("type") == "step"][-1] == 12
    assert platform.muster("logs", finished, "--tail", "1").stdout.count("\n") == 1
    words = platform.muster("logs", finished).stdout.splitlines()
    assert [line for line in words if line.startswith("step 12/12   loss ")]
    assert not [line for line in words if line.startswith('{"type": "step"')]
    followed = platform.muster("logs", finished, "--follow", "--raw")
    assert followed.stdout.splitlines() == logs["items"][0]["text"].splitlines()
    assert followed.stderr.splitlines()[-1] == "--- Succeeded ---"
    assert "error: " in platform.muster("logs", finished, "--attempt", "9", expect=1).stderr


def test_events_tell_the_story_in_order(platform: House, finished: str) -> None:
    events = platform.ask("events", finished)["items"]
    kinds = [event["type"] for event in events]
    assert [event["id"] for event in events] == sorted(event["id"] for event in events)
    story = ["job.created", "attempt.started", "checkpoint.committed", "attempt.succeeded", "job.succeeded"]
    assert [kind for kind in dict.fromkeys(kinds) if kind in story] == story
    followed = platform.muster("events", finished, "--follow", "--json").stdout.splitlines()
    assert [json.loads(line)["type"] for line in followed] == kinds
    commits = platform.muster("events", finished, "--type", "checkpoint.committed").stdout.splitlines()
    assert len(commits) == kinds.count("checkpoint.committed")


def test_commits_are_looked_after(platform: House, finished: str, tmp_path: Path) -> None:
    """By the trainer's tools, which this command starts: their documents and exit codes come through."""
    folder = platform.ask("checkpoints", "ls", finished)["uri"]
    last = platform.ask("checkpoints", "ls", finished)["items"][-1]["step"]
    assert "verified" in platform.muster("checkpoints", "verify", finished).stdout
    assert platform.ask("checkpoints", "inspect", folder)["step"] == last
    platform.muster("checkpoints", "pin", finished, str(last))
    assert "step 99 is not committed" in platform.muster("checkpoints", "rm", finished, "99", expect=1).stderr
    platform.muster("export", finished, "--to", str(tmp_path / "model"), "--step", str(last))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 1


def test_its_file_can_be_submitted_again(platform: House, finished: str, tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(platform.muster("get", finished, "--spec").stdout)
    plan = platform.ask("submit", str(again), "--name", "again", "--dry-run")
    assert plan["accepted"]
    assert plan["worldSize"] == {"min": 2, "max": 2}
    shown = platform.muster("submit", str(again), "--name", "again", "--dry-run").stdout
    for line in (
        "2 workers × 1 CPU process = world size 2",
        "256 tokens = 8 samples per step; 2 micro-steps on 2 ranks",
    ):
        assert line in shown
    assert len(platform.ask("ls")["items"]) == 1, "a dry run submits nothing"


def test_what_can_t_work_is_refused_before_it_holds_a_gang(platform: House, tmp_path: Path) -> None:
    """Typical mistakes, each stopped by a refusal or named by a warning before anything starts."""
    path = platform.job_file("hopeless")
    there = len(platform.ask("ls")["items"])

    def refused(*changes: str, expect: int = 1) -> str:
        settings = [word for change in changes for word in ("--set", change)]
        return platform.muster("submit", str(path), "--dry-run", *settings, expect=expect).stderr

    missing = refused("training.data.train=[{source: nosuch.jsonl}]")
    assert "the job would fail at its start" in missing
    assert "nosuch.jsonl: does not exist" in missing
    table = tmp_path / "qa.csv"
    table.write_text("question,answer\nwhat,that\n")
    assert "columns that no format has: answer, question" in refused(f"training.data.train=[{{source: {table}}}]")
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    assert "openai-chat is not for task pretrain" in refused(f"training.data.train=[{{source: {chats}}}]")
    held_out = f"training.evaluation={{every: 6, data: [{{source: {chats}}}]}}"
    assert "evaluation.data[0].format: the files look like this: format openai-chat" in refused(held_out)
    estimated = platform.muster("estimate", str(path), "--set", held_out, expect=1)
    assert estimated.stderr.count("format openai-chat is not for task pretrain") == 1
    hub = refused("training.model={source: Qwen/Qwen3-8B}", expect=2)
    assert "next:  for the repository of the Hugging Face hub write hf://Qwen/Qwen3-8B" in hub
    large = platform.muster("submit", str(path), "--set", "training.model={preset: llama-8b}", expect=1)
    assert "memory of a rank" in large.stdout
    assert "does not fit: a rank needs about" in large.stderr
    assert large.stderr.splitlines()[-1].endswith("submit it all the same with --yes")
    folder = refused(f"training.model={{source: {tmp_path}}}")
    assert "holds no config.json" in folder
    assert "Did you mean 'spec.training.optimizer.lr'?" in refused("training.learning_rate=0.1", expect=2)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "sweep: {parameters: {training.optimizer.lr: {values: [1.0e-3]}}}\nmetadata: {name: s}\nspec: {}\n"
    )
    assert f"next:  muster sweep {sweep}" in platform.muster("submit", str(sweep), expect=2).stderr
    odd = {
        "training.optimizer.lr=9": "9 is high: training may diverge",
        "training.length.steps=3": "the run has 3 steps; few batches teach little",
        "gang={nodes: 1, gpusPerNode: 1}": "then `muster up --nodes 1 --gpus-per-node 1`",
    }
    settings = [word for change in odd for word in ("--set", change)]
    warned = platform.muster("submit", str(path), "--dry-run", *settings).stderr
    assert [words for words in odd.values() if words not in warned] == []
    planned = platform.ask("submit", str(path), "--dry-run")
    assert planned["estimate"]["fits"] is True
    assert len(platform.ask("ls")["items"]) == there, "nothing was submitted"


def test_a_reader_that_leaves_costs_no_work(platform: House, finished: str) -> None:
    """As in `muster submit job.yaml --yes | head -1`: the job is submitted, and what only prints stops."""
    file = str(platform.job_file("unread"))
    assert unread(platform, "submit", file, "--set", "suspend=true", "--yes") == (0, "Submitted unread")
    assert platform.ask("get", "unread")["metadata"]["name"] == "unread"
    assert unread(platform, "cancel", "unread", "--wait")[0] == 0
    assert platform.ask("get", "unread")["status"]["phase"] == "Cancelled"
    for words in (["logs", finished, "-f"], ["events", finished, "-f"], ["events", finished, "-f", "--json"]):
        assert unread(platform, *words) == (141, "")


def unread(platform: House, *words: str) -> tuple[int, str]:
    """Run a command whose output nobody reads; its exit code, and the first words that it said to the person."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [*MUSTER, *words], stdout=writing, stderr=subprocess.PIPE, text=True, env=platform.environ, check=False
        )
    finally:
        os.close(writing)
    assert ended.returncode in (0, 141), ended.stderr
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("Submitted ")]
    return ended.returncode, " ".join(said[0].split()[:2]) if said else ""


def test_a_live_name_is_taken(platform: House) -> None:
    file = str(platform.job_file("waits"))
    platform.ask("submit", file, "--set", "suspend=true")
    for more in ([], ["--dry-run"]):
        result = platform.muster("submit", file, "--yes", *more, expect=1)
        assert "waits" in result.stderr.splitlines()[0]
        assert result.stderr.count("has a live job named") == 1
        assert result.stderr.splitlines()[-1] == "next:  `--name` submits it under another name"
    platform.muster("cancel", "waits", "--wait")


@pytest.mark.parametrize(
    ("before", "after", "message", "line"),
    [
        ("evaluation:", "evalution:", "spec.training.evalution: unknown key. Did you mean 'evaluation'?", "evalution:"),
        ("lr: 0.003", "lr: high", "spec.training.optimizer.lr: ", "lr: high"),
        ("shard: fsdp", "shard: fdsp", "spec.training.parallel.shard: must be", "shard: fdsp"),
        ("tokensPerStep: 256", "tokensPerStep: 250", "spec.training: batch.tokensPerStep 250 is not", "training:"),
        ("sequenceLength: 32", "sequenceLength: 128", "spec.training: data.sequenceLength 128 is longer", "training:"),
        ("name: bad", "name: Bad_Name", "metadata.name: must be", "name: Bad_Name"),
        ("nodes: 2", "nodes: 3", "spec: training.batch.tokensPerStep 256 can't be divided over 3 ranks", "spec:"),
    ],
)
def test_bad_input_is_named_with_its_line(
    platform: House, tmp_path: Path, before: str, after: str, message: str, line: str
) -> None:
    text = platform.job_file("bad").read_text()
    assert before in text
    file = tmp_path / "bad.yaml"
    file.write_text(text.replace(before, after))
    jobs = len(platform.ask("ls")["items"])
    result = platform.muster("submit", str(file), "--yes", expect=2)
    lines = [entry.strip() for entry in result.stderr.splitlines()]
    assert any(entry.startswith(message) for entry in lines), result.stderr
    number = next(n for n, entry in enumerate(file.read_text().splitlines(), 1) if line in entry)
    assert any(entry.startswith(f"{file}:{number}:") for entry in lines), result.stderr
    assert len(platform.ask("ls")["items"]) == jobs


def test_a_job_that_fails_by_its_own_fault_is_exit_code_1_with_the_reason(platform: House) -> None:
    (platform.root / "one.txt").write_text("A single document can't be divided. " * 40)  # which no submission foresees
    file = platform.job_file("faulty", data={"train": [{"source": "one.txt"}], "sequenceLength": 32})
    result = platform.muster("submit", str(file), "--yes", "--wait", expect=1)
    assert "faulty failed: " in result.stderr
    assert "user_error in attempt 1: " in result.stderr
    assert "evaluation.holdout keeps whole documents out of training" in result.stderr
    why = platform.ask("why", "faulty")
    assert why["lastFailure"]["exitCode"] == 80
    assert "evaluation.holdout keeps whole documents" in " ".join(platform.muster("why", "faulty").stdout.split())
    assert platform.ask("get", "faulty")["status"]["attempt"] == 1, "a user's fault is not tried again"


@pytest.mark.long
def test_a_long_job_watched_left_suspended_resumed_and_cancelled(platform: House) -> None:
    """Ctrl-C leaves it alone; suspend commits; resume goes on from there; cancel ends it and says so to a watcher."""
    file = platform.job_file("long", length={"steps": 100_000}, evaluation=None)
    with platform.start("submit", str(file), "--yes", "--follow") as watcher:
        eventually(lambda: [job for job in platform.ask("ls")["items"] if job["name"] == "long"], "the job")
        platform.wait_for_step("long", 5)
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=WAIT_SECONDS_MAX)
    assert watcher.returncode == 130
    assert "Detached; long goes on." in errors
    assert "muster get long --follow" in errors
    # A step stands in its heartbeat before the operator and the API have read of it.
    eventually(lambda: platform.phase("long") == "Running", "the job to be seen to run")

    fetched = platform.root / "traces"
    made = platform.ask("profile", "long", "--steps", "2", "--rank", "0", "--rank", "1", "--to", str(fetched))
    assert [(part["rank"], part["steps"], part["fault"]) for part in made["done"]] == [(0, 2, ""), (1, 2, "")]
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((fetched / made["name"] / f"rank-{rank}.trace.json.gz").read_bytes()))
        assert any(event["name"].startswith("aten::") for event in trace["traceEvents"] if event.get("ph") == "X")
    assert f"profiles/{made['name']}/rank-1.memory.txt" in platform.muster("profile", "long", "--list").stdout
    assert "steps: " in platform.muster("profile", "long", "--steps", "10000", expect=2).stderr

    suspended = platform.ask("suspend", "long", "--wait")
    assert suspended["status"]["phase"] == "Suspended"
    step = suspended["status"]["checkpoint"]["step"]
    assert step >= 5
    platform.muster("resume", "long", "--wait")
    attempts = platform.ask("get", "long")["status"]["attempts"]
    assert [attempt["resumeStep"] for attempt in attempts] == [0, step]

    with platform.start("get", "long", "--follow", "--json") as watcher:
        platform.wait_for_step("long", step + 5)
        both = platform.ask("cancel", "long", "nobody", "--wait", expect=1)
        assert [job["status"]["phase"] for job in both["items"]] == ["Cancelled"]
        assert both["errors"][0]["error"]["code"] == "job_not_found"
        output, _ = watcher.communicate(timeout=WAIT_SECONDS_MAX)
    assert watcher.returncode == 1
    assert json.loads(output.splitlines()[-1])["status"]["phase"] == "Cancelled"
    assert "can't be" in platform.muster("suspend", "long", expect=1).stderr
    assert "is Cancelled: only steps that" in platform.muster("profile", "long", expect=1).stderr


def test_a_clone_is_a_new_job_with_changes(platform: House, finished: str) -> None:
    clone = platform.ask(
        "clone", finished, "--name", "copy", "--set", "training.length.steps=100", "--set", "suspend=true"
    )
    assert clone["spec"]["training"]["length"] == {"steps": 100}
    assert clone["spec"]["suspend"] is True
    eventually(lambda: platform.phase("copy") == "Suspended", "the copy to wait")
    original = platform.ask("get", finished)["spec"]
    assert yaml.safe_dump(original["training"]["data"]) == yaml.safe_dump(clone["spec"]["training"]["data"])
    platform.muster("cancel", "copy", "--wait")


@pytest.mark.long
def test_a_checkpoint_is_scored_on_held_out_data(platform: House, finished: str, tmp_path: Path) -> None:
    data = tmp_path / "held-out.txt"
    data.write_text("ab ba ab " * 200)
    refused = platform.muster("evaluate", finished, "--data", str(data), "--step", "7", expect=1).stderr
    assert "first has no checkpoint of step 7" in refused
    assert "it has checkpoints of the steps " in refused
    assert "is no file" in platform.muster("evaluate", finished, "--data", str(tmp_path / "no"), expect=2).stderr
    scored = platform.ask("evaluate", finished, "--data", str(data), "--step", "12", "--name", "scored")
    assert (scored["step"], scored["phase"], sorted(scored["results"])) == (
        12,
        "Succeeded",
        ["bits_per_byte", "loss", "perplexity"],
    )
    assert 1 < scored["results"]["loss"] < 6
    assert "scored: bits_per_byte" in platform.muster("checkpoints", "ls", finished).stdout
    assert f"scored: bits_per_byte {scored['results']['bits_per_byte']:.6g}" in platform.muster("get", finished).stdout
    assert (
        "has no checkpoint of step 7"
        in platform.muster("export", finished, "--to", str(tmp_path / "out"), "--step", "7", expect=1).stderr
    )
