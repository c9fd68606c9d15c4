"""python -m muster.trainer.checkpoint ls | inspect | verify | pin | unpin | rm FOLDER [STEP] [--json]

FOLDER is a job's checkpoint folder, `<checkpoint.uri>/<job uid>`. Exit code 0; 1 where a commit is damaged; 80 for a
request that can't be met; 83 where the store fails. Runs without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from muster.replies.views import commit_summary_view, commit_view
from muster.storage.listing import best_of, steps_in
from muster.storage.opening import open_store
from muster.storage.pins import is_pinned, pin, pinned, unpin
from muster.storage.readers import being_read
from muster.storage.store import Store
from muster.trainer.arguments import ArgumentParser
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit
from muster.trainer.checkpoint.quarantine import put_back, quarantined
from muster.trainer.checkpoint.verify import verify
from muster.trainer.errors import StorageError, UserError
from muster.words.checkpoint import commit_key, is_frozen_key, path_in_folder
from muster.words.names import ExitCode
from muster.words.text import size
from muster.words.times import epoch_seconds

Report = dict[str, Any]


def ls(store: Store, _: argparse.Namespace) -> Report:
    pins, aside, rows = pinned(store), quarantined(store), []
    for step in steps_in(store):
        try:
            commit = commit_in(store, step)
            rows.append(commit_summary_view(commit, commit.best) | {"pinned": step in pins})
        except CheckpointError as error:
            rows.append({"step": step, "pinned": step in pins, "error": str(error)})
    best = best_of((row["step"], row.get("best", False)) for row in rows)
    for row in rows:
        if "best" in row:
            row["best"] = row["step"] == best
    return {"folder": store.uri, "commits": rows, "quarantined": sorted(aside)}


def inspect(store: Store, chosen: argparse.Namespace) -> Report:
    commit = commit_in(store, chosen.step if chosen.step is not None else "last")
    return commit_view(commit, commit.best and commit_in(store, "best").step == commit.step)


def check(store: Store, chosen: argparse.Namespace) -> Report:
    """Verify the checkpoints, those in quarantine too: one that verifies now is put back."""
    committed, aside = steps_in(store), quarantined(store)
    steps = sorted({*committed, *aside}) if chosen.step is None else [chosen.step]
    if not steps:
        raise CheckpointError(f"{store.uri}: holds no checkpoint")
    verified: set[str] = set()
    rows = [
        _put_back(store, step, _progress(chosen))
        if step in aside and step not in committed
        else _checked(store, step, verified, _progress(chosen))
        for step in steps
    ]
    if chosen.step is not None:  # somebody asks of this one whether it is sound
        rows = [{"verified": False} | row for row in rows]
    return {"folder": store.uri, "commits": rows}


def keep(store: Store, chosen: argparse.Namespace) -> Report:
    commit_in(store, chosen.step)  # there must be one
    return {"step": chosen.step, "pinned": True, "changed": pin(store, chosen.step)}


def release(store: Store, chosen: argparse.Namespace) -> Report:
    return {"step": chosen.step, "pinned": False, "changed": unpin(store, chosen.step)}


def rm(store: Store, chosen: argparse.Namespace) -> Report:
    """Remove one commit, its COMMIT first, and of its files those that no other COMMIT names. What retention would
    spare is only removed with --force."""
    steps = steps_in(store)
    if chosen.step not in steps:
        raise CheckpointError(f"{store.uri}/{commit_key(chosen.step)}: step {chosen.step} is not committed")
    spared = {
        "it is the newest checkpoint": chosen.step == steps[-1],
        "it is pinned": is_pinned(store, chosen.step),
        "somebody is reading it": chosen.step in being_read(store, time.time()),
    }
    if (reasons := [reason for reason, holds in spared.items() if holds]) and not chosen.force:
        raise UserError(f"step {chosen.step} is not removed: {' and '.join(reasons)}; --force removes it all the same")
    files = _files_of_its_own(store, chosen.step, steps)
    store.delete(commit_key(chosen.step))
    if any(map(is_frozen_key, files)):
        files = _without_what_newer_listings_name(store, chosen.step, files)
    for key in sorted(files):
        store.delete(key)
    unpin(store, chosen.step)
    return {"step": chosen.step, "removed": True, "files": len(files)}


def _files_of_its_own(store: Store, step: int, steps: Sequence[int]) -> set[str]:
    """The files of a commit that no other names; frozen weights only where every other COMMIT can be read."""
    try:
        files = {file.key for file in commit_in(store, step).files}
    except DamagedCommit:
        return set()
    unknown = bool(quarantined(store))
    for other in steps:
        try:
            files -= {file.key for file in commit_in(store, other).files} if other != step else set()
        except CheckpointError:
            unknown = True
    return {key for key in files if not (unknown and is_frozen_key(key))}


def _without_what_newer_listings_name(store: Store, step: int, files: set[str]) -> set[str]:
    """Less the frozen weights that a commit names which the first listing did not show. A listing that still shows the
    COMMIT that was just deleted is an old one, and says nothing: then all frozen weights stay."""
    steps = steps_in(store)
    if step in steps:
        return {key for key in files if not is_frozen_key(key)}
    for other in steps:
        try:
            files = files - {file.key for file in commit_in(store, other).files}
        except CheckpointError:
            return {key for key in files if not is_frozen_key(key)}
    return files


def _checked(store: Store, step: int, verified: set[str], progress: Callable[[int, int], None]) -> Report:
    began = time.monotonic()
    try:
        commit = commit_in(store, step)
        verify(store, commit, progress, verified)
    except DamagedCommit as damaged:
        return {"step": step, "verified": False, "error": str(damaged)}
    return {"step": step, "verified": True, "bytes": commit.bytes, "seconds": round(time.monotonic() - began, 3)}


def _put_back(store: Store, step: int, progress: Callable[[int, int], None]) -> Report:
    began = time.monotonic()
    try:
        commit = put_back(store, step, progress)
    except DamagedCommit as damaged:
        return {"step": step, "quarantined": True, "error": f"was set aside, and does not verify: {damaged}"}
    if commit is None:
        return {
            "step": step,
            "quarantined": True,
            "error": "was set aside because training failed from it, and stays aside",
        }
    seconds = round(time.monotonic() - began, 3)
    return {"step": step, "verified": True, "putBack": True, "bytes": commit.bytes, "seconds": seconds}


def _progress(chosen: argparse.Namespace) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        if not chosen.json and sys.stderr.isatty():
            print(f"\r{size(done)} of {size(total)}", end="\n" if done == total else "", file=sys.stderr)

    return show


def _text(command: str, report: Report) -> str:
    if command == "ls":
        rows = [_ls_line(row) for row in report["commits"]] or [
            "  no checkpoint; a job's folder is <checkpoint.uri>/<job uid>"
        ]
        aside = [f"quarantined: {', '.join(map(str, report['quarantined']))}"] if report["quarantined"] else []
        return "\n".join([report["folder"], *rows, *aside])
    if command == "verify":
        return "\n".join(
            f"step {row['step']}: "
            + (f"verified, {row['bytes']:,} bytes" if row.get("verified") else row["error"])
            + ("; it was set aside, and is put back" if row.get("putBack") else "")
            for row in report["commits"]
        )
    if command == "inspect":
        brief = {key: value for key, value in report.items() if key not in ("tensors", "config", "files")}
        lines = [f"{key}: {json.dumps(value)}" for key, value in brief.items()]
        if report["kind"] == "folder":
            return "\n".join(lines + [f"  {path_in_folder(f['key'])}: {f['bytes']:,} bytes" for f in report["files"]])
        return "\n".join(lines + [f"  {n}: {t['dtype']} {t['shape']}" for n, t in report["tensors"].items()])
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in report.items())


def _ls_line(row: Report) -> str:
    if "error" in row:
        return f"  step {row['step']:>9}  can't be read: {row['error']}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_seconds(row["committedAt"])))
    marks = " ".join(mark for mark in ("best", "pinned") if row[mark])
    loss = row["metrics"].get("evaluation_loss", row["metrics"].get("loss"))
    said = f"loss {loss:.4f}" if loss is not None else ""
    shared = f" ({size(row['addedBytes'])} of its own)" if row["addedBytes"] < row["bytes"] else ""
    amount = f"{size(row['bytes']):>10}{shared}"
    return f"  step {row['step']:>9}  {when}  {amount}  attempt {row['attempt']}  {said}  {marks}".rstrip()


COMMANDS: dict[str, tuple[Callable[[Store, argparse.Namespace], Report], str]] = {
    "ls": (ls, "list the checkpoints"),
    "inspect": (inspect, "what one checkpoint holds (the newest, if no step is given)"),
    "verify": (
        check,
        "read every byte of one checkpoint, or of all, and compare checksums; put back what was set aside and verifies",
    ),
    "pin": (keep, "keep a checkpoint whatever the retention policy says"),
    "unpin": (release, "take a pin back"),
    "rm": (rm, "remove a checkpoint"),
}


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m muster.trainer.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("folder", help="<checkpoint.uri>/<job uid>")
        if name != "ls":
            optional = name in ("inspect", "verify")
            command.add_argument("step", type=int, nargs="?" if optional else None)
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == "rm":
            command.add_argument("--force", action="store_true", help="even the newest, a pinned one or one being read")
    try:
        chosen = parser.parse_args(arguments)
        report = COMMANDS[chosen.command][0](open_store(chosen.folder), chosen)
    except (StorageError, UserError) as error:
        code = ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.STORAGE
        print(json.dumps({"error": str(error)}) if "--json" in arguments else f"error: {error}", file=sys.stderr)
        return int(code)
    print(json.dumps(report) if chosen.json else _text(chosen.command, report))
    return 0 if all(row.get("verified", True) for row in report.get("commits", [])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
