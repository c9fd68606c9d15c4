"""Programs that do what programs should not: the launcher says what it was, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.polling import eventually
from tests.unit.worker.foreign_image import write_launcher

from muster.words.names import EXIT_RECORD, KEEPER_STATE, RANKS_ENDED, Env, ExitCode
from muster.words.signals import Heartbeat, WorkerExit

PATIENCE_SECONDS = 300.0  # for broken code only


@dataclass
class Program:
    """A worker that runs a program, started as an image's own Python starts it."""

    folder: Path
    launcher: Path
    process: subprocess.Popen[bytes] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    directory: Path | None = None
    """Working directory of the image; the worker's folder where there is none."""

    def write(self, name: str, text: str) -> None:
        path = self.folder / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, text: str = "", command: list[str] | None = None, ranks: int = 1, **program: Any) -> None:
        if text:
            self.write("train.py", text)
        document = {"program": {"command": command or ["train.py"], **program}, "checkpoint": {}}
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "PET_"))},
            Env.CONFIG: json.dumps(document),
            Env.WORKER_DIR: str(self.folder),
            Env.JOB_UID: "uid",
            "PET_NPROC_PER_NODE": str(ranks),
            **self.environ,
        }
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(self.launcher)],
                env=environ,
                cwd=self.directory or self.folder,
                stdout=log,
                stderr=log,
            )

    def end(self) -> WorkerExit:
        assert self.process is not None
        code = self.process.wait(PATIENCE_SECONDS)
        end = WorkerExit.model_validate_json((self.folder / EXIT_RECORD).read_text())
        assert end.exit_code == code, self.log()
        return end

    def run(self, *given: Any, **program: Any) -> WorkerExit:
        self.start(*given, **program)
        return self.end()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def there(self, name: str) -> Path:
        """Wait until the program has written this file of its working directory."""
        path = self.folder / "work" / name
        eventually(path.exists, f"{name}, with {self.log()}", PATIENCE_SECONDS)
        return path


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launcher")
    write_launcher(folder)
    return folder


@pytest.fixture
def program(tmp_path: Path, launcher: Path) -> Iterator[Program]:
    found = Program(tmp_path, launcher)
    yield found
    if found.process is not None and found.process.poll() is None:
        found.process.kill()
        found.process.wait()


TOUCH = "import os, pathlib, signal, sys, time\nrank = os.environ.get('RANK', '')\n"
FOR_EVER = "signal.pause()\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trian.py"], r"there is no file trian\.py in .*; did you mean train\.py\?"),
        (["nonesuch", "--fast"], "there is no command nonesuch in this image"),
        (["./run.sh"], r"run\.sh can't be executed; make it executable, or name its interpreter"),
        (["bin/none"], "there is no file bin/none"),
        (["./binary"], r"binary is no program for this machine"),
    ],
)
def test_a_command_that_can_t_be_started(program: Program, command: list[str], message: str) -> None:
    program.write("run.sh", "exit 0\n")
    program.write("binary", "\x00\x01no program\n")
    (program.folder / "work" / "binary").chmod(0o755)
    program.write("train.py", "")
    end = program.run(command=command)
    assert end.exit_code == ExitCode.USER_ERROR
    assert end.message.startswith("program.command: ")
    assert re.search(message, end.message), end.message


def test_a_program_that_ends_at_once(program: Program) -> None:
    end = program.run("import sys; print('the flag --data is missing', file=sys.stderr); sys.exit(3)")
    assert (end.exit_code, end.rank) == (3, 0)
    assert end.message == "rank 0 ended with exit code 3: the flag --data is missing"
    assert end.log_tail == "the flag --data is missing"


