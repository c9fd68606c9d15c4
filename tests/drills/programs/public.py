"""python -m tests.drills.programs.public [--only NAME,NAME] [--lanes N] [--lightning PYTHON]

Programs of public libraries, untouched, as jobs of one machine: each once without a fault, and once with SIGKILL of a
rank, of a launcher and of all of a node, one after the other, each after a new checkpoint. The final weights must be
the same. torchtitan 0.3 needs a GPU (it imports Triton, and takes `cuda` where torch finds no accelerator); a loop of
Accelerate stands in its place. --lightning names a Python whose environment has Lightning; without, that program is
left out.
Exit status 1 where the weights of a program differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import queue
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.local.house import House
from tests.polling import eventually
from tests.processes import command_of, send

from muster.words.names import LOG
from muster.words.status import JobStatus, Phase

EXAMPLES = Path(__file__).parents[3] / "examples" / "programs"
END_SECONDS_MAX = 400.0
TRL = [
    "-m", "trl.scripts.sft", "--model_name_or_path", "model", "--dataset_name", "texts",
    "--output_dir", "out", "--max_steps", "500", "--save_steps", "10", "--per_device_train_batch_size", "2",
    "--max_length", "32", "--report_to", "none", "--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false",
    "--logging_steps", "1", "--disable_tqdm", "true",
]  # fmt: skip
# TRL's script resumes from a folder that its command names.
RESUMES = ' ${MUSTER_RESUME_DIR:+--resume_from_checkpoint "$MUSTER_RESUME_DIR"}'


@dataclass(frozen=True)
class PublicProgram:
    """A program: its words after `python`, how it is placed, and where its checkpoints lie."""

    name: str
    words: list[str]
    steps: int
    nodes: int = 2
    folder: str = "out"
    shell: str = 'exec "$@"'
    needs: str = ""
    """Library that the project's own environment lacks."""


PROGRAMS = (
    # It saves to its working directory.
    PublicProgram("ddp", ["plain.py"], 2_000, shell='cd out && exec "$1" "../$2"'),
    PublicProgram("fsdp2", ["fsdp2.py"], 1_500),
    PublicProgram("accelerate", ["accelerate_loop.py"], 2_000),
    PublicProgram("trainer", ["trainer.py"], 800, nodes=1),
    PublicProgram("trl", TRL, 500, nodes=1, shell='exec "$@"' + RESUMES),
    PublicProgram("lightning", ["lightning_fit.py"], 12_000, needs="lightning"),
)


