"""What pages cost: the first useful paint, the bytes, how soon an event is seen, and what open pages take of the API.

    python benchmarks/web.py [--jobs 10000] [--steps 1000000] [--pages 200] [--events 40] [--json FILE] [--check]

The API runs as a process of its own, as `muster up` starts it, over a state folder with so many jobs, one of them with
a step log of so many steps; the pages are looked at by a real Chromium. Open pages are their streams and what a page
reads anew at each piece of news, so that no two hundred browsers are needed. --check: exit 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
from playwright.async_api import Browser, Page, async_playwright

from muster.local.cluster import LocalCluster
from muster.words.names import LOG, STEP_LOG
from muster.words.state_folder import StateFolder
from muster.words.status import Attempt, GangStatus, Phase, Progress

LOOKS = 5  # at each page, each in a browser that has kept nothing; the median counts
SUBMISSIONS = 60
AGAIN_SECONDS = 2.0  # until a page that was refused looks again
WARM_UP = 5
PAINT_SECONDS_MAX = 1.0
PAGE_BYTES_MAX = 300_000
EVENT_SECONDS_MAX = 1.0
OPEN_PAGES_BYTES_MAX = 200 << 20
LOG_BYTES = 1 << 30
TICKED, TICKED_STEPS = 20, 2_000  # jobs whose curves are drawn together, and the steps of each
# What somebody came for, on each page: it is painted when this is there and the browser has drawn twice since.
USEFUL = {
    "jobs": ("/jobs", "table.jobs tbody tr"),
    "sorted": ("/jobs?sort=loss&group=model&columns=training.optimizer.lr,loss", "table.jobs tbody tr"),
    "ticked": ("/jobs?picked={picked}", "#picked canvas"),
    "job": ("/jobs/{job}", ".timeline .lane-row"),
    "curves": ("/jobs/{job}", "#curves canvas"),
    "logs": ("/jobs/{job}/logs", "#log"),
    "fleet": ("/fleet", "#nodes-title"),
    "submit": ("/submit?example=pretrain-stdlib", "#plan .plan-facts"),
}


@dataclass
class Result:
    """Seconds and bytes. `paint` and `page_bytes` by page, `submit` as (median, 95th percentile) by open pages."""

    jobs: int
    steps: int
    paint: dict[str, float]
    page_bytes: dict[str, int]
    search_1gb: float
    event_p50: float
    event_max: float
    open_pages: int
    open_pages_bytes: int
    submit_alone: tuple[float, float]
    submit_beside: tuple[float, float]
    load: float

    def missed(self) -> list[str]:
        late = [f"{name}: {seconds:.2f} s" for name, seconds in self.paint.items() if seconds > PAINT_SECONDS_MAX]
        large = [f"{name}: {size:,} bytes" for name, size in self.page_bytes.items() if size > PAGE_BYTES_MAX]
        found = [f"painted late: {', '.join(late)}"] if late else []
        found += [f"large: {', '.join(large)}"] if large else []
        if self.event_max > EVENT_SECONDS_MAX:
            found.append(f"an event was seen after {self.event_max:.2f} s")
        if self.open_pages_bytes > OPEN_PAGES_BYTES_MAX:
            found.append(f"{self.open_pages} open pages take {self.open_pages_bytes / 2**20:.0f} MiB")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--events", type=int, default=40)
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        result = asyncio.run(measure(Path(folder), given.jobs, given.steps, given.pages, given.events))
    for name, value in asdict(result).items():
        print(f"{name:>18} {json.dumps(value)}")
    if given.json:
        Path(given.json).write_text(json.dumps(asdict(result), indent=2) + "\n")
    for words in result.missed():
        print(f"missed: {words}", file=sys.stderr)
    sys.exit(1 if given.check and result.missed() else 0)


async def measure(folder: Path, jobs: int, steps: int, pages: int, events: int) -> Result:
    with server(folder) as (url, pid):
        async with httpx2.AsyncClient(base_url=url, timeout=120) as client, chromium() as browser:
            uids = await submit(client, jobs)
            job = uids[-1]
            await lived(client, folder, job, steps)
            for uid in uids[:TICKED]:
                await trained(client, folder, uid, TICKED_STEPS)
            paint, sizes = {}, {}
            for name, (path, useful) in USEFUL.items():
                paint[name], sizes[name] = await looked_at(
                    browser, url, path.format(job=job, picked=",".join(uids[:TICKED])), useful
                )
                say(f"{name}: painted after {paint[name]:.2f} s, {sizes[name]:,} bytes")
            search = await searched(client, folder, job)
            seen = await events_seen(browser, url, folder, job, events)
            say(f"a log of 1 GiB searched in {search:.2f} s; events seen after {statistics.median(seen):.2f} s")
            alone = await submissions(url)
            before = resident(pid)
            async with open_pages(url, job, pages) as told:
                await told(pages)
                beside = await submissions(url)
                after = resident(pid)
            return Result(
                jobs, steps, paint, sizes, search, statistics.median(seen), max(seen), pages, max(0, after - before),
                alone, beside, os.getloadavg()[0],
            )  # fmt: skip


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# --- The platform ---------------------------------------------------------------------------------------------------


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """The API with its pages. Yields its address and process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "muster.api", "--state", str(folder), "--port", "0", "--no-auth"],
        env={**os.environ, "MUSTER_API_STREAMS_PER_PERSON_MAX": "100000"},
        stdout=subprocess.PIPE,
        stderr=(folder / "api.log").open("w"),
        text=True,
    )
    assert process.stdout is not None
    try:
        match = re.search(r"http://[^/]+", process.stdout.readline())
        assert match, (folder / "api.log").read_text()
        yield match[0], process.pid
    finally:
        process.terminate()
        process.wait(30)


