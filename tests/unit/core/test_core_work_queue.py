"""A gang that runs is seen to before ten thousand jobs that wait."""

from muster.operator.core.work_queue import WorkQueue


def test_who_is_preferred_goes_first_among_those_that_are_due() -> None:
    queue = WorkQueue()
    queue.prefer("gang", True)
    for index in range(1_000):
        queue.enqueue(f"job-{index:04}", 1.0)
    queue.enqueue("gang", 2.0)
    assert queue.take(1.5) == "job-0000"
    assert [queue.take(2.0) for _ in range(3)] == ["gang", "job-0001", "job-0002"]
    queue.done("gang", 2.0, 5.0)
    assert queue.take(3.0) == "job-0003", "not before its time"
    queue.prefer("gang", False)
    assert [queue.take(7.0), queue.take(7.0)] == ["gang", "job-0004"], "from its next time on"
    queue.done("gang", 7.0, 0.0)
    assert queue.take(7.0) == "job-0005"
    assert queue.next_at() == 1.0


def test_each_key_is_taken_once_however_its_preference_changes() -> None:
    queue = WorkQueue()
    queue.enqueue("a", 3.0)
    queue.prefer("a", True)
    queue.enqueue("a", 1.0)
    assert queue.take(5.0) == "a"
    assert queue.take(5.0) is None
    queue.done("a", 5.0, None)
    assert queue.take(9.0) is None
    assert queue.next_at() is None
