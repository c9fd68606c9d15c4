"""Xid errors: read from a kernel log, judged by table, text and repetition."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from muster.agent.kernel_log import ABSENT_SECONDS, KernelLog, record
from muster.agent.xid import FATAL_MAX, BadTable, XidError, XidSource, parse, read_table
from muster.words.notices import Remedy
from muster.words.signals import SignalKind

NOW = 1_000_000.0
LINE = "NVRM: Xid (PCI:0000:3B:00): {code}, pid=1234, name=python, {text}"


def said(code: int, text: str = "Ch 00000008", device: str = "0000:3B:00") -> str:
    return LINE.format(code=code, text=text).replace("0000:3B:00", device)


def judged(*lines: str) -> list[Remedy]:
    xids = XidSource(read_table())
    for index, line in enumerate(lines):
        xids.read(line, NOW + index, is_news=True)
    return [notice.remedy for notice in xids.standing(NOW + len(lines))]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (said(31), XidError(31, "0000:3b:00", "pid=1234, name=python, Ch 00000008")),
        (
            "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            XidError(79, "0000:05:00", "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", XidError(14, "0000:03:00", "Channel 00000001")),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46",
            XidError(28006, "0000:c1:00.0", "Non-fatal, Link 46", switch=True),
        ),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
        ("python[1]: NVRM: Xid (PCI:zz): 79", None),
        ("", None),
    ],
)
def test_lines_of_the_driver(line: str, found: XidError | None) -> None:
    assert parse(line) == found


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (said(13), Remedy.RESTART),
        (said(31), Remedy.RESTART),
        (said(94), Remedy.RESTART),
        (said(64), Remedy.RESET),
        (said(95), Remedy.RESET),
        (said(119), Remedy.RESET),
        (said(140), Remedy.RESET),
        (said(79), Remedy.REBOOT),
        (said(151), Remedy.REBOOT),
        (said(54), Remedy.EXCLUDE),
        (said(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08"), Remedy.RESET),
        (said(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"), Remedy.RESET),
        (said(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"), Remedy.REBOOT),
        (said(154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"), Remedy.DRAIN),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30", Remedy.RESET),
    ],
)
def test_each_remedy_of_the_catalogue(line: str, remedy: Remedy) -> None:
    assert judged(line) == [remedy]


@pytest.mark.parametrize(
    "line",
    [
        said(43),
        said(63),
        said(92),
        said(9999),
        said(149, "NETIR_LINK_EVT Nonfatal XC0 i0 Link 08"),
        said(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"),
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46",
    ],
)
def test_what_is_only_recorded(line: str) -> None:
    assert judged(line) == []


def test_every_code_that_the_table_names_has_a_remedy_and_a_name() -> None:
    table = read_table()
    assert len(table) > 60
    assert all(entry.name for entry in table.values())


def test_a_gpu_with_many_fatal_errors_is_for_a_person() -> None:
    lines = [said(119)] * FATAL_MAX
    assert judged(*lines[:-1]) == [Remedy.RESET], "the newest says it all"
    assert judged(*lines) == [Remedy.RESET, Remedy.EXCLUDE]
    others = [said(119, device=f"0000:0{index}:00") for index in range(FATAL_MAX)]
    assert judged(*others) == [Remedy.RESET] * FATAL_MAX, "one each is another matter"


def test_errors_of_another_day_are_forgotten() -> None:
    xids = XidSource(read_table())
    for index in range(FATAL_MAX):
        xids.read(said(119), NOW + index * 86_400, is_news=True)
    assert {notice.remedy for notice in xids.standing(NOW + 9 * 86_400)} == {Remedy.RESET}


def test_the_same_program_error_twice_on_one_gpu_names_the_diagnosis() -> None:
    xids = XidSource(read_table())
    xids.read(said(31), NOW, is_news=True)
    assert "dcgmi" not in xids.standing(NOW)[0].message
    xids.read(said(31), NOW + 60, is_news=True)
    assert "dcgmi" in xids.standing(NOW + 60)[-1].message


def test_a_lost_process_is_past_after_a_while_and_a_lost_gpu_is_not() -> None:
    xids = XidSource(read_table())
    xids.read(said(31), NOW, is_news=True)
    xids.read(said(79), NOW, is_news=True)
    assert [notice.remedy for notice in xids.standing(NOW + 3600)] == [Remedy.REBOOT]
    xids.acknowledge()
    assert xids.standing(NOW + 3600) == ()


def test_a_reset_that_the_driver_tells_of_settles_its_gpu_alone() -> None:
    well = said(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    other = said(119, device="0000:99:00")
    xids = XidSource(read_table())
    for line in (said(119), other, well):
        xids.read(line, NOW, is_news=True)
    assert [notice.device for notice in xids.standing(NOW)] == ["0000:99:00"]


def test_an_override_replaces_single_entries(tmp_path: Path) -> None:
    path = tmp_path / "xid.json"
    path.write_text('{"31": {"remedy": "exclude", "name": "ours"}, "12345": {"remedy": "reset"}}')
    table = read_table(path)
    assert (table[31].remedy, table[12345].remedy, table[79].remedy) == (Remedy.EXCLUDE, Remedy.RESET, Remedy.REBOOT)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "JSON"),
        ('{"31": {"remedy": "pray"}}', "31.remedy"),
        ('{"31": {"action": "reset"}}', "31.remedy"),
        ('{"thirty": {"remedy": "reset"}}', "thirty"),
        ("[]", "xid.json"),
    ],
)
def test_a_bad_override_is_refused_with_its_path(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "xid.json"
    path.write_text(text)
    with pytest.raises(BadTable, match=where):
        read_table(path)
    with pytest.raises(BadTable, match="No such file"):
        read_table(tmp_path / "absent.json")


def test_a_record_of_the_kernel_has_its_own_time() -> None:
    assert record("4,1234,2500000,-;NVRM: Xid") == (2.5, "NVRM: Xid")
    assert record("NVRM: Xid; without a head") == (None, "NVRM: Xid; without a head")
    assert record(" SUBSYSTEM=pci") == (None, " SUBSYSTEM=pci")


def kmsg(text: str, seconds_ago: float = 0.0) -> str:
    micros = int((time.monotonic() - seconds_ago) * 1e6)
    return f"4,1,{micros},-;{text}\n"


def test_a_log_is_followed_line_by_line(tmp_path: Path) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    xids = XidSource(read_table())
    log = KernelLog(fifo, xids)
    assert log.look() == ()
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    try:
        assert log.look() == ()
        line = kmsg(said(79)).encode()
        os.write(writer, b"4,1,1,-;usb 1-1: new device\n" + line[:30])
        assert log.look() == (), "half a line is not a line"
        os.write(writer, line[30:] + b"\xff\xfe garbage\n")
        (notice,) = log.look()
        assert (notice.kind, notice.remedy) == (SignalKind.GPU_FAULT, Remedy.REBOOT)
        assert abs(notice.at - time.time()) < 600
        assert log.look() == (notice,), "it stands"
    finally:
        os.close(writer)


def test_what_was_there_before_is_counted_and_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(kmsg(said(79), seconds_ago=50.0))
    xids = XidSource(read_table())
    log = KernelLog(path, xids)
    assert log.look() == ()
    assert xids.counts == {("0000:3b:00", 79): 1}
    with path.open("a") as file:
        file.write(kmsg(said(79)))
    assert len(log.look()) == 1
    assert list(xids.counts.values()) == [2]


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_hides_no_error_and_brings_none_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    path = tmp_path / "kmsg"
    path.write_text(kmsg(said(79), seconds_ago=50.0))
    log = KernelLog(path, XidSource(read_table()))
    jumped = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: jumped)
    assert log.look() == ()
    with path.open("a") as file:
        file.write(kmsg(said(119)))
    (notice,) = log.look()
    assert (notice.remedy, abs(notice.at - jumped) < 600) == (Remedy.RESET, True)


def test_a_log_that_is_not_there_is_looked_for_seldom(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = KernelLog(tmp_path / "kmsg", XidSource(read_table()))
    assert (log.look(), log.look()) == ((), ())
    assert log.pause_seconds == ABSENT_SECONDS
    assert len(caplog.messages) == 1
    (tmp_path / "kmsg").write_text(kmsg(said(79)))
    assert len(log.look()) == 1
