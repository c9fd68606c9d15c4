"""What a worker can reach of this machine, tried as a hostile job would, in a process that gave up the rest."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import errno
import gzip
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.polling import WAIT_SECONDS_MAX
from tests.unit.local.test_local_world import House, spec

from muster.local import mounts, seccomp
from muster.local import sandbox as fence
from muster.local.sandbox import ADVICE, Sandbox, available, enter, state_problems
from muster.recipe.document import JobSpec, parse_job
from muster.storage.records import read_records
from muster.storage.sources import LocalFile
from muster.words.base import dump_json
from muster.words.names import Env, ExitCode
from muster.words.state_folder import StateFolder

needs_seccomp = pytest.mark.skipif(not seccomp.has_filter(), reason="this machine has no seccomp filter")
needs_mounts = pytest.mark.skipif(not mounts.available(), reason="this machine lets nobody have mounts")
needs_landlock = pytest.mark.skipif(not available(), reason="this kernel has no Landlock")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return filled(tmp_path)


@pytest.fixture
def open_home() -> Iterator[Path]:
    """The same where other users come to, as they do not in pytest's own folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield filled(folder)


def filled(tmp_path: Path) -> Path:
    """The platform's state, another job's folders, and data beside them."""
    for name in ("state/admin-token", "state/muster.db", "state/cluster.db", "state/checkpoints/other/commit",
                 "state/jobs/other/attempt-1/worker-0/log", "state/cache/theirs/tokens", "state/jobs/own/fence.json",
                 "data/a.txt", "secret.txt", "elsewhere/b.txt"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("token")
    return tmp_path


def sandbox(home: Path, *read: Path) -> Sandbox:
    state = home / "state"
    own = (state / "jobs/own/attempt-1/worker-0", state / "jobs/own/tmp", state / "checkpoints/own")
    return Sandbox(
        state=str(state),
        read=tuple(map(str, read)),
        own_read=(str(state / "jobs/own"),),
        own_write=tuple(map(str, own)),
    )


def tried(box: Sandbox, attempts: dict[str, Callable[[], object]], uid: int = os.getuid()) -> dict[str, str]:
    """What came of each attempt in a process of its own that entered the sandbox: `done`, or the error's name."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = {}
        try:
            if uid != os.getuid():
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as a process that began as this user
            enter(box)
            for name, attempt in attempts.items():
                try:
                    attempt()
                    found[name] = "done"
                except (OSError, subprocess.CalledProcessError) as error:
                    is_denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)
                    found[name] = DENIED if is_denied else type(error).__name__
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    result: dict[str, str] = json.loads(told)
    return result


DENIED = "PermissionError"


@needs_landlock
def test_the_platforms_state_and_other_jobs_are_out_of_reach(home: Path) -> None:
    state, data = home / "state", home / "data"
    (data / "link").symlink_to(state / "admin-token")
    (data / "folder").symlink_to(state, target_is_directory=True)
    here = os.open("/", os.O_PATH)
    found = tried(sandbox(home, data), {
        "token": (state / "admin-token").read_text,
        "database": (state / "muster.db").read_text,
        "cluster": (state / "cluster.db").read_text,
        "another's log": (state / "jobs/other/attempt-1/worker-0/log").read_text,
        "another's commit": (state / "checkpoints/other/commit").read_text,
        "another project's data": (state / "cache/theirs/tokens").read_text,
        "a link in the data": (data / "link").read_text,
        "a linked folder in the data": (data / "folder" / "admin-token").read_text,
        "a way round": (data / ".." / "state" / "admin-token").read_text,
        "by a descriptor": lambda: os.open(str(state / "admin-token").lstrip("/"), os.O_RDONLY, dir_fd=here),
        "which jobs there are": lambda: os.listdir(state / "jobs"),
        "what nobody named": (home / "secret.txt").read_text,
        "its own fence": lambda: (state / "jobs/own/fence.json").write_text("{}"),
        "a fence in its place": lambda: (state / "jobs/own/beside").write_text("{}"),
        "the data": lambda: (data / "a.txt").write_text("poison"),
    })  # fmt: skip
    os.close(here)
    assert found == dict.fromkeys(found, DENIED)
    linked = {"token": lambda: os.link(state / "admin-token", state / "jobs/own/tmp/token")}
    assert tried(sandbox(home, data), linked) == {"token": "OSError"}, "EXDEV: nothing moves between folders"
    by_a_program = {"cat": lambda: subprocess.run(["/bin/cat", state / "admin-token"], check=True, stderr=-3)}
    assert tried(sandbox(home, data), by_a_program) == {"cat": "CalledProcessError"}


@needs_landlock
def test_what_a_worker_needs_is_within_reach(home: Path) -> None:
    state, data = home / "state", home / "data"
    worker_folder = state / "jobs/own/attempt-1/worker-0"

    def renamed() -> None:
        (worker_folder / "beside").write_text("x")
        (worker_folder / "beside").replace(worker_folder / "rank-0.json")

    def shared() -> None:
        Path("/dev/shm/muster-test").write_text("x")
        Path("/dev/shm/muster-test").unlink()

    found = tried(sandbox(home, data), {
        "the data": (data / "a.txt").read_text,
        "its own fence": (state / "jobs/own/fence.json").read_text,
        "its own folder": renamed,
        "its own checkpoints": lambda: (state / "checkpoints/own/shard").write_text("x"),
        "temporary files": lambda: (state / "jobs/own/tmp/x").write_text("x"),
        "shared memory": shared,
        "the interpreter": lambda: subprocess.run([sys.executable, "-c", "import json, muster.words"], check=True),
        "libraries": lambda: os.listdir("/usr/lib"),
        "what the kernel tells": Path("/proc/meminfo").read_text,
        "randomness": lambda: Path("/dev/urandom").open("rb").close(),
    })  # fmt: skip
    assert found == dict.fromkeys(found, "done")


@needs_landlock
def test_a_folder_around_the_state_folder_opens_all_but_that(home: Path) -> None:
    """Somebody names a glob in his home, where `~/.muster` is."""
    (home / "shortcut").symlink_to(home / "state")
    found = tried(sandbox(home, home), {
        "a file": (home / "secret.txt").read_text,
        "a folder": (home / "elsewhere/b.txt").read_text,
        "the list": lambda: os.listdir(home),
        "state": (home / "state/admin-token").read_text,
        "by a link": (home / "shortcut/admin-token").read_text,
    })  # fmt: skip
    assert found == {"a file": "done", "a folder": "done", "the list": "done", "state": DENIED, "by a link": DENIED}


@needs_landlock
def test_a_path_that_leads_into_the_state_folder_is_left_out(home: Path) -> None:
    """A link may have been put there between the operator's look and ours, also in place of the job's own folder."""
    state = home / "state"
    (home / "alias").symlink_to(state)
    (state / "jobs/own/tmp").symlink_to(state)
    found = tried(sandbox(home, home / "alias", state / "muster.db"), {
        "alias": (home / "alias/admin-token").read_text,
        "named itself": (state / "muster.db").read_text,
        "own folder": (state / "jobs/own/tmp/admin-token").read_text,
    })  # fmt: skip
    assert found == dict.fromkeys(found, DENIED)


@needs_landlock
def test_processes_outside_are_neither_read_nor_ended(home: Path) -> None:
    outside = os.getpid()
    found = tried(sandbox(home), {
        "environment": Path(f"/proc/{outside}/environ").read_bytes,
        "memory": lambda: os.open(f"/proc/{outside}/mem", os.O_RDONLY),
        "its files": lambda: os.readlink(f"/proc/{outside}/fd/0"),
        "its folder": lambda: os.listdir(f"/proc/{outside}/root/"),
        "end it": lambda: os.kill(outside, signal.SIGURG),
    })  # fmt: skip
    assert found == dict.fromkeys(found, DENIED)


USERS = (0, 12345) if os.getuid() == 0 else (os.getuid(),)  # root's jobs, and those of an ordinary user
IOPRIO_SET, SCHED_SETATTR, IO_URING_SETUP = {"aarch64": (30, 274, 425)}.get(platform.machine(), (251, 314, 425))


def syscall(number: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def in_a_child(attempt: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 0
        try:
            attempt()
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def victim(uid: int) -> Iterator[int]:
    """A process of the platform, as far as the kernel can tell: of the same user, and outside the sandbox."""
    user = uid if uid != os.getuid() else None
    with subprocess.Popen(["/bin/sleep", "600"], user=user) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@needs_seccomp
@pytest.mark.parametrize("uid", USERS)
def test_processes_outside_are_neither_limited_nor_slowed(home: Path, uid: int) -> None:
    """The kernel itself ends a process beyond its limit of CPU time, and Landlock knows nothing of limits."""
    attribute = (ctypes.c_uint32 * 12)(48)  # struct sched_attr of its own size: SCHED_OTHER with a nice value of 0
    with victim(uid) as pid:
        limits = Path(f"/proc/{pid}/limits")
        before = (limits.read_text(), os.getpriority(os.PRIO_PROCESS, pid))
        cores = os.sched_getaffinity(pid)
        found = tried(sandbox(home), {
            "end it": lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
            "take its files": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
            "its priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
            "everybody's priority": lambda: os.setpriority(os.PRIO_USER, 0, 19),
            "its class": lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
            "its parameters": lambda: os.sched_setparam(pid, os.sched_param(0)),
            "its attributes": lambda: syscall(SCHED_SETATTR, ctypes.c_int(pid), attribute, ctypes.c_uint(0)),
            "its disk": lambda: syscall(IOPRIO_SET, ctypes.c_int(1), ctypes.c_int(pid), ctypes.c_int(3 << 13)),
            "what no filter sees": lambda: syscall(IO_URING_SETUP, ctypes.c_uint(1), (ctypes.c_char * 120)()),
        }, uid)  # fmt: skip
        assert found == dict.fromkeys(found, DENIED)
        by_a_child = {"child": lambda: in_a_child(lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))}
        assert tried(sandbox(home), by_a_child, uid) == {"child": DENIED}
        bound = tried(sandbox(home), {"bind": lambda: os.sched_setaffinity(pid, {min(cores)})}, uid)
        assert bound == {"bind": "done"}, "libc starts no thread of OpenMP whose binding fails"
        assert os.sched_getaffinity(pid) == cores
        assert (limits.read_text(), os.getpriority(os.PRIO_PROCESS, pid)) == before


@needs_seccomp
@pytest.mark.parametrize("uid", USERS)
def test_owners_and_attributes_of_files_out_of_reach_stay(open_home: Path, uid: int) -> None:
    token = open_home / "state/admin-token"
    os.chown(token, uid, -1)
    before = token.stat()
    found = tried(sandbox(open_home), {
        "owner": lambda: os.chown(token, uid, uid),
        "owner of a link": lambda: os.lchown(token, uid, uid),
        "attribute": lambda: os.setxattr(token, "user.x", b"x"),
        "no attribute": lambda: os.removexattr(token, "user.x"),
    }, uid)  # fmt: skip
    assert found == dict.fromkeys(found, DENIED)
    assert (token.stat().st_uid, token.stat().st_gid) == (before.st_uid, before.st_gid)


@needs_mounts
@pytest.mark.parametrize("uid", USERS)
def test_modes_and_times_of_files_out_of_reach_stay(open_home: Path, uid: int) -> None:
    """A job that can't read the token let the machine's other users read it."""
    home = open_home
    token, own = home / "state/admin-token", home / "state/jobs/own/tmp"
    own.mkdir()
    for path in (home, *home.rglob("*")):
        os.chown(path, uid, -1)
        path.chmod(0o755)
    (own / "x").write_text("x")
    os.chown(own / "x", uid, -1)
    (home / "state/checkpoints/own").symlink_to(home / "state")
    token.chmod(0o600)
    before = token.stat()
    found = tried(sandbox(home, home / "data"), {
        "token": lambda: token.chmod(0o644),
        "state": lambda: (home / "state").chmod(0o755),
        "by a link in the place of its own folder": lambda: (home / "state/checkpoints/own/admin-token").chmod(0o644),
        "what it reads": lambda: (home / "data/a.txt").chmod(0),
        "elsewhere": lambda: (home / "secret.txt").chmod(0o644),
        "times": lambda: os.utime(token, (0, 0)),
        "in mounts of its own": lambda: in_new_mounts(lambda: token.chmod(0o644)),
    }, uid)  # fmt: skip
    assert found == dict.fromkeys(found, DENIED)
    assert (token.stat().st_mode, token.stat().st_mtime) == (before.st_mode, before.st_mtime)
    found = tried(sandbox(home), {"own": lambda: (own / "x").chmod(0o600), "own times": (own / "x").touch}, uid)
    assert found == dict.fromkeys(found, "done")


def in_new_mounts(attempt: Callable[[], object]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x20000)  # with all privileges there, where it is allowed
    libc.mount(None, b"/", None, ctypes.c_ulong(0x20 | 0x1000), None)  # MS_REMOUNT, MS_BIND
    attempt()


@pytest.mark.parametrize("uid", USERS)
def test_a_worker_has_no_privilege_and_gets_none(home: Path, uid: int) -> None:
    """With CAP_NET_RAW a job of root reads everybody's tokens off the loopback."""

    def privileges() -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        left = [line for line in lines if line.startswith("Cap") and int(line.split()[1], 16)]
        if uid == 0 and left:  # the bounding set of others is what a program with privileges could give, and none may
            raise OSError(str(left))

    found = tried(sandbox(home), {"own": privileges, "of a child": lambda: in_a_child(privileges)}, uid)
    assert found == dict.fromkeys(found, "done")
    found = tried(sandbox(home), {
        "listen to the network": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
        "raw packets": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP),
        "another root": lambda: os.chroot("/"),
    }, uid)  # fmt: skip
    assert found == dict.fromkeys(found, DENIED)
    assert tried(sandbox(home), {"another user": lambda: os.setuid(uid + 1)}, uid)["another user"] != "done"