def test_ranks_have_torchrun_s_variables_and_lines_their_marks(program: Program) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MUSTER_STOP_FILE"]
    text = f"import os, json; print(json.dumps([os.environ.get(name) for name in {names!r}]), os.getcwd(), flush=True)"
    assert program.run(text, ranks=2).exit_code == 0
    stop, work = str(program.folder / "stop.json"), str(program.folder / "work")
    lines = [
        f'["0", "0", "2", "2", "0", "127.0.0.1", "{stop}"] {work}',
        f'[rank 1] ["1", "1", "2", "2", "0", "127.0.0.1", "{stop}"] {work}',
    ]
    assert sorted(program.log().splitlines()) == lines
    ended = json.loads((program.folder / "ranks-ended.json").read_text())
    assert sorted(each["rank"] for each in ended["ranks"]) == [0, 1]


def test_a_launcher_of_none_starts_the_command_once(program: Program) -> None:
    text = "import os; print(os.environ.get('RANK'), os.environ['LOCAL_WORLD_SIZE'], os.environ['PET_NPROC_PER_NODE'])"
    assert program.run(text, ranks=4, launcher="none").exit_code == 0
    assert program.log() == "None 4 4\n"


def test_a_pod_s_program_finds_the_files_of_its_image_and_writes_beside_them(program: Program, tmp_path: Path) -> None:
    """An image with the program in its working directory, and a folder of checkpoints that came with it."""
    image = tmp_path / "app"
    (image / "configs").mkdir(parents=True)
    (image / "configs" / "a.yaml").write_text("lr: 1\n")
    (image / "helper.py").write_text("LR = 1\n")
    (image / "out").mkdir()
    text = (
        "import helper, pathlib, sys\nassert helper.LR == 1 and pathlib.Path(sys.argv[1]).read_text() == 'lr: 1\\n'\n"
    )
    (image / "train.py").write_text(text + "pathlib.Path('out/state').write_text('s')\n")
    (program.folder / "work" / "out").mkdir(parents=True)  # checkpoint.folder, made by the keeper
    program.environ[Env.POD_IP] = "127.0.0.1"
    program.directory = image
    assert program.run(command=["train.py", "configs/a.yaml"]).exit_code == 0, program.log()
    assert (program.folder / "work" / "out" / "state").read_text() == "s"
    assert not (image / "out" / "state").exists()


def test_a_given_source_hides_the_image_s_own_files(program: Program, tmp_path: Path) -> None:
    image = tmp_path / "app"
    image.mkdir()
    (image / "train.py").write_text("")
    (program.folder / "prepared.json").write_text(json.dumps({"sourceDir": str(tmp_path / "source")}))
    program.environ[Env.POD_IP] = "127.0.0.1"
    program.directory = image
    assert "there is no file train.py" in program.run().message


def test_one_failed_rank_ends_the_others_and_explains_the_end(program: Program) -> None:
    text = TOUCH + "pathlib.Path(f'here-{rank}').touch()\n"
    text += "while rank == '1' and not pathlib.Path('here-0').exists(): time.sleep(0.01)\n"
    text += "if rank == '1': raise ValueError('a bad sample')\n" + FOR_EVER
    end = program.run(text, ranks=2)
    assert (end.exit_code, end.rank) == (1, 1)
    assert end.message == "rank 1 ended with exit code 1: ValueError: a bad sample"


def test_the_first_failure_is_in_the_log_before_the_others_are_gone(program: Program) -> None:
    """Rank 0 ends only once the log has the failure of rank 1."""
    text = TOUCH + "log = pathlib.Path(os.environ['MUSTER_WORKER_DIR'], 'log')\n"
    text += "def reported(*_):\n    while 'asked to stop' not in log.read_text(): time.sleep(0.01)\n    os._exit(9)\n"
    text += "if rank == '0': signal.signal(signal.SIGTERM, reported); pathlib.Path('here').touch(); signal.pause()\n"
    text += "while not pathlib.Path('here').exists(): time.sleep(0.01)\nraise ValueError('a bad sample')\n"
    end = program.run(text, ranks=2)
    assert (end.exit_code, end.rank) == (1, 1)
    # On a machine that stands still the reader of the pipe may come too late for the words of the error.
    report = (
        r"muster: rank 1 ended with exit code 1(: ValueError: a bad sample)?; the other ranks here are asked to stop"
    )
    assert re.search(report, program.log())


