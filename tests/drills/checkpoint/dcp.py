"""The same faults against torch.distributed.checkpoint: as many kills, full disks and damaged files as Muster got.

Its marker of a whole checkpoint is `.metadata`, written last; it is believed here as a COMMIT is believed there.
"""

import random
import shutil
from pathlib import Path

from tests.drills.checkpoint.damage import damage
from tests.drills.checkpoint.gangs import Meeting, Nursery
from tests.drills.checkpoint.scorecard import Scorecard


def drill_dcp(gangs: Nursery, place: Path, score: Scorecard, seed: int, like: Scorecard) -> None:
    dice = random.Random(seed)
    known = _truth(gangs, place / "truth")
    for number in range(like.faults["disk full"]):
        _life(gangs, place / f"full-{number}", score, known, file_bytes_max=dice.randint(100, 5_000))
        score.faults["disk full"] += 1
    for number in range(like.faults["SIGKILL rank"]):
        later, step = dice.uniform(0, 0.03), dice.randint(1, 2)

        def kill(meeting: Meeting, later: float = later, step: int = step) -> None:
            note = meeting.wait_for("saving", 0, step)
            meeting.over.wait(later)
            if note and not meeting.over.is_set():
                score.faults["SIGKILL rank"] += meeting.kill(note["pid"])

        _life(gangs, place / f"kill-{number}", score, known, meddle=kill)
    _damaged(gangs, place / "truth", score, known, dice, like.damage_tried)


def _truth(gangs: Nursery, folder: Path) -> dict[int, object]:
    gangs.live(do="dcp_train", world=1, folder=str(folder), steps=3)
    said = gangs.live(do="dcp_check", world=1, folder=str(folder), steps=[1, 2, 3])
    return {note["step"]: note.get("digest") for note in said.said("step")}


def _life(gangs: Nursery, folder: Path, score: Scorecard, known: dict[int, object], meddle=None, **order) -> None:  # type: ignore[no-untyped-def]
    life = gangs.live(meddle, do="dcp_train", world=1, folder=str(folder), steps=3, **order)
    outcomes = life.said("outcome")
    score.saves += len(life.said("saving"))
    score.committed += sum(note["committed"] for note in outcomes)
    score.failed_and_said_so += sum(not note["committed"] for note in outcomes)
    there = sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata"))
    claimed = {note["outcome"] for note in outcomes if note["committed"]}
    said = gangs.live(do="dcp_check", world=1, folder=str(folder), steps=sorted({*there, *claimed})).said("step")
    for note in said:
        if note.get("digest") == known[note["step"]]:
            score.loads += 1
            continue
        why = f"{folder.name} step {note['step']}: {note.get('error', 'another state')}"
        (score.lies if note["step"] in claimed else score.unloadable).append(why)


def _damaged(
    gangs: Nursery, folder: Path, score: Scorecard, known: dict[int, object], dice: random.Random, times: int
) -> None:
    pristine = folder.with_name("pristine")
    shutil.copytree(folder, pristine)
    for _ in range(times):
        files = [path for path in (folder / "step-3").rglob("*") if path.is_file()]
        kind, path = damage(files, dice)
        score.faults[kind] += 1
        score.damage_tried += 1
        said = gangs.live(do="dcp_check", world=1, folder=str(folder), steps=[3]).said("step")
        note = said[0] if said else {"error": "the process died", "untouched": True}
        if "digest" in note and note["digest"] != known[3]:
            score.lies.append(f"{kind} of {path.name}: loaded without a word, with another state")
        elif "error" in note and not note["untouched"]:
            score.half_loaded.append(f"{kind} of {path.name}: an error, with the weights half overwritten")
        else:
            score.damage_caught += 1
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