USEFUL = """
import multiprocessing, os, pathlib, resource, shutil, tempfile
import psutil

def double(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    me = psutil.Process()
    assert me.cpu_affinity() and me.nice() is not None and me.children(recursive=True) is not None
    assert me.rlimit(psutil.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.nice(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "a").write_text("x")
        (folder / "a").chmod(0o600)
        shutil.copytree(folder, folder / "b", dirs_exist_ok=False, ignore=shutil.ignore_patterns("b"))
        shutil.move(folder / "b" / "a", folder / "c")
"""


@needs_seccomp
def test_what_libraries_do_to_their_own_processes_and_files_still_works(home: Path) -> None:
    script = home / "state/jobs/own/tmp/useful.py"
    script.parent.mkdir(parents=True)
    script.write_text(USEFUL)
    environment = {**os.environ, "TMPDIR": str(script.parent)}
    works = {"it": lambda: subprocess.run([sys.executable, script], check=True, env=environment, cwd=script.parent)}
    assert tried(sandbox(home), works) == {"it": "done"}


@needs_seccomp
def test_threads_that_openmp_binds_start(home: Path) -> None:
    """libgomp binds them by their numbers, which a filter can't tell from another's."""
    program = (
        "import torch; torch.set_num_threads(2); assert torch.ones(400, 400).mm(torch.ones(400, 400)).max() == 400"
    )
    own = home / "state/jobs/own/tmp"
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2", "TMPDIR": str(own)}
    works = {"it": lambda: subprocess.run([sys.executable, "-c", program], check=True, env=environment)}
    assert tried(sandbox(home), works) == {"it": "done"}