def document(number: int) -> dict[str, Any]:
    training = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
        "batch": {"tokensPerStep": 16_384, "microBatch": 8},
        "length": {"steps": 2_000_000},
    }
    metadata = {"name": f"job-{number}", "labels": {"team": str(number % 10)}}
    return {"metadata": metadata, "spec": {"training": training, "gang": {"nodes": 2}}}


async def submit(client: httpx2.AsyncClient, jobs: int) -> list[str]:
    """Submit them, eight at a time, and wait until the cluster has all. Returns their ids."""
    numbers = iter(range(jobs))
    found: list[str] = []

    async def some() -> None:
        for number in numbers:
            reply = await client.post("/api/v1/jobs", json=document(number))
            reply.raise_for_status()
            found.append(reply.json()["id"])

    await asyncio.gather(*(some() for _ in range(8)))
    await until(client, found[-1], lambda told: told["handedOver"])
    return found


async def until(client: httpx2.AsyncClient, job: str, ready: Callable[[Any], bool], of: str = "") -> None:
    """Ask for the job, or for its `of`, until what is told is ready."""
    while not ready((await client.get(f"/api/v1/jobs/{job}{of}")).json()):  # noqa: ASYNC110 - over HTTP no one wakes us
        await asyncio.sleep(0.1)


_RECORD = {
    "type": "step",
    "attempt": 1,
    "lr": 1e-3,
    "tokens": 16_384,
    "dataWaitSeconds": 1e-3,
    "memoryBytes": 5_400_000,
    "values": {},
}


