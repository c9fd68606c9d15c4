"""Training speed and memory beside the peers: a bare FSDP2 loop, transformers.Trainer and TRL's SFTTrainer, in one run.

    python benchmarks/train.py [--methods full,lora,qlora] [--rounds 5] [--steps 4] [--check] [--json FILE]
    python benchmarks/train.py --task dpo [--methods full,lora] …

All sides train the same Llama, made on the spot, from the same weights on the same documents: rows of packed documents
that do not see each other, the same batch, fused AdamW, fp32, every step logged. Each side is a gang of processes of
its own. They are all alive, and take turns in blocks of a few steps, so that whatever else the machine does falls on
all of them; a block's first step pays for caches that the others emptied, and is not counted. Compared are neighbours.

Muster runs whole: heartbeats, metrics, step records, the saver's process, the check of the numbers. The bare loop has
the class of transformers, or peft's around it, under FSDP2. Trainer and TRL run under DDP, for on a CPU they have
nothing else, so Muster stands beside them as ddp and as fsdp. Peak memory is the highest resident memory of a rank from
the first step on, with its helper processes; beside it stands what that is above the libraries it has loaded.

`--task dpo` trains on pairs beside TRL's DPOTrainer: the same pairs to a step, tokens counted without padding. Where
the whole model is trained, all sides compute the reference's log-probabilities before the first step; beside an adapter
the reference is the model without it. Like is compared with like: Muster's ddp with TRL's, and Muster's fsdp with TRL
under FSDP2, a group per layer. accelerate has FSDP2 for accelerators and drops its settings on a CPU, where it works as
well: train_sides.py lets it through, and changes nothing else of TRL's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MIB = 2**20
GENERAL_FSDP, GENERAL_DDP, DECODER = "muster fsdp", "muster ddp", "muster decoder fsdp"
BARE, TRAINER, TRL = "bare FSDP2", "transformers.Trainer", "TRL SFTTrainer"
ALL = (GENERAL_FSDP, GENERAL_DDP, DECODER, BARE, TRAINER, TRL)
# bitsandbytes' layers keep their state outside of the weight, so FSDP2 can't cut them; our decoder has no NF4.
SIDES = {"full": ALL, "lora": ALL, "qlora": (GENERAL_FSDP, GENERAL_DDP, TRAINER, TRL)}
TRL_DPO, TRL_DPO_FSDP = "TRL DPOTrainer ddp", "TRL DPOTrainer fsdp"
DPO_SIDES = (GENERAL_FSDP, GENERAL_DDP, TRL_DPO, TRL_DPO_FSDP)
PAIRS = 96
SPEED_MIN, MEMORY_MAX, TIME_MAX = 1.05, 0.9, 1.03
DPO_SPEED_MIN = 1.0
LOSS_TOLERANCE = 2e-4  # between sides that saw the same rows; TRL packs its own
VOCABULARY_LEARNT = 4_000  # merges that the corpus gives; the model's vocabulary is larger, as real ones are


@dataclass
class Side:
    """What one side told."""

    # (seconds, CPU seconds of rank 0, tokens of all ranks, loss) of each step
    blocks: list[list[tuple[float, float, int, float]]] = field(default_factory=list)
    # Bytes, of the rank with the highest peak: the peak, its helper processes within that, and before it had a model.
    peak: int = 0
    helpers: int = 0
    libraries: int = 0

    def tokens_per_second(self, clock: int = 0) -> list[float]:
        """Of each block but the first, which warms up. By clock 1 of CPU time, which says more on a busy machine."""
        return [sum(s[2] for s in block[1:]) / sum(s[clock] for s in block[1:]) for block in self.blocks[1:]]

    @property
    def first_loss(self) -> float:
        return self.blocks[0][0][3]


def main() -> int:
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="muster-train-") as folder:
        home = Path(folder)
        write_model(home / "model", given)
        write = write_pairs if given.task == "dpo" else write_corpus
        write(home / "corpus.jsonl", home / "model", given.sequence_length)
        found = {method: _measure(method, given, home) for method in given.methods}
    failed = [line for method, sides in found.items() for line in _report(method, sides, given)]
    if given.json:
        documents = {method: {name: asdict(side) for name, side in sides.items()} for method, sides in found.items()}
        given.json.write_text(json.dumps(documents, indent=2) + "\n")
    for line in failed if given.check else ():
        print(f"MISSED: {line}")
    return 1 if given.check and failed else 0


# --- the model and its data ---


def write_model(folder: Path, given: argparse.Namespace) -> None:
    """A random Llama as save_pretrained writes it, and a tokenizer learnt from Python's own source."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(17)
    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LEARNT, initial_alphabet=alphabet, special_tokens=marks, show_progress=False
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": marks[0], "pad_token": marks[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_corpus(path: Path, model: Path, length: int) -> None:
    """Documents that fit into a row, so that every way to pack them trains on the same tokens."""
    from tokenizers import Tokenizer

    tokenizer, dice = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(1)
    texts = []
    for source in _sources():
        begin = 0
        while begin < len(source):
            end = begin + dice.randint(length // 4, 2 * length)
            texts.append(source[begin:end])
            begin = end
    kept = [t for t, e in zip(texts, tokenizer.encode_batch(texts), strict=True) if 1 < len(e.ids) < length]
    dice.shuffle(kept)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))


