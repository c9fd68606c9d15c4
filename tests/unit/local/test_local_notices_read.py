"""What the files of the notices' folder say of virtual nodes."""

from __future__ import annotations

from pathlib import Path

from muster.agent.announced import announce
from muster.agent.xid import read_table
from muster.operator.local.notices import NoticeFiles
from muster.words.notices import MACHINE

NODES = ("local-0", "local-1")


def test_what_is_said_of_the_machine_concerns_all_of_its_nodes(tmp_path: Path) -> None:
    notices, table = NoticeFiles(tmp_path), read_table(None)
    assert notices.unfit(NODES) == frozenset()
    announce(tmp_path, "local-1", "drain", table)
    assert notices.unfit(NODES) == {"local-1"}
    announce(tmp_path, MACHINE, "xid:79", table)
    assert notices.unfit(NODES) == set(NODES)
    assert [notice.source for notice in notices.of("local-1")] == ["announced", "xid"]
    assert set(notices.stamps()) == {"local-1", MACHINE}
    announce(tmp_path, MACHINE, "clear", table)
    assert notices.unfit(NODES) == {"local-1"}