def of(**changes: Any) -> JobSpec:
    document = spec()
    for path, value in changes.items():
        place = document
        *way, last = path.split("__")
        for key in way:
            place = place.setdefault(key, {})
        place[last] = value
    return parse_job({"metadata": {"name": "tiny"}, "spec": document}).spec


def test_a_job_that_names_what_lies_in_the_state_folder_is_refused(home: Path) -> None:
    state = StateFolder(home / "state")
    (home / "link").symlink_to(state.root)

    def places(**changes: Any) -> list[str]:
        return [problem.path for problem in state_problems(of(**changes), state)]

    for source in ("state/admin-token", "state/muster.db", "link/muster.db", "state/*.db", "state/checkpoints/other"):
        found = places(training__data__train=[{"source": f"file://{home}/{source}"}])
        assert found == ["spec.training.data.train[0].source"], source
    assert places(training__data__tokenizer=f"{state.root}/x.json") == ["spec.training.data.tokenizer"]
    assert places(training__model={"source": f"file://{state.checkpoints}/other"}) == ["spec.training.model.source"]
    assert places(training__model={"from": {"uri": f"file://{state.jobs}/other"}}) == ["spec.training.model.from.uri"]
    for uri in (state.checkpoints / "other", state.jobs, state.root, home / "link" / "checkpoints" / "other"):
        assert places(checkpoint={"uri": f"file://{uri}"}) == ["spec.checkpoint.uri"], uri
    assert not places(training__model={"from": {"uri": f"file://{state.checkpoints}/other"}})
    assert not places(checkpoint={"uri": f"file://{state.checkpoints}"})
    assert not places(training__data__train=[{"source": f"{home}/*.txt"}], checkpoint={"uri": f"file://{home}/ckpt"})


