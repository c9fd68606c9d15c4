"""PriorityClasses by name: what they are worth now, and nothing of those that are gone."""

from typing import Any

from muster.operator.kubernetes.priorities import PriorityClasses


def item(uid: str, name: str, value: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": name}, "value": value}


def test_classes_come_change_and_go() -> None:
    news: list[int] = []
    priorities = PriorityClasses(lambda: news.append(1))
    priorities.put(item("1", "research", 100))
    priorities.put(item("1", "research", 100))
    assert (priorities.values, len(news)) == ({"research": 100}, 1)
    priorities.put(item("1", "research", 200))
    priorities.put(item("2", "batch", -5))
    assert (priorities.values, len(news)) == ({"research": 200, "batch": -5}, 3)
    priorities.drop(item("1", "research", 200))
    assert (priorities.values, len(news)) == ({"batch": -5}, 4)
    priorities.keep_only(set())
    assert (priorities.values, len(news)) == ({}, 5)
