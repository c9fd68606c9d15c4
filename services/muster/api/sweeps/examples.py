"""A sweep as the description of the API shows it."""

from __future__ import annotations

from typing import Any

from muster.words.names import API_VERSION, KIND
from muster.words.times import rfc3339

_ID = "5b1c7a3e-2f0d-4a77-9d52-6c1f0f7f8a10"
_JOB = "0c9a2f1d-7a3b-4a86-8d0e-51b7f3f0a7c2"
_AT = 1_795_000_000.0

EXAMPLE_SWEEP: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "stdlib-lr"},
    "sweep": {
        "parameters": {
            "training.optimizer.lr": {"min": 0.0001, "max": 0.01, "log": True},
            "training.optimizer.weightDecay": {"values": [0.0, 0.1]},
        },
        "search": "random",
        "trials": 12,
        "seed": 7,
        "concurrency": 3,
        "metric": {"name": "loss"},
        "stopping": {"kind": "asha", "minSteps": 50, "factor": 3},
    },
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
            "batch": {"tokensPerStep": 16_384, "microBatch": 8},
            "length": {"steps": 200},
            "evaluation": {"every": 50, "holdout": 0.05},
        },
    },
}
_PARAMETERS = {"training.optimizer.lr": 0.00213, "training.optimizer.weightDecay": 0.1}
SUMMARY: dict[str, Any] = {
    "id": _ID,
    "name": "stdlib-lr",
    "project": "nlp",
    "owner": "ann",
    "phase": "Running",
    "because": "5 of 12 trials have started, 3 of them have not ended, 1 was stopped early",
    "metric": {"name": "loss", "better": "lower"},
    "trials": 12,
    "started": 5,
    "live": 3,
    "bestTrial": 1,
    "bestValue": 2.31,
    "createdAt": rfc3339(_AT),
    "finishedAt": None,
}
DETAIL: dict[str, Any] = {
    **SUMMARY,
    "metadata": EXAMPLE_SWEEP["metadata"],
    "sweep": EXAMPLE_SWEEP["sweep"],
    "spec": EXAMPLE_SWEEP["spec"],
    "best": {
        "trial": 1,
        "parameters": _PARAMETERS,
        "value": 2.31,
        "valueStep": 200,
        "job": "stdlib-lr-1",
        "commit": {"job": _JOB, "step": 200},
    },
    "table": [
        {
            "number": 1,
            "parameters": _PARAMETERS,
            "jobId": _JOB,
            "job": "stdlib-lr-1",
            "phase": "Succeeded",
            "step": 200,
            "steps": 200,
            "value": 2.31,
            "valueStep": 200,
            "lastValue": 2.31,
            "lastStep": 200,
            "rungs": [{"step": 50, "value": 3.4, "place": 1, "of": 1, "goesOn": True}],
            "reason": None,
        }
    ],
}
