"""What holds for every test: a clean environment, no luck in the random numbers, and nothing left running."""

import contextlib
import functools
import gc
import json
import os
import signal
import socketserver
import ssl
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpcore2
import httpx2
import psutil
import pytest
import typer.testing
from httpx2._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

# The machine's settings must not reach a test, nor a test the machine's accounts.
for name in [name for name in os.environ if name.startswith(("MUSTER_", "PET_", "AWS_", "TORCHELASTIC_"))]:
    del os.environ[name]
for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):  # each test that is about colour or width sets its own
    os.environ.pop(name, None)
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
    HF_HUB_OFFLINE="1",
    # Several ranks and several test processes share few cores; more threads than one only get in each other's way.
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

# No deadline: timing decides no test. On the build server the examples are the same every time; elsewhere they explore.
explore = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", explore)
settings.register_profile("ci", explore, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "explore")

# Started in the background by a shell, we and all that we start would be deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Inherited by every process that a test starts, however deep, and still there when its parent is dead.
RUN_MARK = str(uuid.uuid4())
os.environ["MUSTERTESTS_RUN"] = RUN_MARK

# What a test has just told to end may need a moment.
GRACE_SECONDS = 60.0
# What a request that names no time-out may take: as much as any wait of a test (tests/polling.py).
REQUEST_SECONDS_MAX = 120.0


# The seconds that each test file took when `make test ARGS=--record-durations` (or test-long) last wrote them down:
# those of its quick tests, and those marked `long`. Files of less than a second have none.
DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write into tests/durations.json what each test file took; for a run of whole files that passes"
    parser.addoption("--record-durations", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecord())


class DurationRecord:
    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {"quick": defaultdict(float), "long": defaultdict(float)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport:  # a subtest's time is part of its test's
            file = report.nodeid.partition("::")[0]
            self.seconds["long" if "long" in report.keywords else "quick"][file] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = json.loads(DURATIONS.read_text())
        for kind, seconds in self.seconds.items():
            files = kept[kind] | {file: round(total) for file, total in seconds.items()}
            there = {file: total for file, total in files.items() if total and (DURATIONS.parents[1] / file).exists()}
            kept[kind] = dict(sorted(there.items()))
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect garbage once after the collection of tests, and never again look through what it has made: six thousand
    tests and the imported libraries live until the end. Looking took a fifth of the collection, and whole tests'
    time later."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    # As soon as before where much is made that lives on, but not after every 700 objects.
    gc.set_threshold(5_000, 10, 10)
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave alone, for `make test-long`, the files in which no test is long: to import them all takes half a minute of
    each process. A file that is named by itself is collected."""
    if config.option.markexpr != "long" or not collection_path.match("test_*.py"):
        return None
    named = any(collection_path == config.invocation_params.dir / word.split("::")[0] for word in config.args)
    return None if named or may_be_long(collection_path) else True


@functools.cache
def may_be_long(file: Path) -> bool:
    """Return whether the file's text says that a test is long, itself or by the marks of tests that need a browser."""
    return any(word in file.read_text() for word in ("mark.long", "IN_CHROMIUM"))


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and not may_be_long(item.path):
        raise pytest.UsageError(f"{item.nodeid} is long, and no text of its file says so: `make test-long` misses it")


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse two tests of one node id: pytest-xdist would run one of them, and pass over the rest without a word. Put
    the files that take longest first where several processes share them, so that none of them begins when the others
    have nothing left to do."""
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"{len(twice)} node ids stand for several tests each, the first is {twice[0]}")
    if hasattr(config, "workerinput"):
        longest_first(items, json.loads(DURATIONS.read_text()))


def longest_first(items: list[pytest.Item], durations: dict[str, dict[str, float]]) -> None:
    """Sort the tests by what their files take. Files that no run has written down come before all others."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for item in items:
        kinds[file_of(item)].add("long" if item.get_closest_marker("long") else "quick")
    written = {*durations["quick"], *durations["long"]}
    seconds = {
        file: sum(durations[kind].get(file, 0.0) for kind in of_file) if file in written else float("inf")
        for file, of_file in kinds.items()
    }
    items.sort(key=lambda item: -seconds[file_of(item)])


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(autouse=True, scope="session")
def certificates_read_once() -> Iterator[None]:
    """Spare each of httpx2's clients the list of certificate authorities. To read it takes 30 ms, many requests make a
    client of their own, and nearly all of them go to plain http."""
    read = httpcore2.default_ssl_context

    @functools.cache
    def kept(trust_env: bool, *_: str | None) -> ssl.SSLContext:
        return read(_trust_env=trust_env)

    def shared(*, _trust_env: bool = True) -> ssl.SSLContext:
        return kept(_trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", shared)
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_made_once() -> Iterator[None]:
    """Spare each call of CliRunner the making of all commands from their signatures. It takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_requests() -> Iterator[None]:
    """Let a request that names no time-out wait as long as any other wait of a test. Five seconds, which httpx2 gives
    such a request, are less than a busy machine may stand still."""
    default = httpx2.Timeout(REQUEST_SECONDS_MAX)
    with pytest.MonkeyPatch.context() as patch:
        for part in ("connect", "read", "write", "pool"):  # of the object that is the default of all its functions
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, part, getattr(default, part))
        yield


@pytest.fixture(autouse=True, scope="session")
def servers_stop_at_once() -> Iterator[None]:
    """Let the standard library's servers, on which others stand, look each 20 ms whether they are to stop. Each half
    a second, which is their default, is what the end of a test would wait for."""
    serve = socketserver.BaseServer.serve_forever

    def serve_forever(self: socketserver.BaseServer, poll_interval: float = 0.5) -> None:
        serve(self, min(poll_interval, 0.02))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer, "serve_forever", serve_forever)
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the module that leaves one of Muster's own processes behind, and end that process."""
    before = {process.pid for process in _muster_processes()}
    yield
    left = [process for process in _muster_processes() if process.pid not in before]
    psutil.wait_procs(left, timeout=GRACE_SECONDS)
    alive = [process for process in left if _is_ours(process)]  # a zombie that nobody reaps is no longer anything
    if not alive:
        return
    lines = [_describe(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    pytest.fail(f"{request.node.name} left {len(lines)} processes running (now killed):\n  " + "\n  ".join(lines))


def _muster_processes() -> list[psutil.Process]:
    """This test run's platforms, workers and ranks, but not what serves them (PostgreSQL, an S3 server)."""
    return [process for process in psutil.process_iter() if _is_ours(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        if process.pid == os.getpid() or process.environ().get("MUSTERTESTS_RUN") != RUN_MARK:
            return False
        return any(
            word.startswith(("muster.", "torch.distributed", "from multiprocessing.spawn"))
            or os.path.basename(word) in ("muster", "torchrun")
            for word in process.cmdline()
        )
    except psutil.Error:  # gone, or somebody else's
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
