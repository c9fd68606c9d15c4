"""Evaluate a checkpoint with lm-eval, and leave its numbers for Muster: `pip install lm-eval` into the image."""

import json
import os
import sys

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

here = os.path.dirname(os.path.abspath(__file__))
model, tasks = os.path.join(os.environ["MUSTER_INPUTS_DIR"], "checkpoint"), sys.argv[1:] or ["sums"]
os.chdir(here)  # the task names its data from here
found = simple_evaluate(
    model="hf",
    device="cuda" if torch.cuda.is_available() else "cpu",
    model_args={"pretrained": model},
    tasks=tasks,
    task_manager=TaskManager(include_path=os.path.join(here, "tasks")),
)
numbers = {}
for task, values in found["results"].items():
    for name, value in values.items():
        metric, _, form = name.partition(",")  # such as acc,none
        if isinstance(value, (int, float)):
            numbers[f"{task}/{metric}" if form in ("", "none") else f"{task}/{metric}:{form}"] = value
with open(os.environ["MUSTER_RESULTS"], "w") as file:
    json.dump(numbers, file)
print(numbers)
