"""What `muster up` makes of its command line, and what it refuses before anything is started."""

import socket
from pathlib import Path

import pytest

from muster.cli import up
from muster.cli.errors import CliError, ExitStatus
from muster.operator import settings as operator_settings
from muster.words.notices import MACHINE
from muster.words.state_folder import StateFolder


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("10.0.0.5", "http://10.0.0.5:7"),
    ],
)
def test_the_address_as_seen_from_here(host: str, url: str) -> None:
    options = up.PlatformOptions(StateFolder(Path("/s")), host, 7)
    assert options.url == url
    assert "--no-auth" not in up._children(options)[0].arguments, "the machine has other users"


@pytest.mark.parametrize(
    ("landlock", "words"),
    [
        (0, "A job is code that runs as you. It can read what you can, for this kernel has no Landlock; it can end"),
        (7, "A job is code that runs as you; Landlock and seccomp keep it to its own folders and to what it names"),
    ],
)
def test_who_starts_it_hears_what_jobs_may_do(
    landlock: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.local.sandbox.version", lambda: landlock)
    monkeypatch.setattr("muster.local.seccomp.has_filter", lambda: True)
    monkeypatch.setattr("muster.local.mounts.available", lambda: True)
    up._welcome(up.PlatformOptions(StateFolder(Path("/s")), "127.0.0.1", 7))
    assert words in capsys.readouterr().err


def test_children_are_told_what_was_asked_for() -> None:
    options = up.PlatformOptions(StateFolder(Path("/s")), "127.0.0.1", 7, nodes=3, gpus_per_node=2, stop_jobs=True)
    api, operator, agent = up._children(options)
    assert (api.module, list(api.arguments)) == (
        "muster.api",
        ["--state", "/s", "--host", "127.0.0.1", "--port", "7"],
    )
    assert (operator.module, list(operator.arguments)) == (
        "muster.operator",
        ["--world", "local", "--state", "/s", "--nodes", "3", "--gpus-per-node", "2", "--stop-workers"],
    )
    assert (agent.module, list(agent.arguments)) == (
        "muster.agent",
        ["--node", MACHINE, "--folder", "/s/notices", "--disks", "/s", "--host", "127.0.0.1", "--port", "0"],
    )
    assert list(up._children(up.PlatformOptions(StateFolder(Path("/s"))))[1].arguments) == [
        "--world",
        "local",
        "--state",
        "/s",
    ]


def test_detaching_asks_for_the_same() -> None:
    options = up.PlatformOptions(StateFolder(Path("/s")), "127.0.0.1", 7, nodes=3, stop_jobs=True)
    words = options.command()[3:]
    assert words == ["up", "--state", "/s", "--host", "127.0.0.1", "--port", "7", "--nodes", "3", "--stop-jobs"]


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    up.refuse_missing_extras()
    monkeypatch.setattr(up, "NEEDED", {"no_such_module": "trainer", "nor_this": "api", "socket": "operator"})
    with pytest.raises(CliError, match="the extras api, trainer are not installed") as raised:
        up.refuse_missing_extras()
    assert (raised.value.exit_code, raised.value.next_step) == (ExitStatus.USAGE, "pip install 'muster-train[all]'")


def test_ports() -> None:
    assert up.free_port("127.0.0.1", 0) > 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(CliError, match="is in use"):
            up.free_port("127.0.0.1", port)
    assert up.free_port("127.0.0.1", port) == port
    with pytest.raises(CliError, match=r"port 1 on 192\.0\.2\.1 can't be had"):
        up.free_port("192.0.2.1", 1)


@pytest.mark.parametrize(
    ("there", "nodes", "per_node", "words", "next_step"),
    [
        (0, 1, 8, "1 node with 8 GPUs each are asked for, and no GPU is here", "muster up, for jobs with gang.gpus"),
        (
            8,
            4,
            8,
            "4 nodes with 8 GPUs each are asked for, and 8 GPUs are here",
            "muster up --nodes 1 --gpus-per-node 8",
        ),
        (8, 1, 8, "", ""),
        (8, 4, 2, "", ""),
        (0, 4, None, "", ""),
        (None, 1, 8, "", ""),
    ],
)
def test_gpus_that_are_not_there_are_not_given_away(
    there: int | None, nodes: int | None, per_node: int | None, words: str, next_step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("muster.local.gpus.gpu_count", lambda: there)
    options = up.PlatformOptions(StateFolder(Path("/s")), nodes=nodes, gpus_per_node=per_node)
    if not words:
        up.refuse_absent_gpus(options)
        return
    with pytest.raises(CliError, match=words) as raised:
        up.refuse_absent_gpus(options)
    assert raised.value.exit_code == ExitStatus.USAGE
    assert raised.value.next_step.startswith(next_step)
    assert "MUSTER_PRETEND_GPUS=1" in raised.value.next_step


@pytest.mark.parametrize(
    ("there", "given", "environ", "expected", "words"),
    [
        (8, (None, None), {}, (1, 8), "8 × H100 80GB HBM3: 1 node of 8"),
        (8, (4, None), {}, (4, 2), "8 × H100 80GB HBM3: 4 nodes of 2"),
        (8, (None, 2), {}, (4, 2), "8 × H100 80GB HBM3: 4 nodes of 2"),
        (8, (None, 0), {}, (None, 0), "No job gets the 8 GPUs of this machine; `muster up --nodes 1` gives them away"),
        (1, (4, None), {}, (4, 0), "No job gets the 1 GPU of this machine; `muster up --nodes 1` gives them away"),
        (0, (None, None), {}, (None, None), "No GPU is given away: 4 nodes for jobs with gang.gpusPerNode: 0"),
        (None, (None, None), {}, (None, None), "No GPU is given away: 4 nodes for jobs with gang.gpusPerNode: 0"),
        (8, (None, None), {"CUDA_VISIBLE_DEVICES": "0,1"}, (1, 2), "2 × H100 80GB HBM3: 1 node of 2"),
        (8, (None, None), {"CUDA_VISIBLE_DEVICES": "2,3"}, (None, None), "No job gets the 8 GPUs of this machine"),
        (8, (None, None), {"MUSTER_OPERATOR_NODES": "3"}, (None, None), "No job gets the 8 GPUs of this machine"),
        (8, (None, None), {"MUSTER_PRETEND_GPUS": "1"}, (None, None), "No job gets the 8 GPUs of this machine"),
    ],
)
def test_the_machines_gpus_are_found(
    there: int | None,
    given: tuple[int | None, int | None],
    environ: dict[str, str],
    expected: tuple[int | None, int | None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.local.gpus.gpu_count", lambda: there)
    monkeypatch.setattr("muster.local.gpus.gpu_model", lambda: "H100 80GB HBM3")
    options = up.with_own_gpus(
        up.PlatformOptions(StateFolder(Path("/s")), nodes=given[0], gpus_per_node=given[1]), environ
    )
    assert (options.nodes, options.gpus_per_node) == expected
    assert up.describe_gpus(options).startswith(words)


def test_pretended_gpus_are_asked_for_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("muster.local.gpus.gpu_count", lambda: 0)
    monkeypatch.setenv("MUSTER_PRETEND_GPUS", "1")
    options = up.PlatformOptions(StateFolder(Path("/s")), nodes=1, gpus_per_node=8)
    up.refuse_absent_gpus(options)
    up._welcome(options)
    assert "the GPUs of these nodes are pretended, and their jobs train on the CPU" in capsys.readouterr().err


def test_the_number_of_nodes_is_the_operators() -> None:
    assert up.DEFAULT_NODES == operator_settings.DEFAULT_NODES