def write_pairs(path: Path, model: Path, length: int) -> None:
    """Pairs of which one fills a row, so that a row of ours is a pair of TRL's: how a text goes on is better than how
    another does."""
    from tokenizers import Tokenizer

    tokenizer, dice = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(1)
    ids = tokenizer.encode("\n".join(_sources())).ids
    lines = []
    while len(lines) < PAIRS:
        # Both sides hold the prompt: 2 × prompt + answers is more than half a row and no more than a row.
        sizes = [dice.randint(length // 8, length // 6), *(dice.randint(length // 8, length // 5) for _ in range(2))]
        begin, other = (dice.randrange(len(ids) - length) for _ in range(2))
        cuts = [begin, begin + sizes[0], begin + sizes[0] + sizes[1]]
        prompt, chosen = (tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(cuts))
        rejected = tokenizer.decode(ids[other : other + sizes[2]])
        lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    path.write_text("".join(lines))


def _sources() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_text(errors="replace") for file in files]


# --- the sides ---


class Gang:
    """The ranks of one side. They train when they are told to, and sleep otherwise."""

    def __init__(self, name: str, method: str, given: argparse.Namespace, home: Path) -> None:
        self.name = name
        work = home / f"{method}-{name.replace(' ', '-')}"
        work.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks, self._replies = [], []
        self._log = (work / "log").open("w")
        for rank in range(given.ranks):
            reads, writes = os.pipe()
            order = {"side": name, "method": method, "model": str(home / "model"), "corpus": str(home / "corpus.jsonl")}
            shape = {
                key: getattr(given, key) for key in ("task", "sequence_length", "micro_batch", "recompute", "ranks")
            }
            environ = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(given.ranks),
                "LOCAL_WORLD_SIZE": str(given.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(home / "hub"),
                "HF_DATASETS_CACHE": str(work / "datasets"),
                "MUSTER_DEVICE": "cpu",
            }
            command = [sys.executable, str(Path(__file__).with_name("train_sides.py")), json.dumps(order | shape)]
            process = subprocess.Popen(
                [*command, str(writes)],
                cwd=work,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(writes,),
                text=True,
            )
            os.close(writes)
            self._ranks.append(process)
            self._replies.append(os.fdopen(reads))

    def tell(self, what: str) -> list[Any]:
        """Send all ranks an order and wait for what each answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{what}\n")
            rank.stdin.flush()
        return self.wait()

    def wait(self) -> list[Any]:
        lines = [replies.readline() for replies in self._replies]
        if not all(lines):
            self._log.flush()
            raise SystemExit(f"{self.name}: a rank ended\n{Path(self._log.name).read_text()[-4000:]}")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for replies in self._replies:
            replies.close()
        self._log.close()


def _measure(method: str, given: argparse.Namespace, home: Path) -> dict[str, Side]:
    names = [name for name in (DPO_SIDES if given.task == "dpo" else SIDES[method]) if given.only in name]
    sides = {name: Side() for name in names}
    gangs: dict[str, Gang] = {}
    preparation = Gang("preparation", method, argparse.Namespace(**{**vars(given), "ranks": 1}), home)
    preparation.wait()
    preparation.kill()
    try:
        for name in names:  # one after the other: loading is not what is compared
            gangs[name] = Gang(name, method, given, home)
            gangs[name].wait()
        for turn in range(given.rounds + 1):
            for name in names if turn % 2 else reversed(names):
                sides[name].blocks.append(gangs[name].tell(str(given.steps + 1))[0])
        for name in names:
            told = max(gangs[name].tell("end"), key=lambda rank: rank["peak"])
            sides[name] = replace(sides[name], **told)
    finally:
        for gang in gangs.values():
            gang.kill()
    return sides


# --- the report ---


def _report(method: str, sides: dict[str, Side], given: argparse.Namespace) -> list[str]:
    """Print one method's table. Returns what was missed."""
    dpo = given.task == "dpo"
    of_ddp, of_fsdp, speed_min = (TRL_DPO, TRL_DPO_FSDP, DPO_SPEED_MIN) if dpo else (TRL, TRL, SPEED_MIN)
    peers = {name: of_fsdp if name.endswith("fsdp") else of_ddp for name in sides}
    rows = f"rows of {given.sequence_length}, {given.micro_batch} a micro-batch"
    print(f"\n{given.task} {method}: {given.ranks} ranks, {rows}")
    print(f"{'':>22} {'tokens/s':>9} {'of TRL':>7} {'peak MiB':>9} {'of TRL':>7} {'above libraries':>16} {'of TRL':>7}")
    for name, side in sides.items():
        above = side.peak - side.libraries
        speed = statistics.median(side.tokens_per_second())
        peer = peers[name]
        columns = f"{_of(sides, name, peer, _speed):>7} {side.peak / MIB:9.0f} {_of(sides, name, peer, _peak):>7}"
        print(f"{name:>22} {speed:9.0f} {columns} {above / MIB:16.0f} {_of(sides, name, peer, _above):>7}")
    compared = ((GENERAL_DDP, of_ddp), (GENERAL_FSDP, of_fsdp))
    aims = [
        *((f"{ours}: speed of {peer}'s", ours, peer, _speed, speed_min, 1) for ours, peer in compared),
        *((f"{ours}: memory of {peer}'s", ours, peer, _peak, MEMORY_MAX, -1) for ours, peer in compared),
        ("the general path's time of the bare loop's", BARE, GENERAL_FSDP, _speed, TIME_MAX, -1),
        ("our decoder's speed of the general path's", DECODER, GENERAL_FSDP, _speed, None, 1),
    ]
    missed = []
    for what, ours, theirs, ratio, aim, sign in aims:
        if ours not in sides or theirs not in sides:
            continue
        value = ratio(sides[ours], sides[theirs])
        met = aim is None or (value - aim) * sign >= 0
        told = "" if aim is None else f" (aim at {'least' if sign > 0 else 'most'} {aim}{'' if met else ', MISSED'})"
        beside = f", by CPU time {_speed(sides[ours], sides[theirs], clock=1):.3f}" if ratio is _speed else ""
        print(f"  {what}: {value:.3f} ×{told}{beside}")
        if not met:
            missed.append(f"{method}, {what}: {value:.3f}, aim {aim}")
    losses = {name: side.first_loss for name, side in sides.items() if name != TRL}  # DPO's first are all log 2
    spread = max(losses.values()) - min(losses.values())
    print(f"  first losses: {', '.join(f'{name} {side.first_loss:.5f}' for name, side in sides.items())}")
    if method != "qlora" and spread > LOSS_TOLERANCE:
        missed.append(f"{method}: the first losses are {spread:.1e} apart, so these are not the same computation")
    return missed


def _of(sides: dict[str, Side], name: str, peer: str, ratio: Any) -> str:
    return f"{ratio(sides[name], sides[peer]):.2f}" if peer in sides else "-"


def _speed(ours: Side, theirs: Side, clock: int = 0) -> float:
    """The median over rounds of the ratio of neighbours in time: a slow minute hits both."""
    pairs = zip(ours.tokens_per_second(clock), theirs.tokens_per_second(clock), strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def _peak(ours: Side, theirs: Side) -> float:
    return ours.peak / theirs.peak


def _above(ours: Side, theirs: Side) -> float:
    return (ours.peak - ours.libraries) / (theirs.peak - theirs.libraries)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(SIDES), metavar="METHOD,…")
    parser.add_argument("--only", default="", help="sides whose name holds this text")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="activations, on all sides")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a block")
    parser.add_argument("--check", action="store_true", help="end with 1 where an aim is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there too")
    parser.add_argument("--task", choices=("pretrain", "dpo"), default="pretrain")
    given = parser.parse_args()
    if given.task == "dpo":
        given.methods = [method for method in given.methods if method != "qlora"]
    return given


if __name__ == "__main__":
    sys.exit(main())
