"""Which server is asked, with which token, and that a token in an open file is refused."""

from pathlib import Path

import pytest

from muster.cli import running
from muster.client.address import Server, find_server, find_token, state_folder
from muster.client.errors import InvalidRequest, Unavailable
from muster.words.state_folder import StateFolder


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "MUSTER_STATE": str(tmp_path / "state"), **more}


def test_the_option_wins_over_the_variable_and_that_over_what_runs_here(tmp_path: Path) -> None:
    both = environ(tmp_path, MUSTER_SERVER="https://muster.example/", MUSTER_TOKEN=" secret\n")
    assert find_server("http://other:1/api/v1", both) == Server("http://other:1", "--server", "secret")
    assert find_server(None, both) == Server("https://muster.example", "MUSTER_SERVER", "secret")


def test_the_muster_up_of_this_machine_is_found_while_it_lives(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    lock = running.StateLock(state)
    lock.write(running.RunningPlatform(4711, "http://127.0.0.1:9999", 1.0))
    found = find_server(None, environ(tmp_path))
    assert (found.url, found.token, found.local) == ("http://127.0.0.1:9999", None, True)
    (state.root / "admin-token").write_text("muster_abc\n")
    (state.root / "admin-token").chmod(0o600)
    assert find_server(None, environ(tmp_path)).token == "muster_abc"
    assert find_server("http://127.0.0.1:9999", environ(tmp_path)).token == "muster_abc"
    assert find_server("http://127.0.0.1:9998", environ(tmp_path)).token is None, "another server never sees it"
    lock.release()
    with pytest.raises(Unavailable, match="none runs on this machine"):
        find_server(None, environ(tmp_path))


@pytest.mark.parametrize("address", ["127.0.0.1:8642", "localhost:8642", "[::1]:8642"])
def test_an_address_of_this_machine_needs_no_scheme(tmp_path: Path, address: str) -> None:
    assert find_server(address, environ(tmp_path)).url == f"http://{address}"


@pytest.mark.parametrize("address", ["other:8642", "localhost:x", "ftp://x", "http://user:password@host"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a server address looks like http://127\.0\.0\.1:8642"):
        find_server(address, environ(tmp_path))


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8642", True),
        ("http://localhost", True),
        ("http://[::1]:8642", True),
        ("http://[::1]", True),
        ("https://muster.example:443", False),
        ("http://127.0.0.1.example:80", False),
    ],
)
def test_local_is_loopback_only(url: str, local: bool) -> None:
    assert Server(url, "test").local is local


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config" / "muster" / "token"
    path.parent.mkdir(parents=True)
    path.write_text("muster_abc\n")
    path.chmod(0o600)
    assert find_token(environ(tmp_path)) == "muster_abc"
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="others may read it") as raised:
        find_token(environ(tmp_path))
    assert raised.value.next_step == f"chmod 600 {path}"
    path.unlink()
    assert find_token(environ(tmp_path)) is None


def test_a_server_never_shows_its_token() -> None:
    assert "secret" not in repr(Server("http://x", "test", "secret"))


def test_the_state_folder(tmp_path: Path) -> None:
    assert state_folder(Path("~/a")).root == Path.home() / "a"
    assert state_folder(None, {"MUSTER_STATE": str(tmp_path)}).root == tmp_path
    assert state_folder(None, {}).root == Path.home() / ".muster"