async def trained(client: httpx2.AsyncClient, folder: Path, job: str, steps: int) -> None:
    """Let the job have trained so many steps, as an operator and a trainer would have written it."""
    now = time.time()
    attempt = Attempt(
        number=1, created_at=now - steps, nodes=("node-0", "node-1"), workers=2, world_size=2, first_step_at=now - steps
    )
    operate(
        folder, job, phase=Phase.RUNNING, code="Running", because="training", since=now, attempt=1, attempts=(attempt,),
        gang=GangStatus(wanted=2, ready=2, nodes=("node-0", "node-1")),
        progress=Progress(at=now, step=steps, steps=2 * steps, loss=2.0, tokens_per_second=18_200.0, eta_seconds=9.0),
    )  # fmt: skip
    where = StateFolder(folder).worker(job, 1, 0)
    where.mkdir(parents=True)
    with (where / STEP_LOG).open("w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 3 / (1 + step / 1000) + (step * 7919 % 1000) / 5000
            record = {
                **_RECORD, "step": step, "steps": 2 * steps, "at": now - steps + step, "loss": loss,
                "gradNorm": 1 + step % 97 / 97, "tokensPerSecond": 18_000.0 + step % 890,
                "stepSeconds": 0.9 + step % 83 / 830,
            }  # fmt: skip
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    await until(client, job, lambda told: told["status"]["phase"] == "Running")
    # The API reads a step log as it grows; one that lies there whole takes a few looks, which no page waits for.
    await until(client, job, lambda told: not told["unread"], "/curves")


async def lived(client: httpx2.AsyncClient, folder: Path, job: str, steps: int) -> None:
    """The same, of a job that also has a log of a gigabyte."""
    await trained(client, folder, job, steps)
    line = b"step 1 of many: nothing is as it was before, and all is as it should be\n"
    with (StateFolder(folder).worker(job, 1, 0) / LOG).open("wb") as log:
        block = line * (4_000_000 // len(line))
        for _ in range(LOG_BYTES // len(block)):
            log.write(block)
        log.write(b"the needle in the hay\n" + line * 1000)


def operate(folder: Path, job: str, **changes: Any) -> None:
    """Write a status, as the operator would."""
    cluster = LocalCluster(StateFolder(folder).cluster)
    found = cluster.get(job)
    status = found.status.model_copy(update=changes)
    cluster.write_status(job, status, found.metadata.resource_version)


def resident(pid: int) -> int:
    """Bytes of memory that the process holds."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Rss:\s+(\d+)", text, re.MULTILINE)
    assert match
    return int(match[1]) * 1024


# --- The browser ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "there is no Chromium here: apt-get install chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        await browser.close()


async def looked_at(browser: Browser, url: str, path: str, useful: str) -> tuple[float, int]:
    """The median of the seconds from the click to the picture, and the bytes that came over the wire."""
    looks = [await one_look(browser, url + path, useful) for _ in range(LOOKS)]
    return statistics.median(seconds for seconds, _ in looks), max(size for _, size in looks)


async def one_look(browser: Browser, address: str, useful: str) -> tuple[float, int]:
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    requests: list[Any] = []
    page.on("requestfinished", lambda request: requests.append(request))
    await page.goto(address, wait_until="commit")
    await page.wait_for_selector(useful)
    seconds = float(await page.evaluate(_DRAWN))
    await page.wait_for_load_state("load")
    size = sum([await sent(request) for request in requests])
    await context.close()
    return seconds, size


# In seconds since the navigation began, once two frames are drawn.
_DRAWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
    done(performance.now() / 1000))))"""


async def sent(request: Any) -> int:
    sizes = await request.sizes()
    return int(sizes["responseBodySize"]) + int(sizes["responseHeadersSize"])


async def searched(client: httpx2.AsyncClient, folder: Path, job: str) -> float:
    """Seconds until the only line like that at the end of a log of 1 GiB is on the page, over as many pages as it
    takes."""
    began, since = time.perf_counter(), "0"
    while True:
        page = (await client.get(f"/jobs/{job}/logs", params={"find": "NEEDLE", "since": since})).text
        if "<mark>the needle in the hay</mark>" in page:
            return time.perf_counter() - began
        match = re.search(r"since=(\d+)\">Search on", page)
        assert match, page[-3_000:]
        since = match[1]


async def events_seen(browser: Browser, url: str, folder: Path, job: str, events: int) -> list[float]:
    """Seconds from each write of a status until an open page shows it: the API's own look at the cluster included."""
    page = await (await browser.new_context()).new_page()
    await page.goto(f"{url}/jobs/{job}")
    await page.wait_for_selector("[data-theme-toggle][data-shown]")
    await asyncio.sleep(1)
    found = []
    for number in range(events):
        words = f"event {number} of the benchmark"
        began = time.perf_counter()
        await asyncio.to_thread(operate, folder, job, because=words)
        await shown(page, words)
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.7)
    await page.context.close()
    return found


async def shown(page: Page, words: str) -> None:
    await page.wait_for_function("words => document.body.innerText.includes(words)", arg=words.capitalize(), polling=20)


# --- Many open pages ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_pages(url: str, job: str, pages: int) -> AsyncIterator[Any]:
    """So many streams, half of a job's page and half of the list; each reads its page anew at every piece of news, as
    the browser's script does: one look at a time."""
    ready = asyncio.Semaphore(0)
    refused: list[str] = []
    limits = httpx2.Limits(max_connections=2 * pages + 10, max_keepalive_connections=2 * pages + 10)

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        stream, path = (f"/live?job={job}", f"/jobs/{job}") if number % 2 else ("/live", "/jobs")
        async with client.stream("GET", stream, timeout=None) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("event: changed"):
                    # A page that is refused stays as it is and looks again, as the browser's script does.
                    while (await client.get(path, headers={"accept": "text/html"})).status_code != 200:
                        refused.append(path)
                        await asyncio.sleep(AGAIN_SECONDS)
                    ready.release()

    async def told(count: int) -> None:
        for _ in range(count):
            await ready.acquire()
        say(f"{count} pages are open; {len(refused)} looks were refused")

    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(pages)]
        try:
            yield told
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def submissions(url: str) -> tuple[float, float]:
    """Median and 95th percentile of the seconds of submissions, from a process of its own: what the open pages' readers
    compute here is not the API's."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = await loop.run_in_executor(process, timed_submissions, url)
    return statistics.median(found), statistics.quantiles(found, n=20)[18]


def timed_submissions(url: str) -> list[float]:
    """Seconds of each submission, two in a second as people and scripts send them."""
    found = []
    with httpx2.Client(base_url=url, timeout=120) as client:
        for _ in range(WARM_UP + SUBMISSIONS):
            sent = document(time.time_ns())
            began = time.perf_counter()
            client.post("/api/v1/jobs", json=sent).raise_for_status()
            took = time.perf_counter() - began
            found.append(took)
            time.sleep(max(0.0, 0.5 - took))
    return found[WARM_UP:]


if __name__ == "__main__":
    main()
