"""Names that other tools have for settings, and the keys of the job's document that do the same.

People bring the names that they have typed for years: those of Hugging Face's Trainer, TRL, PEFT, Axolotl, the Kubeflow
Trainer and SkyPilot. An unknown key of a job is looked up here, and so are the words of `muster explain`. A test holds
each path to the models, and lets no name stand here that is a key of it: such a key is found by its own path. The
exception is `gpus`, which is a key far down (gang.deviceClasses.gpus), where hardly anybody looks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from muster.words.base import UNKNOWN_KEY, DocumentProblem, fields_within, fold


@dataclass(frozen=True)
class ForeignName:
    """One setting of other tools, under all of its names there."""

    names: tuple[str, ...]
    path: str  # of the key in `spec` that does the same; empty where Muster needs none
    note: str = ""  # what differs; without a full stop


def _same(path: str, names: str, note: str = "") -> ForeignName:
    return ForeignName(tuple(names.split()), path, note)


FOREIGN_NAMES: Final = (
    # What is trained
    _same("training.model.source", "model_name_or_path model_name model_id base_model pretrained_model_name_or_path",
          "an address: hf://org/name@revision, s3://…, https://… or a folder"),
    _same("training.task", "rl rlhf trainer_type training_type",
          "one of pretrain, sft, dpo, orpo, simpo, kto, reward, grpo"),
    _same("training.adapter", "lora peft peft_config lora_config"),
    _same("training.adapter.kind",
          "use_dora use_rslora use_qlora peft_use_dora peft_use_rslora load_in_4bit load_in_8bit",
          "lora, rslora, dora or qlora (four bits)"),
    _same("training.adapter.rank", "r lora_r lora_rank"),
    _same("training.adapter.alpha", "lora_alpha"),
    _same("training.adapter.dropout", "lora_dropout"),
    _same("training.adapter.targets", "target_modules lora_target_modules lora_target lora_target_linear",
          "`[all-linear]` for all linear layers but the head"),
    _same("training.adapter.modulesToSave", "lora_modules_to_save"),
    _same("training.adapter.targetParameters", "lora_target_parameters"),
    _same("training.freeze", "unfrozen_parameters freeze_layers frozen_layers",
          "it names the weights that stay as they are"),
    # Data
    _same("training.data.train",
          "train_file train_files dataset datasets dataset_name dataset_path data_path train_dataset",
          "a list of sources: `[{source: chats.jsonl}]`"),
    _same("training.data.train[].field", "text_column dataset_text_field text_field"),
    _same("training.data.train[].columns", "column_mapping field_mapping field_messages message_property_mappings"),
    _same("training.data.tokenizer", "tokenizer_name tokenizer_name_or_path tokenizer_config"),
    _same("training.data.sequenceLength",
          "max_seq_length max_seq_len max_length seq_len seq_length block_size cutoff_len sequence_len context_length"),
    _same("training.data.packing", "sample_packing pack_sequences"),
    _same("training.data.trainOn", "train_on_inputs assistant_only_loss completion_only_loss train_on_responses_only",
          "assistant, last, all or completion"),
    _same("training.data.truncation", "truncation_mode excess_length_strategy"),
    _same("training.data.addTokens", "special_tokens additional_special_tokens added_tokens"),
    _same("training.data.curation.exactDuplicates", "dataset_exact_deduplication"),
    # Optimisation
    _same("training.optimizer.lr", "learning_rate peak_lr max_lr"),
    _same("training.optimizer.name", "optim optimizer_type", "adamw or adamw8bit"),
    _same("training.optimizer.betas", "adam_beta1 adam_beta2 beta1 beta2", "both in one list: `[0.9, 0.95]`"),
    _same("training.optimizer.eps", "adam_epsilon"),
    _same("training.optimizer.clipNorm", "max_grad_norm gradient_clipping gradient_clip_val grad_clip"),
    _same("training.optimizer.schedule.name", "lr_scheduler lr_scheduler_type scheduler_type"),
    _same("training.optimizer.schedule.warmupSteps", "warmup_ratio num_warmup_steps", "a number of steps, not a share"),
    _same("training.optimizer.schedule.minRatio", "min_lr min_lr_ratio min_lr_rate cosine_min_lr_ratio",
          "a share of the highest learning rate"),
    _same("training.optimizer.groups", "lr_groups embedding_lr loraplus_lr_ratio"),
    _same("training.batch.microBatch", "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
          "samples of one forward pass of one rank"),
    _same("training.batch.tokensPerStep",
          "batch_size global_batch_size train_batch_size gradient_accumulation_steps gradient_accumulation",
          "tokens of one optimizer step over all ranks (samples × sequenceLength); accumulation follows from it"),
    _same("training.length.epochs", "num_train_epochs num_epochs n_epochs max_epochs"),
    _same("training.length.steps", "max_steps num_train_steps num_steps train_steps total_steps"),
    _same("training.precision", "bf16 fp16 tf32 fp8 mixed_precision torch_dtype dtype", "fp32, bf16, fp16 or fp8"),
    _same("training.labelSmoothing", "label_smoothing_factor"),
    _same("training.neftuneNoiseAlpha", "neftune_alpha neftune"),
    _same("training.seed", "data_seed random_seed"),
    _same("training.deterministic", "full_determinism"),
    # Objectives
    _same("training.dpo.beta", "dpo_beta rl_beta"),
    _same("training.dpo.loss", "dpo_loss_type", "sigmoid or ipo"),
    _same("training.dpo.labelSmoothing", "dpo_label_smoothing"),
    _same("training.orpo.beta", "orpo_alpha"),
    _same("training.simpo.gamma", "simpo_gamma gamma_beta_ratio"),
    _same("training.kto.desirableWeight", "kto_desirable_weight"),
    _same("training.kto.undesirableWeight", "kto_undesirable_weight"),
    _same("training.grpo.verifiers", "reward_funcs reward_functions"),
    _same("training.grpo.completions", "num_generations"),
    _same("training.grpo.maxTokens", "max_completion_length"),
    _same("training.grpo.maskTruncated", "mask_truncated_completions"),
    _same("training.grpo.iterations", "num_iterations"),
    # Memory and sharding
    _same("training.parallel.shard", "deepspeed fsdp fsdp_config zero_stage sharding_strategy fsdp_version",
          "auto, ddp, zero2, fsdp (also for ZeRO-3) or hsdp"),
    _same("training.parallel.context", "context_parallel_size context_parallel_degree cp_size sequence_parallel_size "
          "sequence_parallel_degree ulysses_sequence_parallel_size", "ranks that divide the tokens of each row"),
    _same("training.parallel.activationCheckpointing", "gradient_checkpointing use_gradient_checkpointing"),
    _same("training.parallel.compile", "torch_compile"),
    # Evaluation and checkpoints
    _same("training.evaluation.every", "eval_steps eval_interval evals_per_epoch evaluation_steps eval_strategy",
          "a number of steps"),
    _same("training.evaluation.holdout", "val_set_size test_size validation_split eval_split",
          "a share of the documents"),
    _same("training.evaluation.data", "eval_dataset validation_file eval_file test_datasets val_file"),
    _same("training.evaluation.metric", "metric_for_best_model"),
    _same("training.evaluation.better", "greater_is_better", "lower or higher"),
    _same("training.evaluation.earlyStopping.patience", "early_stopping_patience"),
    _same("training.evaluation.earlyStopping.minDelta", "early_stopping_threshold"),
    _same("training.evaluation.generate", "eval_table_size sample_prompts"),
    _same("checkpoint.uri", "output_dir out_dir save_dir checkpoint_dir"),
    _same("checkpoint.every", "save_steps save_interval saves_per_epoch save_strategy save_freq"),
    _same("checkpoint.keep.last", "save_total_limit max_checkpoints"),
    _same("checkpoint.keep.best", "load_best_model_at_end save_best"),
    # Trackers
    _same("tracking", "report_to loggers logging_dir", "its keys are tensorboard, wandb and mlflow"),
    _same("tracking.tensorboard", "use_tensorboard"),
    _same("tracking.wandb", "use_wandb"),
    _same("tracking.wandb.project", "wandb_project"),
    _same("tracking.wandb.entity", "wandb_entity"),
    _same("tracking.wandb.mode", "wandb_mode"),
    _same("tracking.mlflow", "use_mlflow"),
    _same("tracking.mlflow.url", "mlflow_tracking_uri"),
    _same("tracking.mlflow.experiment", "mlflow_experiment_name"),
    # Machines and programs
    _same("gang.nodes", "num_nodes nnodes node_count worker_count num_workers"),
    _same("gang.gpusPerNode",
          "gpus num_gpus n_gpus gpu_count nproc_per_node num_proc_per_node gpus_per_worker accelerators",
          "GPUs of each node"),
    _same("gang.instanceTypes", "instance_type machine_type"),
    _same("gang.capacity.prefer", "use_spot spot", "any, spot or on-demand"),
    _same("gang.processesPerNode", "num_processes processes"),
    _same("program.command", "run entrypoint script args cmd", "a list of words: `[python, train.py]`"),
    _same("program.source", "workdir working_dir code_dir source_dir"),
    _same("program.inputs", "file_mounts"),
    _same("runtime.env", "envs env_vars environment", "a list: `[{name: KEY, value: text}]`"),
    _same("runtime.image", "image_id docker_image container_image image_uri"),
    _same("recovery.budgets", "max_restarts backoff_limit max_retries job_recovery",
          "restarts are counted by their cause"),
    _same("activeDeadlineSeconds", "timeout max_time time_limit", "in seconds"),
    # Settings that Muster needs none for
    _same("", "logging_steps log_interval logging_strategy", "every step is recorded; leave it out"),
    _same("", "resume_from_checkpoint auto_resume",
          "a job resumes from its newest checkpoint by itself; leave it out (model.from starts from another job's)"),
    _same("", "remove_unused_columns", "columns that a format does not read are ignored; leave it out"),
)  # fmt: skip


def in_muster(name: str) -> ForeignName | None:
    """Return the setting that other tools call so, in whatever spelling; None if none does."""
    return _by_name().get(fold(name))


def with_hint(problem: DocumentProblem, model: type[BaseModel], at: str) -> DocumentProblem:
    """Return the problem of an unknown key with the key that was meant, if it is another tool's name or one of `model`
    at the wrong place; any other problem as it is. A sibling that is merely spelt otherwise is the better guess."""
    above, _, key = problem.path.rpartition(".")
    near = problem.did_you_mean
    if problem.message != UNKNOWN_KEY or (near is not None and fold(near) == fold(key)):
        return problem
    if (foreign := in_muster(key)) is not None:
        message = f"{UNKNOWN_KEY}: {foreign.note}" if foreign.note else UNKNOWN_KEY
        meant = f"{at}.{foreign.path}" if foreign.path else None
    elif near is None:
        message, meant = UNKNOWN_KEY, _elsewhere(key, above, model, at)
    else:
        return problem
    if meant is not None and meant.rpartition(".")[0] == re.sub(r"\[\d+\]", "[]", above):
        meant = meant.rpartition(".")[2]
    return dataclasses.replace(problem, message=message, did_you_mean=meant)


def _elsewhere(key: str, above: str, model: type[BaseModel], at: str) -> str | None:
    """The path of the one key of this name that is nearest to the top, in the same part of the document."""
    parts = above.removeprefix(at).removeprefix(".").split(".")
    paths = [
        path
        for path in _paths(model)
        if fold(path.rpartition(".")[2]) == fold(key) and (parts[0] in ("", path.partition(".")[0]))
    ]
    least = min((path.count(".") for path in paths), default=0)
    nearest = [path for path in paths if path.count(".") == least]
    return f"{at}.{nearest[0]}" if len(nearest) == 1 else None


@functools.cache
def _by_name() -> dict[str, ForeignName]:
    return {fold(name): setting for setting in FOREIGN_NAMES for name in setting.names}


@functools.cache
def _paths(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(path for path, _ in fields_within(model))
