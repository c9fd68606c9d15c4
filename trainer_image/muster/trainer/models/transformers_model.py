"""A model of transformers as a model definition: from a folder of weights, or from a COMMIT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.plan.model_size import ModelSize, dimensions_of, position_limit, size_of
from muster.recipe.adapter_config import Adapter
from muster.storage.model_folder import CONFIG, ModelFolder
from muster.trainer.errors import UserError
from muster.trainer.models import loading, pretrained
from muster.trainer.models.architectures import scoring_config, trainable_config
from muster.trainer.models.definition import Recompute
from muster.trainer.models.init import initialize_adapter, initialize_scores
from muster.trainer.models.lazy_tensors import TORCH_DTYPES, ReadRange, checksums
from muster.trainer.models.lora import attach, saved_modules
from muster.trainer.models.named import freeze
from muster.trainer.models.new_tokens import NewTokens, must_be_trained
from muster.trainer.models.nf4 import quantize
from muster.trainer.models.scoring import WEIGHT as SCORE_WEIGHT
from muster.trainer.models.scoring import ScoreHead, score_head_of
from muster.trainer.models.self_test import PackingFindings, divides_heads, examine
from muster.trainer.parallel.groups import RankGroup, groups
from muster.trainer.parallel.token_split import TokenSplit
from muster.words.checkpoint import ITEM_BYTES

KIND: Final = "transformers"


@dataclass(frozen=True)
class TransformersModel:
    """A model of one of transformers' classes, from a folder or from a commit."""

    config: Any  # a PretrainedConfig
    companions: Mapping[str, str]  # the folder's small files, by name
    findings: PackingFindings  # of the self-tests of the class
    adapter: Adapter | None = None  # None where the whole model is trained
    stored_dtype: str = "F32"  # of the folder's weights, as safetensors spells it; what is frozen keeps it
    folder: ModelFolder | None = None  # where the weights are; None where a commit has them
    provenance: dict[str, Any] = field(default_factory=dict)  # what was loaded, for every commit
    new_tokens: NewTokens | None = None  # tokens that the folder's weights have no rows for
    scores: ScoreHead | None = None  # None where it predicts tokens
    freeze: tuple[str, ...] = ()  # patterns of weights that are not trained, where there is no adapter

    casts_weights = False

    @property
    def packs(self) -> bool:
        return self.findings.packs

    @property
    def why_not_packed(self) -> str:
        return f"in a {self.config.model_type}, {self.findings.why_not}"

    @property
    def position_limit(self) -> int | None:
        return position_limit(self.config.to_dict())

    @property
    def vocab_size(self) -> int:
        return int(self._skeleton.get_input_embeddings().weight.shape[0])

    @cached_property
    def _skeleton(self) -> Any:
        """The model on the meta device without an adapter, to be counted."""
        return pretrained.build(self.config, scoring=self.scores is not None)

    @property
    def class_name(self) -> str:
        return type(self._skeleton).__name__

    def size(self) -> ModelSize:
        model = self._skeleton
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        dimensions = dimensions_of({**self.config.to_dict(), "tie_word_embeddings": bool(model.all_tied_weights_keys)})
        scores = None if self.scores is None else self.scores.count
        return size_of(shapes, dimensions, self.adapter, ITEM_BYTES[self.stored_dtype], scores, self.freeze)

    def build(self, dtype: torch.dtype, recompute: Recompute) -> nn.Module:
        draws = self.adapter is not None and self.adapter.dropout > 0
        model: Any = pretrained.build(
            self.config, recompute, self.findings.masks, draws, self.scores is not None, half=dtype != torch.float32
        )
        if self.adapter is not None:
            head = model.score if self.scores is not None else model.get_output_embeddings()
            if self.adapter.kind == "qlora":
                quantize(model, {head, *saved_modules(model, self.adapter).values()})
            attach(model, self.adapter, head)
        if self.freeze:
            freeze(model, self.freeze)
        if self.adapter is not None or self.freeze:
            for parameter in model.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(TORCH_DTYPES[self.stored_dtype])
        built: nn.Module = model
        return built

    def split_tokens(self, model: nn.Module, group: RankGroup) -> TokenSplit:
        by_heads = divides_heads(self.config, self.findings, self.size().heads % group.size == 0)
        split = TokenSplit(group, by_heads)
        pretrained.split_tokens(model, split)
        return split

    def freezing(self, patterns: Sequence[str]) -> TransformersModel:
        return replace(self, freeze=tuple(patterns))

    def embedding(self, model: nn.Module) -> nn.Module:
        layer: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        return layer

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return pretrained.layers(model)

    def lone_groups(self, model: nn.Module) -> Sequence[nn.Module]:
        return pretrained.lone_groups(model)

    def fill(self, model: nn.Module, device: torch.device, seed: int, values: bool) -> None:
        if not values or self.folder is None:
            pretrained.materialize(model, device)
        else:
            self._load(model, device, self.folder)
        if values and self.scores is not None and (self.folder is None or SCORE_WEIGHT not in self.folder.tensors):
            initialize_scores(model, seed)
        if values and self.adapter is not None:
            initialize_adapter(model, seed)

    def _load(self, model: nn.Module, device: torch.device, folder: ModelFolder) -> None:
        sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        everyone = groups().all
        error, ranges = "", list[ReadRange]()
        begin_with = self._means(model, folder)
        if sharded or everyone.index == 0:
            try:
                ranges = loading.load(model, folder, device, self.new_tokens, begin_with)
            except UserError as found:
                error = str(found)
        elif not sharded:
            pretrained.materialize(model, device)
        error, ranges = _agreed(error, ranges)
        if error:
            raise UserError(error)
        if not sharded and everyone.size > 1:  # each byte is read once, and travels between the ranks
            for tensor in model.state_dict(keep_vars=True).values():
                everyone.broadcast(tensor.detach())
        self.provenance["crc32"] = checksums(ranges)

    def _means(self, model: nn.Module, folder: ModelFolder) -> dict[str, Tensor]:
        """Return the first values of new tokens, which the first rank computes. Collective where there are any."""
        if self.new_tokens is None:
            return {}
        everyone = groups().all
        return everyone.broadcast_object(loading.means(model, folder, self.new_tokens) if everyone.index == 0 else {})

    def describe(self) -> dict[str, Any]:
        import transformers

        return {
            "kind": KIND,
            "transformers": transformers.__version__,
            "findings": {"packs": self.findings.packs, "masks": self.findings.masks, "whyNot": self.findings.why_not},
            "storedDtype": self.stored_dtype,
            "source": self.provenance,
            "companions": dict(self.companions),
            **(self.scores.describe() if self.scores else {}),
        }