def test_an_address_costs_no_more_than_the_folders_of_it_that_are_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API judges what anybody writes: a glob of 900 parts was looked up 900 times, each part of it."""
    looks = []

    def counted(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def asked(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            looks.append(path)
            return ask(path, *arguments, **options)

        return asked

    monkeypatch.setattr(os, "stat", counted(os.stat))
    monkeypatch.setattr(os, "lstat", counted(os.lstat))
    state = StateFolder(home / "state")
    (home / "link").symlink_to(home)
    for deep in ("/*" * 900, "/x" * 900, f"{home}/link/x" + "/y" * 900, f"{home}" + "/*/.." * 300, "/x/.." * 400):
        looks.clear()
        assert not state_problems(of(training__data__train=[{"source": deep}]), state), deep
        assert len(looks) < 20 * len(home.parts), (deep, len(looks))
    for there in (f"{home}/.." * (1_900 // len(f"{home}/..")), "/usr/.." * 270):
        looks.clear()
        assert not state_problems(of(training__data__train=[{"source": f"{there}/nothing"}]), state), there
        walked = sum(len(os.fspath(path)) for path in looks)
        assert walked < 40 * len(there), (there, walked)  # the kernel goes along each path that it looks up
    missing = f"{home}/missing/../link/state/admin-token"
    assert state_problems(of(training__data__train=[{"source": missing}]), state), "what is there later leads there"


async def test_the_operator_gives_a_worker_its_own_places_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/modules:relative")
    house = House(tmp_path / "state")
    house.world._starter.how = replace(house.world._starter.how, readable=("/srv/models",))
    await house.create(0)
    try:
        box = Sandbox.model_validate_json(house.environment(0)[Env.SANDBOX])
        temporary = house.environment(0)["TMPDIR"]
    finally:
        await house.world.stop_workers(0.0)
    root, job = tmp_path / "state", tmp_path / "state" / "jobs" / house.uid
    assert (box.state, temporary) == (str(root), str(job / "tmp"))
    assert box.own_read == (str(job), str(root / "notices"))
    folders = (job / "attempt-1/worker-0", job / "tmp", root / "cache/default", root / "checkpoints" / house.uid)
    assert box.own_write == tuple(map(str, folders))
    assert {"/srv/models", f"{tmp_path}/modules"} <= set(box.read)
    assert not {"relative", str(Path.home()), ""} & set(box.read)


def test_a_refused_address_ends_the_worker_before_its_ranks(tmp_path: Path) -> None:
    """Whoever goes round the API meets the launcher."""
    folder, why = tmp_path / "worker", "spec.checkpoint.uri: lies in Muster's own state folder"
    box = Sandbox(state=str(tmp_path / "state"), read=(), own_read=(), own_write=(str(folder),), refused=why)
    ended = subprocess.run(
        [sys.executable, "-m", "muster.trainer.launch"],
        env={**os.environ, Env.SANDBOX: dump_json(box), Env.WORKER_DIR: str(folder)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == ExitCode.USER_ERROR, ended.stderr
    assert json.loads((folder / "exit.json").read_text())["message"] == why


@needs_landlock
def test_a_python_path_that_may_not_be_read_ends_the_worker_with_advice(tmp_path: Path) -> None:
    """Python itself would pass over it, and the job would train without what it asked for."""
    folder, modules = tmp_path / "worker", tmp_path / "modules"
    folder.mkdir()
    modules.mkdir()
    box = Sandbox(state=str(tmp_path / "state"), read=(), own_read=(), own_write=(str(folder),))
    named = {f"{Env.OWN_PREFIX}PYTHONPATH": f"{tmp_path}/absent:relative:{modules}"}
    ended = subprocess.run(
        [sys.executable, "-m", "muster.trainer.launch"],
        env={**os.environ, **named, Env.SANDBOX: dump_json(box), Env.WORKER_DIR: str(folder)},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert ended.returncode == ExitCode.USER_ERROR, ended.stderr
    message = json.loads((folder / "exit.json").read_text())["message"]
    assert message == f"PYTHONPATH names {modules}, which can't be read: permission denied ({ADVICE})"


def test_what_a_job_has_processes_load_is_not_loaded_by_its_launcher(tmp_path: Path) -> None:
    """A library in it would run with all that the platform's user may do; the ranks have given that up. The launcher
    is caught while it asks its fence, by a proxy that is a variable of the job too."""
    library, maps = tmp_path / "planted.so", "print(open('/proc/self/maps').read())"
    shutil.copy(_ctypes.__file__, library)
    variables = {"LD_PRELOAD": str(library), "http_proxy": ""}
    plain = {**os.environ, **variables}
    assert (
        str(library) in subprocess.run([sys.executable, "-c", maps], env=plain, capture_output=True, text=True).stdout
    )

    box = Sandbox(state=str(tmp_path / "state"), read=(), own_read=(), own_write=(str(tmp_path / "worker"),))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        variables["http_proxy"] = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        own = {f"{Env.OWN_PREFIX}{name}": value for name, value in variables.items()}
        ours = {
            Env.SANDBOX: dump_json(box),
            Env.WORKER_DIR: str(tmp_path / "worker"),
            Env.FENCE: "http://a.invalid/job",
        }
        orders = {
            Env.JOB_UID: "x",
            Env.CHECKPOINT_URI: f"file://{tmp_path}",
            Env.CONFIG: json.dumps({"training": spec()["training"]}),
        }
        command = [sys.executable, "-m", "muster.trainer.launch"]
        with subprocess.Popen(command, env={**os.environ, **own, **ours, **orders}, cwd=tmp_path) as launcher:
            proxy.settimeout(WAIT_SECONDS_MAX)
            asking, _ = proxy.accept()
            loaded = Path(f"/proc/{launcher.pid}/maps").read_text()
            launcher.kill()
            asking.close()
    assert _ctypes.__file__ in loaded, "what it loads is seen there"
    assert str(library) not in loaded


@needs_landlock
def test_a_name_inside_an_archive_is_no_path(home: Path) -> None:
    """gzip keeps a file's name, and this one says where another job's would be."""
    data, goal = home / "data" / "x.jsonl.gz", home / "state/jobs/own/tmp/planted"
    with data.open("wb") as raw, gzip.GzipFile(f"../../{goal.relative_to(home)}", "wb", fileobj=raw) as packed:
        packed.write(b'{"text": "hello"}\n')
    records = lambda: list(read_records(LocalFile(data, data.stat().st_size, ""), {}))  # noqa: E731
    assert tried(sandbox(home, home / "data"), {"read": records}) == {"read": "done"}
    (record,) = records()
    assert record.value == {"text": "hello"}
    assert not goal.exists()


@needs_seccomp
def test_a_kernel_without_landlock_still_gives_calls_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.local.sandbox.version", lambda: 0)
    with victim(os.getuid()) as pid:
        found = tried(sandbox(home), {
            "read": (home / "state/admin-token").read_text,
            "end": lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
        })  # fmt: skip
    assert found == {"read": "done", "end": DENIED}
    assert (home / "state/jobs/own/tmp").is_dir(), "TMPDIR is there all the same"


def test_a_kernel_that_can_not_keep_jobs_apart_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(landlock: int, machine: str, has_mounts: bool = True) -> list[str]:
        monkeypatch.setattr("muster.local.mounts.available", lambda: has_mounts)
        monkeypatch.setattr("muster.local.sandbox.version", lambda: landlock)
        monkeypatch.setattr("platform.machine", lambda: machine)
        return [" ".join(gap.split()[:3]) for gap in fence.gaps()]

    assert said(5, "x86_64") == ["can end your"]
    assert said(7, "riscv64") == ["can limit and"]
    assert said(7, "x86_64", has_mounts=False) == ["can change modes"]
    assert said(0, "s390x") == ["can read what", "can end your", "can limit and"]


@needs_seccomp
def test_a_kernel_that_has_all_of_it_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.local.sandbox.version", lambda: 7)
    monkeypatch.setattr("muster.local.mounts.available", lambda: True)
    assert fence.gaps() == ()
