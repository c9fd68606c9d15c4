"""Cause of a program's end, by exit codes and by the last that its ranks wrote."""

from __future__ import annotations

import signal

import pytest

from muster.words.names import ExitCode
from muster.worker.exit_record import judge, read_words
from muster.worker.ranks import ProcessEnd

HEAD = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n    main()\n'
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
FULL_DISK = (  # torch.save of torch 2.13 on a full tmpfs
    "RuntimeError: basic_ios::clear: iostream error" + CHAIN + HEAD
    + "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598"
)  # fmt: skip
PEER = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
WATCHDOG = (
    "[rank0]:[E1128 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.\nFatal Python error: Aborted\n"
)


@pytest.mark.parametrize(
    ("tail", "code", "words"),
    [
        (HEAD + CUDA, ExitCode.OUT_OF_MEMORY, "CUDA out of memory"),
        (HEAD + "MemoryError", ExitCode.OUT_OF_MEMORY, "MemoryError"),
        (HEAD + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying", 81, "RESOURCE"),
        (HEAD + "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", 81, "can't allocate"),
        (HEAD + PEER, ExitCode.PEER_LOST, "remote process exited"),
        (HEAD + "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:5", 88, "by peer"),
        (HEAD + "torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE", 84, "listen"),
        (HEAD + "OSError: [Errno 28] No space left on device: 'out/model.pt'", ExitCode.STORAGE, "No space left"),
        (HEAD + "RuntimeError: [at inline_container.cc:858] . PytorchStreamWriter failed writing", 83, ""),
        (HEAD + FULL_DISK, ExitCode.STORAGE, "RuntimeError: basic_ios::clear: iostream error"),
        (HEAD + "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598", 83, ""),
        (HEAD + "safetensors.SafetensorError: I/O error: No space left on device (os error 28)", 83, "No space left"),
        (HEAD + "ModuleNotFoundError: No module named 'torchvision'", ExitCode.USER_ERROR, "torchvision"),
        ("  File \"t.py\", line 1\n    a b\nSyntaxError: invalid syntax", 80, "SyntaxError: invalid syntax"),
        ("python: can't open file '/w/train.py': [Errno 2] No such file or directory", 80, "can't open file"),
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --fast", 80, "unrecognized arguments"),
        (WATCHDOG, ExitCode.HUNG, "Watchdog caught collective operation timeout"),
        (HEAD + "ValueError: the loss is bad", None, "ValueError: the loss is bad"),
        (HEAD + "mypackage.errors.DataError:\nsee the manifest", None, "mypackage.errors.DataError: see the manifest"),
        # The cause of a chain is its first error.
        (HEAD + "KeyError: 'a'" + CHAIN + HEAD + "RuntimeError: could not read a", None, "KeyError: 'a'"),
        # An error that was logged and got over is not the cause.
        (HEAD + CUDA + "\nretrying with half the batch\n" + HEAD + "ValueError: odd", None, "ValueError: odd"),
        # A launcher within the program reports its own ranks' end last.
        (HEAD + "MemoryError\n" + HEAD + "torch.distributed.elastic.errors.ChildFailedError:\n====", 81, "Memory"),
        # What torch puts before each line of a rank.
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\"\n[rank1]: " + CUDA, 81, "CUDA out of"),
        ("\x1b[31mRuntimeError\x1b[0m", None, "RuntimeError"),
        ("", None, ""),
    ],
)  # fmt: skip
def test_what_the_last_words_mean(tail: str, code: int | None, words: str) -> None:
    found = read_words(tail)
    assert found.exit_code == code
    assert words in found.text


def judged(ends: list[ProcessEnd], tails: dict[int, str], **given: int | bool | None) -> dict[str, object]:
    steps, oom = given.get("steps"), bool(given.get("oom_killed"))
    return judge(ends, lambda rank: tails.get(rank, ""), lambda rank: 7, steps, oom)


def test_the_rank_that_the_others_followed_from_explains_the_end() -> None:
    ends = [
        ProcessEnd(0, 1, 10.0),
        ProcessEnd(1, 1, 10.5),
        ProcessEnd(2, -signal.SIGTERM, 11.0),
        ProcessEnd(3, -9, 25.5),
    ]
    end = judged(ends, {0: HEAD + PEER, 1: HEAD + "ValueError: odd"})
    assert (end["exitCode"], end["rank"], end["step"]) == (1, 1, 7)
    assert end["message"] == "rank 1 ended with exit code 1: ValueError: odd"
    end = judged([ProcessEnd(0, 1, 10.0), ProcessEnd(1, -9, 10.5)], {0: HEAD + PEER})
    assert (end["exitCode"], end["rank"], end["signal"]) == (137, 1, 9)
    end = judged([ProcessEnd(0, 1, 10.0), ProcessEnd(1, -9, 10.5)], {0: HEAD + PEER}, oom_killed=True)
    assert (end["exitCode"], end["message"]) == (81, "rank 1 was killed by SIGKILL by the kernel, for want of memory")


def test_a_peer_that_ended_with_0_was_not_taken_away() -> None:
    ends = [ProcessEnd(0, 1, 10.0), ProcessEnd(1, 0, 9.5)]
    end = judged(ends, {0: HEAD + PEER})
    assert (end["exitCode"], end["rank"]) == (1, 0)
    assert str(end["message"]).endswith("rank 1 had ended with exit code 0 before, and was missing")
    assert judged([ends[0], ProcessEnd(1, 0, 12.0)], {0: HEAD + PEER})["exitCode"] == ExitCode.PEER_LOST


def test_codes_that_mean_something_to_muster_are_the_launcher_s_to_say() -> None:
    end = judged([ProcessEnd(0, 85, 10.0)], {})
    assert end["exitCode"] == 1
    assert "can't end with 85" in str(end["message"])
    assert judged([ProcessEnd(0, 82, 10.0)], {0: "nan"})["exitCode"] == ExitCode.NUMERIC


def test_a_failed_collective_is_no_success() -> None:
    ends = [ProcessEnd(0, 0, 10.0), ProcessEnd(1, 0, 10.0)]
    assert judged(ends, {0: "done", 1: HEAD + "ValueError: caught\ndone"})["exitCode"] == 0
    end = judged(ends, {0: HEAD + PEER})
    assert end["exitCode"] == ExitCode.PEER_LOST
    assert "ended with exit code 0, but the last that it wrote is a failed collective" in str(end["message"])
    assert judged(ends, {0: HEAD + PEER}, steps=7)["exitCode"] == 0, "it has taken all its steps"
