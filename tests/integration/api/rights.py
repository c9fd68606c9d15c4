"""The rules in which the tables of routes and pages are written: what each role may do, at home and elsewhere."""

from __future__ import annotations

from tests.integration.api.people import ROLES

WHO = ("outsider", *ROLES, "admin")  # an outsider is a maintainer of another project


def rule(*outcomes: str) -> dict[str, str]:
    return dict(zip(WHO, outcomes, strict=True))


M, F, H = "may", "forbidden", "hidden"  # forbidden: they see it, and may not do that; hidden: it is not there for them
NOBODY = "nobody"  # who says no name, and is asked for one
OPEN = None  # without a token
ANYBODY = rule(M, M, M, M, M, M)  # and each is told of their own projects only
SEES = rule(H, M, M, M, M, M)
SUBMITS = rule(H, F, M, M, M, M)
ACTS = rule(H, F, F, M, M, M)
MAINTAINS = rule(H, F, F, F, M, M)
MAINTAINS_UNSEEN = rule(H, H, H, H, M, M)
RULES_ALL = rule(F, F, F, F, F, M)


def person_of(who: str, project: str) -> str:
    """Who that is, for what belongs to the project."""
    other = "cv" if project == "nlp" else "nlp"
    return "admin" if who == "admin" else f"{other}-maintainer" if who == "outsider" else f"{project}-{who}"


def expected(rights: dict[str, str] | None, who: str | None) -> str:
    """What becomes of the request of one of WHO, or without a name."""
    if rights is None:
        return M
    return NOBODY if who is None else rights[who]
