"""What was trained whole beside an adapter, exported as `peft` and transformers open it: one weight with the head,
and two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.model_families import write_model

from muster.recipe.adapter_config import Adapter
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.trainer.data import load_tokenizer
from muster.trainer.models.transformers_model import from_folder
from muster.words.base import dump
from muster.words.job import Keep

TOKENS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))


def committed(root: Path, family: str, adapter: Adapter) -> FileStore:
    """A model whose learning weights are random, in a commit."""
    write_model(root / "model", family, dtype=torch.bfloat16)
    definition = from_folder(open_folder(FileStore(root / "model")), adapter)
    model = definition.build(torch.float32, "none")
    definition.fill(model, torch.device("cpu"), 0, values=True)
    generator = torch.Generator().manual_seed(3)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in learning:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    config = {"model": {"source": (root / "model").as_uri()}, "adapter": dump(adapter)}
    about = replace(
        identity((root / "uid").as_uri()),
        architecture=definition.describe(),
        config=config,
        tokenizer=load_tokenizer(str(root / "model")).describe(),
    )
    saving = CheckpointSaver(about, Keep(), {})
    try:
        saving.save(state(model, torch.optim.AdamW(learning), 5))
        assert outcomes(saving) == [(5, True, None)]
    finally:
        saving.close()
    return FileStore(root / "uid")


@pytest.mark.parametrize(
    ("family", "saved"),
    [("qwen2.5", ("lm_head",)), ("llama-3.1", ("embed_tokens", "lm_head")), ("mixtral", ("mlp.gate", "model.norm"))],
)
def test_modules_trained_whole_open_in_peft_and_transformers(tmp_path: Path, family: str, saved: Any) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    store = committed(tmp_path, family, Adapter(rank=2, targets=("q_proj",), modules_to_save=saved))
    ours = of_commit(store.uri, 5).module
    with torch.no_grad():
        expected = ours(TOKENS, torch.arange(24).expand(2, 24), torch.zeros_like(TOKENS))
        export(store, 5, tmp_path / "alone", form="peft")
        beside = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone", dtype=torch.float32).eval()
        assert (beside(input_ids=TOKENS, use_cache=False).logits - expected).abs().max() <= 1e-5
        merged = beside.merge_and_unload()  # as people do who serve it
        assert (merged(input_ids=TOKENS, use_cache=False).logits - expected).abs().max() <= 1e-5
        export(store, 5, tmp_path / "whole")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
        assert (whole(input_ids=TOKENS, use_cache=False).logits - expected).abs().max() <= 5e-2  # q_proj is in bf16