class Site:
    """An operator, and a source that holds the programs and their files. `pythons`: by library."""

    def __init__(self, root: Path, pythons: dict[str, str]) -> None:
        (root / "state").mkdir(parents=True)
        self.pythons = pythons
        project = root / "project"
        shutil.copytree(EXAMPLES, project)
        make_model(project)
        self.source = root / "source.tar.gz"
        with tarfile.open(self.source, "w:gz") as archive:
            for path in sorted(project.iterdir()):
                archive.add(path, path.name)
        self.house = House(root / "state", worker_command=None)
        # Workers may read the environments that variables name.
        for library, python in pythons.items():
            self.house.environment[f"PYTHON_OF_{library.upper()}"] = str(Path(python).parents[1])
        self.house.start("--nodes", "16")

    def submit(self, program: PublicProgram, name: str) -> str:
        python = self.pythons[program.needs] if program.needs else sys.executable
        command = ["sh", "-c", program.shell, "sh", python, *program.words]
        environment = {"STEPS": str(program.steps), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": "cache"}
        return self.house.submit(
            name,
            nodes=program.nodes,
            training=None,
            program={"command": command, "source": self.source.as_uri(), "steps": program.steps},
            checkpoint={"folder": program.folder},
            env=environment,
        )

    def weights(self, uid: str) -> str:
        """Return a digest of the final weights: what the program prints, or of the file that it leaves."""
        folder = self.house.state.worker(uid, self.house.status(uid).attempt, 0)
        printed = re.findall(r"weights ([0-9a-f]{16})", (folder / LOG).read_text(errors="replace"))
        if printed:
            return str(printed[-1])
        path = folder / "work" / "out" / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "none"

    def end(self, uid: str) -> JobStatus:
        return self.house.becomes(uid, Phase.SUCCEEDED, timeout=END_SECONDS_MAX)

    def kill(self, uid: str, what: str, after: int) -> int:
        """Kill it once there is a checkpoint after that step, and return the step that the next attempt resumes
        from."""

        def committed() -> JobStatus | None:
            status = self.house.status(uid)
            if status.phase.terminal:
                raise RuntimeError(f"{status.phase} before {what} could be killed: {status.because}")
            is_new = status.checkpoint is not None and status.checkpoint.step > after
            return status if is_new and status.phase is Phase.RUNNING else None

        status = eventually(committed, f"a checkpoint after step {after}", END_SECONDS_MAX)
        assert status is not None
        tree = self.house.trees(uid)[status.attempt, status.gang.wanted - 1]
        ranks = [process for process in tree if not any("muster." in word for word in command_of(process))]
        victims = {"rank": ranks[:1], "launcher": tree[:1], "node": tree}[what]
        send(victims, signal.SIGSTOP)
        send(reversed(victims), signal.SIGKILL)
        next_status = eventually(
            lambda: s if (s := self.house.status(uid)).attempt > status.attempt or s.phase.terminal else None,
            "the next attempt",
        )
        assert next_status is not None
        return next_status.resume_step


def run(site: Site, program: PublicProgram) -> tuple[bool, str]:
    """Run it without a fault and with three. Return whether it ends with the same weights, and the figures."""
    undisturbed, disturbed = site.submit(program, f"{program.name}-undisturbed"), site.submit(program, program.name)
    resumed = [0]
    for what in ("rank", "launcher", "node"):
        resumed.append(site.kill(disturbed, what, resumed[-1]))
    site.end(undisturbed)
    expected, status = site.weights(undisturbed), site.end(disturbed)
    actual = site.weights(disturbed)
    causes = ", ".join(str(attempt.cause) for attempt in status.attempts if attempt.cause is not None)
    words = (
        f"weights {expected} without a fault, {actual} after {status.attempt - 1} restarts ({causes}), "
        f"resumed from steps {', '.join(map(str, resumed[1:]))}"
    )
    return expected == actual != "none" and status.attempt == len(resumed), words


def run_all(site: Site, programs: Sequence[PublicProgram], lanes: int) -> bool:
    """Run them, so many at a time, and return whether all end with the same weights. The threads die with this
    process."""
    waiting: queue.SimpleQueue[PublicProgram] = queue.SimpleQueue()
    for program in programs:
        waiting.put(program)
    right: list[bool] = []

    def lane() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                program = waiting.get_nowait()
                try:
                    same, figures = run(site, program)
                except (AssertionError, RuntimeError) as error:
                    same, figures = False, str(error)[:3000]
                right.append(same)
                print(f"{program.name:<16} {'the same' if same else 'NOT THE SAME'}: {figures}", flush=True)

    threads = [threading.Thread(target=lane, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a signal is heard in between
    return len(right) == len(programs) and all(right)


def make_model(root: Path) -> None:
    """Write a tiny model, its tokenizer and a text, for TRL's script, which reads them from folders."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(["<pad>", "</s>", *alphabet])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(root / "model")
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "model")
    (root / "texts").mkdir()
    lines = [line for line in Path(re.__file__).read_text().splitlines() if len(line) > 20]
    with (root / "texts" / "train.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs, with commas between")
    parser.add_argument("--lanes", type=int, default=1, help="number of programs at a time")
    parser.add_argument("--lightning", default="", help="a Python that has Lightning")
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends us early gets a clean machine too
    pythons = {"lightning": chosen.lightning} if chosen.lightning else {}
    named = [name for name in chosen.only.split(",") if name]
    programs = [program for program in PROGRAMS if not named or program.name in named]
    with tempfile.TemporaryDirectory(prefix="muster-public-") as folder:
        site = Site(Path(folder), pythons)
        try:
            good = run_all(site, [each for each in programs if each.needs in ("", *pythons)], chosen.lanes)
        finally:
            site.house.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
