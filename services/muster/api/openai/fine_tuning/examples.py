"""Examples for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from muster.api.core.http.openapi import AT, UID

_NUMBERS = {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 1.0, "beta": None}
JOB: dict[str, Any] = {
    "id": f"ftjob-{UID}",
    "object": "fine_tuning.job",
    "created_at": int(AT),
    "finished_at": None,
    "estimated_finish": int(AT) + 1_800,
    "model": "llama-3.1-8b",
    "fine_tuned_model": None,
    "organization_id": "default",
    "status": "running",
    "hyperparameters": _NUMBERS,
    "method": {"type": "supervised", "supervised": {"hyperparameters": _NUMBERS}, "dpo": None},
    "training_file": "s3://data/chat.jsonl",
    "validation_file": None,
    "result_files": [],
    "trained_tokens": None,
    "seed": 17,
    "error": None,
    "integrations": [],
    "metadata": {"team": "nlp"},
    "x_job_id": UID,
    "x_chosen": ["n_epochs 3, for 1,204 examples"],
    "x_restarts": 0,
}
JOB_LIST: dict[str, Any] = {"object": "list", "data": [JOB], "has_more": False}
EVENT_LIST: dict[str, Any] = {
    "object": "list",
    "data": [
        {
            "id": f"ftevent-{UID}-9",
            "object": "fine_tuning.job.event",
            "created_at": int(AT) + 95,
            "level": "info",
            "message": "evaluation loss 1.4120 at step 40",
            "type": "metrics",
            "data": {"step": 40, "valid_loss": 1.412},
            "x_type": "evaluation.completed",
        }
    ],
    "has_more": True,
}
CHECKPOINT_LIST: dict[str, Any] = {
    "object": "list",
    "data": [
        {
            "id": f"ftckpt-{UID}-40",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(AT) + 96,
            "fine_tuned_model_checkpoint": f"ft:llama-3.1-8b:default:support:{UID}:ckpt-step-40",
            "fine_tuning_job_id": f"ftjob-{UID}",
            "step_number": 40,
            "metrics": {"step": 40.0, "train_loss": 1.38, "valid_loss": 1.412, "full_valid_loss": 1.412},
        }
    ],
    "first_id": f"ftckpt-{UID}-40",
    "last_id": f"ftckpt-{UID}-40",
    "has_more": False,
}
