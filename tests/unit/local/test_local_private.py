"""What lies in a state folder is its user's alone, also where an older Muster made it readable."""

import stat
from pathlib import Path

from muster.local.cluster import LocalCluster
from muster.local.private import make_private_database, make_private_folder
from muster.words.state_folder import StateFolder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_an_older_state_folder_are_closed(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "new" / "state")
    make_private_folder(state.root, state.running)
    assert mode(state.root) == 0o700
    state.running.touch()
    state.root.chmod(0o755)
    make_private_folder(state.root, state.running)
    assert mode(state.root) == 0o700


def test_a_folder_of_other_things_keeps_its_mode(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "shared")
    state.root.mkdir()
    (state.root / "somebody's.txt").touch()
    state.root.chmod(0o777)
    make_private_folder(state.root, state.running)
    assert mode(state.root) == 0o777


def test_databases_and_their_journals_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    cluster = LocalCluster(path)
    files = [path, *tmp_path.glob("cluster.db-*")]
    assert len(files) == 3, "SQLite keeps a journal and an index beside the file"
    assert {mode(file) for file in files} == {0o600}
    for file in files:
        file.chmod(0o644)
    make_private_database(path)
    assert {mode(file) for file in files} == {0o600}
    assert cluster.path == path
