"""A program of the user's own in a job's document: what is taken, what is refused early, and what becomes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from muster.api.core.limits import read_addresses
from muster.local.sandbox import named_paths, state_problems
from muster.plan.plan_words import plan_facts
from muster.recipe.document import JobSpec, parse_job
from muster.recipe.job_inputs import files_named, with_addresses, with_input_folder
from muster.replies.views import plan_view, summary_view
from muster.words.base import InvalidDocument, UserError, dump, dump_json
from muster.words.job import ONE_KIND_OF_WORK, worker_config
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus

PROGRAM: dict[str, Any] = {
    "command": ["train.py", "--config", "a.yaml"],
    "source": "file-0123456789abcdefghijklmn",
    "inputs": {"base": {"job": "pretrain", "step": 20}, "tokenizer": {"source": "hf://org/name@v1"}},
}
SPEC: dict[str, Any] = {"program": PROGRAM, "gang": {"nodes": {"min": 2, "max": 5}, "processesPerNode": 3}}
TRAINING = {
    "model": {"preset": "muster-1m"},
    "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
    "batch": {"tokensPerStep": 8192, "microBatch": 4},
    "length": {"steps": 200},
}


def spec_of(**changes: Any) -> JobSpec:
    return parse_job(document(**changes)).spec


def document(**changes: Any) -> dict[str, Any]:
    spec = {**copy.deepcopy(SPEC), **changes}
    return {"metadata": {"name": "mine"}, "spec": {key: value for key, value in spec.items() if value is not None}}


def test_defaults_of_a_program_are_filled_in() -> None:
    resolved = dump(spec_of())
    assert "training" not in resolved
    assert resolved["program"] == {
        **PROGRAM,
        "launcher": "torchrun",
        "hang": {"off": False},
        "inputs": {"base": PROGRAM["inputs"]["base"], "tokenizer": {"source": "hf://org/name@v1", "step": "best"}},
    }


def test_a_program_may_have_every_gang_size_and_its_workers_read_it_as_json() -> None:
    spec = spec_of()
    assert spec.gang_sizes() == (2, 3, 4, 5)
    config = json.loads(dump_json(worker_config(spec, JobStatus())))
    assert config["program"]["command"] == PROGRAM["command"]
    assert "training" not in config
    with pytest.raises(UserError, match="runs a program of its own"):
        assert spec.training_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": TRAINING}, ONE_KIND_OF_WORK),
        ({"program": None}, ONE_KIND_OF_WORK),
        ({"program": {"command": []}}, "spec.program.command"),
        ({"program": {"command": ["  ", "x"]}}, "command[0]: is empty"),
        ({"program": {"command": ["a\0b"]}}, "spec.program.command[0]: holds a NUL"),
        ({"program": {"command": "python train.py"}}, "spec.program.command"),
        ({"program": {"command": ["a"], "hang": {"off": True, "stepSeconds": 9}}}, "off contradicts"),
        ({"program": {"command": ["a"], "inputs": {"../x": {"job": "a"}}}}, "is no name of a folder"),
        ({"program": {"command": ["a"], "inputs": {"x": {}}}}, "exactly one of job"),
        ({"program": {"command": ["a"], "inputs": {"x": {"job": "a", "source": "hf://a/b"}}}}, "exactly one of job"),
        ({"checkpoint": {"folder": "/out"}}, "must be a folder below the working directory"),
        ({"checkpoint": {"folder": "a/../../b"}}, "must be a folder below the working directory"),
        ({"checkpoint": {"every": 20}}, "a program saves when it chooses to"),
        ({"tracking": {"wandb": {"project": "p", "mode": "offline"}}}, "let the program do so itself"),
        ({"program": None, "training": TRAINING, "checkpoint": {"folder": "out"}}, "leave it out with training"),
    ],
)
def test_a_bad_program_is_refused_with_its_place(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse_job(document(**changes))
    assert words in str(refused.value)


def test_the_commits_and_addresses_that_a_program_reads_are_named_by_their_fields() -> None:
    spec = spec_of()
    assert {path: origin.job for path, origin in spec.input_commits().items()} == {"program.inputs.base": "pretrain"}
    spec = with_input_folder(spec, "program.inputs.base", "s3://ck/uid", 40)
    assert spec.input_commits()["program.inputs.base"].step == 40
    assert dict(read_addresses(spec)) == {
        "program.inputs.tokenizer.source": "hf://org/name@v1",
        "program.inputs.base.uri": "s3://ck/uid",
    }


def test_an_uploaded_source_gets_its_address_and_a_word_of_the_command_never() -> None:
    file_id = PROGRAM["source"]
    spec = spec_of(program={**PROGRAM, "command": ["train.py", file_id]})
    assert files_named(spec) == (("spec.program.source", file_id),)
    assert spec.program is not None
    resolved = with_addresses(spec, {file_id: "s3://files/x.tar.gz"}).program
    assert resolved is not None
    assert (resolved.source, resolved.command) == ("s3://files/x.tar.gz", ("train.py", file_id))


def test_its_plan_and_its_line_say_that_it_is_a_program() -> None:
    plan = plan_view("mine", "default", {}, spec_of(checkpoint={"folder": "out"}))
    assert (plan["parameters"], plan["accumulation"], plan["samplesPerStep"]) == (None, [], None)
    facts = dict(plan_facts(plan))
    assert facts["program"] == "train.py --config a.yaml  (once per rank)"
    assert facts["inputs"] == "base: pretrain (step 20)\ntokenizer: hf://org/name@v1"
    assert facts["hangs"] == "by the pace of the program's own steps"
    assert facts["checkpoints"] == "the platform chooses (what the program writes in out)"
    assert summary_view("id", "mine", "default", {}, 0.0, plan["job"]["spec"], {})["task"] == "program"


def test_its_paths_are_read_and_the_platforms_state_is_not(tmp_path: Any) -> None:
    state = StateFolder(tmp_path / "state")
    commits = state.checkpoints / "uid"
    commits.mkdir(parents=True)
    inputs = {"a": {"uri": f"file://{commits}"}}
    spec = spec_of(program={"command": ["/data/train.py", "x", str(state.root / "token")], "inputs": inputs})
    assert "/data/train.py" in named_paths(spec)
    assert [problem.path for problem in state_problems(spec, state)] == ["spec.program.command[2]"]


def test_a_script_is_read_with_its_neighbours_but_never_with_a_whole_home(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    command = [
        str(tmp_path / "project" / "train.py"),
        str(tmp_path / "eval.py"),
        "--data=/data/corpus",
        "x=/data/other",
    ]
    read = set(named_paths(spec_of(program={"command": command})))
    assert {str(tmp_path / "project"), "/data/corpus"} <= read
    assert not {str(tmp_path), "/data/other"} & read
