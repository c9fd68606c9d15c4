"""A model that scores texts, exported: `AutoModelForSequenceClassification` and `peft` open it with the same scores."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.model_families import write_model
from torch import Tensor, nn

from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.storage.model_source import model_facts
from muster.trainer.checkpoint import CheckpointSaver, read_commit
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import load_tokenizer
from muster.trainer.errors import UserError
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.from_commit import definition_of
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.models.transformers_model import from_folder
from muster.words.base import dump
from muster.words.job import Keep
from muster.words.model_sources import FromCommit

SHAPE = Architecture(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=80, vocab_size=260, max_positions=64)
LORA = Adapter(rank=2, targets=("all-linear",))
PAD = 0
TEXTS = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27], [31]]


def built(definition: ModelDefinition, values: bool = True) -> nn.Module:
    model = definition.build(torch.float32, "none")
    definition.fill(model, torch.device("cpu"), 3, values)
    return model.eval()


def scores(model: nn.Module) -> Tensor:
    """What the trainer's model says of the texts, which share a row with padding behind."""
    row = [token for text in TEXTS for token in text] + [PAD] * 4
    documents = [number for number, text in enumerate(TEXTS) for _ in text] + [-1] * 4
    positions = [place for text in TEXTS for place in range(len(text))] + list(range(4))
    with torch.no_grad():
        found: Tensor = model(*(torch.tensor([values]) for values in (row, positions, documents)))
    return found[0, : len(TEXTS), 0]


def their_scores(model: Any) -> Tensor:
    """What a model of transformers says of them, as rows of one batch."""
    longest = max(map(len, TEXTS))
    rows = torch.tensor([text + [PAD] * (longest - len(text)) for text in TEXTS])
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=rows, attention_mask=(rows != PAD).long()).logits[:, 0]
    return found


def committed(root: Path, definition: ModelDefinition, model: nn.Module, config: dict[str, Any]) -> FileStore:
    tokenizer = load_tokenizer(str(root / "model") if (root / "model").exists() else "bytes").describe()
    described = definition.describe()
    about = replace(identity((root / "uid").as_uri()), architecture=described, config=config, tokenizer=tokenizer)
    saving = CheckpointSaver(about, Keep(), {})
    try:
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        saving.save(state(model, torch.optim.AdamW(learning), 5))
        assert outcomes(saving) == [(5, True, None)]
    finally:
        saving.close()
    return FileStore(root / "uid")


def test_our_own_decoder_opens_with_the_same_scores(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    definition = DecoderModel(SHAPE, scores=ScoreHead(1, PAD))
    model = built(definition)
    store = committed(tmp_path, definition, model, {"task": "reward", "model": {"preset": "x"}})
    export(store, 5, tmp_path / "whole")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    torch.testing.assert_close(their_scores(theirs), scores(model), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"scores texts \(task reward\) and writes none"):
        of_commit(store.uri, 5)


@pytest.mark.parametrize(("family", "adapter"), [("llama-3.1", None), ("qwen2.5", LORA)])
def test_a_folder_gets_a_head_and_opens_with_the_same_scores(
    tmp_path: Path, family: str, adapter: Adapter | None
) -> None:
    """Beside an adapter the head is trained whole, also where nobody asked for it, as `peft` does it."""
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    write_model(tmp_path / "model", family)
    adapter = None if adapter is None else adapter.with_score_head()
    folder = open_folder(FileStore(tmp_path / "model"))
    definition = from_folder(folder, adapter, scores=ScoreHead(1, PAD))
    model = built(definition)
    size = definition.size()
    assert size.learning == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    document = {
        "task": "reward",
        "model": {"source": (tmp_path / "model").as_uri()},
        "adapter": None if adapter is None else {"rank": 2, "targets": ["all-linear"]},
        "data": {"train": [{"source": "x", "format": "preference"}]},
        "batch": {"tokensPerStep": 512},
        "length": {"steps": 1},
    }
    facts = model_facts(TrainingConfig.model_validate(document))
    assert (facts.size.parameters, facts.size.learning) == (size.parameters, size.learning)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    store = committed(tmp_path, definition, model, {k: v for k, v in document.items() if v is not None})
    expected = scores(model)
    assert expected.std() > 1e-3
    export(store, 5, tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert (config["id2label"], config["pad_token_id"]) == ({"0": "LABEL_0"}, PAD)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(their_scores(theirs), expected, atol=1e-5, rtol=1e-5)
    if adapter is not None:
        export(store, 5, tmp_path / "alone", form="peft")
        beside = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "alone", num_labels=1)
        torch.testing.assert_close(their_scores(beside), expected, atol=1e-5, rtol=1e-5)
    # What was exported can be trained further, with the head that it has.
    again = built(from_folder(open_folder(FileStore(tmp_path / "whole")), None, scores=ScoreHead(1, PAD)))
    torch.testing.assert_close(scores(again), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="is no causal language model"):
        from_folder(open_folder(FileStore(tmp_path / "whole")), None)


def test_a_commit_that_predicts_tokens_gets_a_head_and_keeps_the_rest(tmp_path: Path) -> None:
    base = DecoderModel(SHAPE)
    before = built(base)
    store = committed(tmp_path, base, before, {"task": "pretrain", "model": {"preset": "x"}})
    commit = read_commit(store.uri, 5)
    definition = definition_of(commit, store.uri, None, ScoreHead(1, PAD))
    model = built(definition)
    head = model.get_parameter("score.weight").clone()
    with torch.no_grad():
        model.get_parameter("embed.weight").zero_()
    begin_with(store.uri, 5, model)
    assert torch.equal(model.get_parameter("embed.weight"), before.get_parameter("embed.weight"))
    assert torch.equal(model.get_parameter("score.weight"), head)
    assert head.std() > 1e-3
    training = TrainingConfig.model_validate(
        {
            "task": "reward",
            "model": {"from": dump(FromCommit(uri=store.uri, step=5))},
            "data": {"train": [{"source": "x", "format": "preference"}]},
            "batch": {"tokensPerStep": 512},
            "length": {"steps": 1},
        }
    )
    assert model_facts(training).size == definition.size()