def test_a_traceback_that_torch_s_record_wrote_explains_an_end_without_output(program: Program) -> None:
    text = "import json, os, sys, traceback\ntry: raise ValueError('a bad sample')\nexcept ValueError as error:\n"
    text += "    extra = {'py_callstack': traceback.format_exc(), 'timestamp': '1'}\n"
    text += "    document = {'message': {'message': f'ValueError: {error}', 'extraInfo': extra}}\n"
    text += "    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps(document))\nsys.exit(1)\n"
    assert program.run(text).message == "rank 0 ended with exit code 1: ValueError: a bad sample"


def test_each_of_several_nodes_starts_a_command_once(program: Program) -> None:
    """The second of two nodes with four GPUs: its process is number 1, and not rank 4."""
    program.environ.update(
        PET_NNODES="2", PET_NODE_RANK="1", PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT="1", PYTHON_EXEC=sys.executable
    )
    end = program.run("import os; print(os.environ['GROUP_RANK']); raise SystemExit(3)", ranks=4, launcher="none")
    assert (end.exit_code, end.rank, end.log_tail) == (3, 1, "1")
    assert Heartbeat.model_validate_json((program.folder / "rank-1.json").read_text()).rank == 1


def test_the_program_runs_under_the_python_that_its_environment_names(program: Program) -> None:
    """torchrun's PYTHON_EXEC."""
    program.environ["PYTHON_EXEC"] = "/nonesuch/python"
    assert "/nonesuch/python can't be started" in program.run("pass").message


def test_a_full_disk_under_the_log_ends_neither_program_nor_launcher(program: Program) -> None:
    (program.folder / "log").symlink_to("/dev/full")
    program.start("print('hello', flush=True); raise SystemExit(7)")
    assert program.process is not None
    assert program.process.wait(PATIENCE_SECONDS) == 7
    end = WorkerExit.model_validate_json((program.folder / EXIT_RECORD).read_text())
    assert (end.exit_code, end.log_tail) == (7, "hello")


