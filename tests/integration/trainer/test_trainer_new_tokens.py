"""Tokens that a job adds to its model: the same however it is sharded, in commits, and opened by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import Job, Part, train_many, training
from tests.model_families import write_model

from muster.storage.file_store import FileStore
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
NEW = ["<call>", "</call>", *(f"<word-{number}>" for number in range(32))]
ADAPTER = {"targets": ["q_proj"], "rank": 2, "modulesToSave": ["embed_tokens", "lm_head"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Job]]:
    root = tmp_path_factory.mktemp("tokens")
    (root / "corpus").mkdir()
    for number in range(40):
        words = " ".join(f"say <call>word {k}</call> <word-{(k * number) % 32}>" for k in range(20))
        (root / "corpus" / f"{number:02d}.txt").write_text(f"document {number}: {words}")
    write_model(root / "model", "llama-3.1", dtype=torch.bfloat16)

    def job(name: str, shard: str, **more: Any) -> Job:
        document = training(
            str(root / "corpus" / "*.txt"),
            model={"source": (root / "model").as_uri()},
            data={"train": [{"source": str(root / "corpus" / "*.txt")}], "sequenceLength": 32, "addTokens": NEW},
            batch={"tokensPerStep": 256, "microBatch": 2},
            length={"steps": STEPS},
            parallel={"shard": shard},
            deterministic=True,
            **more,
        )
        return Job(root / name, document, uid=name)

    jobs = {"ddp": job("ddp", "ddp"), "fsdp": job("fsdp", "fsdp"), "stopped": job("stopped", "fsdp")}
    jobs["adapter"] = job("adapter", "fsdp", adapter=ADAPTER)
    parts = [Part(jobs["ddp"]), Part(jobs["fsdp"]), Part(jobs["adapter"])]
    parts += [Part(jobs["stopped"], 1, 0, stop_after=3), Part(jobs["stopped"], 2, 3)]
    done = [ExitCode.DONE] * 3
    assert train_many(root / "two", 2, parts) == [*done, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    return root, jobs


@pytest.mark.long
def test_the_same_however_it_is_sharded_and_bit_for_bit_after_a_stop(trained: tuple[Path, dict[str, Job]]) -> None:
    jobs = trained[1]
    losses = {name: [record.loss for record in jobs[name].steps(1)] for name in ("ddp", "fsdp")}
    assert losses["ddp"] == pytest.approx(losses["fsdp"], abs=1e-5)
    assert [record.loss for record in jobs["stopped"].steps(1, 2)] == losses["fsdp"]
    assert jobs["fsdp"].commit(STEPS)["tensors"]["model/lm_head.weight"]["shape"] == [259 + len(NEW), 32]


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "adapter"])
def test_transformers_opens_the_export_with_the_new_tokens(
    trained: tuple[Path, dict[str, Job]], tmp_path: Path, name: str
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = trained[1][name]
    store = FileStore(job.folder)
    export(store, STEPS, tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    ids = tokenizer("a<call>b</call><word-31>")["input_ids"]
    assert [ids[1], *ids[3:]] == [259, 260, 292]
    assert tokenizer.decode(ids) == "a<call>b</call><word-31>"
    tokens = torch.tensor([ids])
    ours = of_commit(store.uri, STEPS).module
    with torch.no_grad():
        expected = ours(tokens, torch.arange(len(ids))[None], torch.zeros_like(tokens))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
        assert theirs.config.vocab_size == 259 + len(NEW)
        apart = (theirs(input_ids=tokens, use_cache=False).logits - expected).abs().max()
        assert apart <= (1e-5 if name == "fsdp" else 5e-2)  # merged with weights in bf16
        if name == "adapter":
            export(store, STEPS, tmp_path / "alone", form="peft")
            beside = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone", dtype=torch.float32).eval()
            assert (beside(input_ids=tokens, use_cache=False).logits - expected).abs().max() <= 1e-5
