"""The example of lm-eval leaves the numbers that lm-eval's own command line reports."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EXAMPLE = Path(__file__).parents[3] / "examples" / "programs" / "lm-eval"


def tiny_model(folder: Path) -> None:
    """Random weights and a tokenizer of bytes, as transformers loads them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<eos>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_evals_numbers_are_those_of_its_own_command(tmp_path: Path) -> None:
    model, out = tmp_path / "inputs" / "checkpoint", tmp_path / "out"
    tiny_model(model)
    example = shutil.copytree(EXAMPLE, tmp_path / "example")
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "MUSTER_INPUTS_DIR": str(model.parent),
        "MUSTER_RESULTS": str(tmp_path / "results.json"),
    }
    subprocess.run([sys.executable, "evaluate.py", "sums"], cwd=example, env=environment, check=True)
    its_own = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model}"]
    its_own += ["--include_path", "tasks", "--tasks", "sums", "--device", "cpu", "--output_path", str(out)]
    subprocess.run(its_own, cwd=example, env=environment, check=True)
    (report,) = out.rglob("results_*.json")
    theirs = json.loads(report.read_text())["results"]["sums"]
    ours = json.loads((tmp_path / "results.json").read_text())
    assert (ours["sums/acc"], ours["sums/acc_norm"]) == (theirs["acc,none"], theirs["acc_norm,none"])
