"""A gang that runs is seen to before ten thousand jobs that wait."""

from muster.operator.core.agenda import Agenda


def test_who_is_preferred_goes_first_among_those_that_are_due() -> None:
    agenda = Agenda()
    agenda.prefer("gang", True)
    for index in range(1_000):
        agenda.notice(f"job-{index:04}", 1.0)
    agenda.notice("gang", 2.0)
    assert agenda.take(1.5) == "job-0000"
    assert [agenda.take(2.0) for _ in range(3)] == ["gang", "job-0001", "job-0002"]
    agenda.done("gang", 2.0, 5.0)
    assert agenda.take(3.0) == "job-0003", "not before its time"
    agenda.prefer("gang", False)
    assert [agenda.take(7.0), agenda.take(7.0)] == ["gang", "job-0004"], "from its next time on"
    agenda.done("gang", 7.0, 0.0)
    assert agenda.take(7.0) == "job-0005"
    assert agenda.next_at() == 1.0


def test_each_key_is_taken_once_however_its_preference_changes() -> None:
    agenda = Agenda()
    agenda.notice("a", 3.0)
    agenda.prefer("a", True)
    agenda.notice("a", 1.0)
    assert agenda.take(5.0) == "a"
    assert agenda.take(5.0) is None
    agenda.done("a", 5.0, None)
    assert agenda.take(9.0) is None
    assert agenda.next_at() is None