def from_folder(
    folder: ModelFolder,
    adapter: Adapter | None,
    new_tokens: NewTokens | None = None,
    scores: ScoreHead | None = None,
) -> TransformersModel:
    """Make the model of a folder, which has its config.json as it is with the new tokens, with the head `scores` where
    it is to score texts. Raises UserError for whatever can't be trained, before a weight is read."""
    config = trainable_config(folder.config, folder.address, scoring=scores is not None)
    if getattr(config, "tie_word_embeddings", False) and scores is None and folder.has_another_head():
        # As from_pretrained does: both are kept, whatever config.json says.
        folder = folder.untied()
        config = trainable_config(folder.config, folder.address)
    findings = examine(config)
    if scores is not None:
        config = scoring_config(config, scores, f"model.source {folder.address}")
    loading.check_shapes(pretrained.build(config, scoring=scores is not None), folder, new_tokens)
    loaded = TransformersModel(
        config, folder.companions, findings, adapter, folder.dtype, folder, folder.describe(), new_tokens, scores
    )
    if new_tokens is not None and adapter is not None:
        must_be_trained(loaded.build(torch.float32, "none"))
    return loaded


def from_commit(
    document: Mapping[str, Any], adapter: Adapter | None, where: str, scores: ScoreHead | None = None
) -> TransformersModel:
    """Make the model that `describe` wrote into Commit.architecture, with the head `scores` where it is to score texts
    and does not yet. `where` names the commit in messages. Raises UserError where this Muster can't build it.
    """
    try:
        companions = {str(name): str(text) for name, text in document["companions"].items()}
        stored = document["findings"]
        findings = PackingFindings(bool(stored["packs"]), stored["masks"], str(stored["whyNot"]))
        dtype = str(document["storedDtype"])
        scores = score_head_of(document) or scores
        config = trainable_config(json.loads(companions[CONFIG]), where, scoring=scores is not None)
        config = config if scores is None else scoring_config(config, scores, where)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{where} describes a model that this Muster can't build: {error!r}; use the Muster that wrote it"
        ) from error
    return TransformersModel(
        config, companions, findings, adapter, dtype, provenance=dict(document.get("source") or {}), scores=scores
    )


def _agreed(error: str, ranges: list[ReadRange]) -> tuple[str, list[ReadRange]]:
    """The first error of any rank, and what all of them read. Collective."""
    everyone = groups().all.gather((error, ranges))
    return next((e for e, _ in everyone if e), ""), [entry for _, each in everyone for entry in each]