def test_an_exit_code_of_0_after_a_failed_collective(program: Program) -> None:
    text = "import traceback\nclass DistBackendError(RuntimeError): pass\ntry: raise DistBackendError("
    text += "'NCCL error: remote process exited')\nexcept DistBackendError: traceback.print_exc()\n"
    end = program.run(text)
    assert end.exit_code == ExitCode.PEER_LOST
    assert "ended with exit code 0, but the last that it wrote is a failed collective" in end.message


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(program: Program) -> None:
    program.environ["MUSTER_GRACE_SECONDS"] = "0.2"
    program.start(TOUCH + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\npathlib.Path('here').touch()\n" + FOR_EVER)
    program.there("here")
    assert program.process is not None
    program.process.send_signal(signal.SIGTERM)
    end = program.end()
    assert end.exit_code == ExitCode.PREEMPTED_NO_COMMIT
    assert "asked to stop (SIGTERM) and did not end in time; no checkpoint was published after that" in end.message


@pytest.mark.parametrize(("committed", "code"), [(True, ExitCode.PREEMPTED_COMMITTED), (False, 86)])
def test_a_program_that_saves_when_asked(program: Program, committed: bool, code: int) -> None:
    """Each rank has its signal and the file; one ends long before the other, which is given its time."""
    text = TOUCH + "keeper = pathlib.Path(os.environ['MUSTER_WORKER_DIR']) / 'keeper.json'\n"
    text += "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(os.environ['MUSTER_STOP_FILE']))\n"
    text += "pathlib.Path(f'here-{rank}').touch()\nwhile not asked: time.sleep(0.01)\n"
    text += "assert pathlib.Path(asked[0]).exists()\nif rank == '1': sys.exit(4)\n"
    at = "time.time()" if committed else "1.0"
    text += f'keeper.write_text(\'{{"state": "done", "committedAt": %f}}\' % {at})\n'
    program.write("prepared.json", "")
    (program.folder / "prepared.json").write_text(json.dumps({"workDir": str(program.folder / "work")}))
    program.start(text, ranks=2)
    for rank in range(2):
        program.there(f"here-{rank}")
    assert program.process is not None
    program.process.send_signal(signal.SIGTERM)
    assert program.end().exit_code == code
    assert json.loads((program.folder / "stop.json").read_text())["reason"] == "SIGTERM"


def test_what_saves_for_a_dead_rank_is_waited_for(program: Program) -> None:
    saver = "import json, os, pathlib, signal, sys, time\nos.setsid()\nrank, launcher = map(int, sys.argv[1:])\n"
    saver += "folder = pathlib.Path(os.environ['MUSTER_WORKER_DIR'])\n"
    saver += "(folder / '.new').write_text(json.dumps({'pid': os.getpid()}))\n"
    saver += "(folder / '.new').rename(folder / 'rank-0.saver.json')\n"
    saver += "while os.getppid() == rank: time.sleep(0.01)\n"
    saver += "assert os.getppid() == launcher\n"
    saver += "for part in range(1, 101):\n    time.sleep(0.01)\n    (folder / 'saved').write_text(str(part))\n"
    program.write("saver.py", saver)
    text = TOUCH + "import os, signal, subprocess\n"
    text += "own = [str(os.getpid()), os.environ['MUSTER_LAUNCHER_PID']]\n"
    text += "subprocess.Popen([sys.executable, 'saver.py', *own])\n"
    text += "while not pathlib.Path(os.environ['MUSTER_WORKER_DIR'], 'rank-0.saver.json').exists(): time.sleep(0.01)\n"
    text += "os.kill(os.getpid(), signal.SIGKILL)\n"
    assert program.run(text).exit_code == 137
    assert (program.folder / "saved").read_text() == "100"


def test_daemons_die_with_the_worker(program: Program) -> None:
    daemon = "import os, signal\nos.setsid()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    daemon += "open('daemon.new', 'w').write(str(os.getpid()))\nos.rename('daemon.new', 'daemon')\nsignal.pause()\n"
    program.write("daemon.py", daemon)
    text = TOUCH + "import subprocess\nsubprocess.Popen([sys.executable, 'daemon.py'])\n"
    text += "while not pathlib.Path('daemon').exists(): time.sleep(0.01)\n"
    assert program.run(text).exit_code == 0
    pid = int((program.folder / "work" / "daemon").read_text())
    assert "1 processes that the program left running were ended with it" in program.log()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the daemon's end", PATIENCE_SECONDS)


def test_ranks_die_with_a_launcher_that_is_killed(program: Program) -> None:
    program.start(
        TOUCH + "pathlib.Path('pid.new').write_text(str(os.getpid()))\nos.rename('pid.new', 'pid')\n" + FOR_EVER
    )
    pid = int(program.there("pid").read_text())
    assert program.process is not None
    program.process.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the rank's end", PATIENCE_SECONDS)


def test_a_program_that_closes_its_outputs_and_changes_directory_runs_on(program: Program) -> None:
    text = TOUCH + "os.close(1); os.close(2); os.chdir('/')\n"
    text += "folder = pathlib.Path(os.environ['MUSTER_WORKER_DIR'])\n(folder / 'work' / 'here').touch()\nsys.exit(5)\n"
    end = program.run(text)
    assert end.exit_code == 5
    assert end.message == "rank 0 ended with exit code 5, and said nothing; see its log"
    assert (program.folder / "work" / "here").exists()


def test_what_the_program_reports_is_in_its_heartbeat_and_metrics(program: Program) -> None:
    """A report as Hugging Face's Trainer sends it, and one by a stranger, which is refused."""
    text = (
        TOUCH
        + """
import json, urllib.request
url, path = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]
def send(token):
    metrics = {"loss": 1.25, "current_step": 30, "total_steps": 120, "learning_rate": 0.001}
    status = {"progressPercentage": 25, "estimatedRemainingSeconds": 90, "lastUpdatedTime": "2026-01-01T00:00:00Z",
        "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()]}
    request = urllib.request.Request(url, json.dumps({"trainerStatus": status}).encode(), {
        "Authorization": "Bearer " + token, "Content-Type": "application/json"}, method="POST")
    try: return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error: return error.code
assert send("guess") == 401
assert send(open(path).read()) == 200
pathlib.Path("sent").touch()
while not pathlib.Path("seen").exists(): time.sleep(0.01)
"""
    )
    program.start(text)
    program.there("sent")

    def beat() -> Heartbeat | None:
        path = program.folder / "rank-0.json"
        found = Heartbeat.model_validate_json(path.read_text()) if path.exists() else None
        return found if found is not None and found.step == 30 else None

    found = eventually(beat, "a heartbeat with the step", PATIENCE_SECONDS)
    assert found is not None
    assert found.last_step is not None
    last = found.last_step
    assert (last.loss, last.steps, last.lr, last.values) == (1.25, 120, 0.001, {"remaining_seconds": 90.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{found.metrics_port}/metrics") as reply:
        page = reply.read().decode()
    assert 'rank="0"} 30.0' in next(line for line in page.splitlines() if line.startswith("muster_trainer_step{"))
    assert "muster_trainer_loss{" in page
    (program.folder / "work" / "seen").touch()
    assert program.end().exit_code == 0


def test_a_flood_of_output_fills_no_disk(tmp_path: Path) -> None:
    from muster.worker.output import TAIL_OF_FLOOD_BYTES, RankOutput

    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    output = RankOutput([0, 1], sink=log, file_bytes_max=10_000)
    writers = {rank: os.dup(writer) for rank, writer in output.writers.items()}
    output.start()
    for number in range(20_000):
        os.write(writers[0], b"line %06d\n" % number)
    os.write(writers[1], b"the other\nrank")
    for writer in writers.values():
        os.close(writer)
    output.finish()
    text = (tmp_path / "log").read_text()
    assert len(text) < 10_000 + 2 * TAIL_OF_FLOOD_BYTES + 1_000
    assert text.startswith("line 000000\nline 000001\n")
    assert "the rest is left out until its end" in text
    assert "bytes of output were left out here; these are the last" in text
    assert "line 019999\n" in text
    assert "[rank 1] the other\n[rank 1] rank" in text
    assert output.tail(1) == "the other\nrank"


def test_a_rank_that_has_ended_is_read_to_its_end(tmp_path: Path) -> None:
    from muster.worker.output import RankOutput

    output = RankOutput([0], sink=os.open(os.devnull, os.O_WRONLY))
    writer = os.dup(output.writers[0])
    output.start()
    os.write(writer, b"last words")
    os.close(writer)
    assert output.tail(0, PATIENCE_SECONDS) == "last words"
    output.finish()


def test_ranks_that_run_on_long_after_another_ended_well(tmp_path: Path) -> None:
    from muster.worker.launcher import WorkerWatcher
    from muster.worker.ranks import ProcessEnd

    class Ranks:
        def pids(self) -> dict[int, int]:
            return {1: os.getpid()}

    class Beats:
        moved_at = 100.0

        def done(self, rank: int) -> None:
            pass

    watcher = WorkerWatcher(Ranks(), Beats(), set(), lambda found: None, uneven_seconds=60.0)  # type: ignore[arg-type]
    assert watcher.look(1_000.0) is None, "none has ended"
    watcher.ended(ProcessEnd(0, 0, 110.0))
    assert watcher.look(169.0) is None
    found = watcher.look(230.0)
    assert found is not None
    assert found["message"] == (
        "rank 0 ended with exit code 0 while rank 1 ran on for 2 min, and nothing was seen of it for 2: a program is "
        "done when all its ranks have ended"
    )
    assert found["rank"] == 1


def test_a_keeper_that_dies_over_the_last_checkpoint_is_no_success(program: Program) -> None:
    """Whoever starts the launcher leaves it a keeper; this one dies as soon as it hears that the ranks are gone."""
    program.write("train.py", "")
    keeper = f"while [ ! -e {program.folder}/{RANKS_ENDED} ]; do sleep 0.02; done"
    code = f"import os, subprocess, sys; subprocess.Popen(['sh', '-c', {keeper!r}]); "
    code += f"os.execv(sys.executable, [sys.executable, '-I', {str(program.launcher)!r}])"
    program.launcher = program.folder / "start.py"
    program.launcher.write_text(code)
    end = program.run()
    assert end.exit_code == ExitCode.STORAGE
    assert end.message.startswith("the process that keeps the program's checkpoints ended before it had published them")


def test_a_program_that_had_ended_before_it_was_asked_to_stop_has_ended(program: Program) -> None:
    """The wish comes while the keeper still publishes what the program saved last."""
    folder = program.folder
    program.write("train.py", "")
    keeper = f"while [ ! -e {folder}/stop.json ]; do sleep 0.02; done; "
    keeper += f'echo \'{{"state": "done"}}\' > {folder}/keeper.new; mv {folder}/keeper.new {folder}/{KEEPER_STATE}'
    code = f"import os, subprocess, sys; subprocess.Popen(['sh', '-c', {keeper!r}]); "
    code += f"os.execv(sys.executable, [sys.executable, '-I', {str(program.launcher)!r}])"
    program.launcher = folder / "start.py"
    program.launcher.write_text(code)
    program.start()
    eventually((folder / RANKS_ENDED).exists, f"the ranks' end, with {program.log()}", PATIENCE_SECONDS)
    assert program.process is not None
    program.process.send_signal(signal.SIGTERM)
    end = program.end()
    assert (end.exit_code, end.message) == (0, "")


def test_a_keeper_that_ends_before_the_program_ends_the_worker() -> None:
    from muster.worker.launcher import WorkerWatcher

    gone = subprocess.Popen(["true"])
    gone.wait()

    class Ranks:
        def pids(self) -> dict[int, int]:
            return {0: os.getpid()}

    watcher = WorkerWatcher(Ranks(), None, {gone.pid}, lambda found: None)  # type: ignore[arg-type]
    found = watcher.look(1.0)
    assert found is not None
    assert found["exitCode"] == ExitCode.STORAGE


_WRITES = "import os; open(os.environ['MUSTER_RESULTS'], 'w').write({text!r})"


def test_the_numbers_that_a_program_leaves_are_in_its_exit_record(program: Program) -> None:
    (program.folder / "results.json").write_text('{"of_an_earlier_attempt": 1}')
    assert program.run("pass").results == {}
    end = program.run(_WRITES.format(text='{"acc": 0.5}'))
    assert (end.exit_code, end.results, end.results_fault) == (0, {"acc": 0.5}, "")


def test_results_that_can_not_be_read_are_said_with_the_reason(program: Program) -> None:
    end = program.run(_WRITES.format(text='{"acc": "high"}'))
    assert (end.exit_code, end.results) == (0, {})
    assert end.results_fault.endswith("results.json: 'acc' must be a number, not \"high\"")
    assert f"the program's results are left out: {end.results_fault}" in program.log()
    failed = program.run(_WRITES.format(text='{"acc": 0.5}') + "; raise SystemExit(3)")
    assert (failed.exit_code, failed.results) == (3, {})
