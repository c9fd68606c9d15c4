"""Jobs of other launchers as jobs of Muster's: what is carried over, and what is named because it is not."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from muster.cli.foreign.jobs import ImportedJob, NotReadable, import_document, import_torchrun
from muster.cli.foreign.torchrun import ProgramCommand, read_line, read_words
from muster.documents.yaml_text import read_yaml
from muster.recipe.document import parse_job

PYTORCH_JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: bert_Large, namespace: team, labels: {app: bert}}
spec:
  elasticPolicy: {minReplicas: 2, maxReplicas: 4, nProcPerNode: 8, maxRestarts: 10, rdzvBackend: c10d}
  runPolicy: {activeDeadlineSeconds: 3600, backoffLimit: 3, schedulingPolicy: {queue: research}}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector: {pool: gpu}
          tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
          hostNetwork: true
          initContainers: [{name: fetch, image: x}]
          volumes:
          - {name: dshm, emptyDir: {medium: Memory}}
          - {name: data, persistentVolumeClaim: {claimName: data}}
          - {name: disk, hostPath: {path: /mnt}}
          containers:
          - name: logger
            image: log:1
          - name: pytorch
            image: my/image:1
            workingDir: /workspace
            command: [torchrun, --nnodes=$NNODES, --rdzv_backend, c10d, train.py]
            args: [--lr, "$(LR)"]
            env:
            - {name: LR, value: "0.1"}
            - {name: NCCL_DEBUG, value: INFO}
            - {name: MASTER_PORT, value: "1"}
            - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
            - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
            resources:
              requests: {cpu: 32}
              limits: {nvidia.com/gpu: 8, cpu: 64, memory: 512Gi, vpc.amazonaws.com/efa: 4}
            volumeMounts:
            - {name: dshm, mountPath: /dev/shm}
            - {name: data, mountPath: /data, readOnly: true}
            - {name: disk, mountPath: /scratch}
"""
TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llama}
spec:
  runtimeRef: {name: torch-distributed}
  initializer:
    model: {storageUri: "hf://org/model"}
    dataset: {storageUri: "hf://org/data"}
  trainer:
    image: my/image:1
    command: [torchrun, train.py, --epochs, "3"]
    numNodes: 2
    numProcPerNode: auto
    resourcesPerNode: {limits: {nvidia.com/gpu: "4"}}
"""
SKY_TASK = """
name: Finetune Llama
num_nodes: 2
workdir: ~/code
resources: {accelerators: "H100:8", use_spot: true, cpus: 32+, memory: 256+, image_id: "docker:my/image:1", infra: aws}
envs: {MODEL: llama, TOKEN: null}
secrets: {HF_TOKEN: null}
file_mounts: {/data: "s3://bucket/data"}
setup: pip install -r requirements.txt
run: |
  MASTER=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  torchrun --nnodes $SKYPILOT_NUM_NODES --node_rank $SKYPILOT_NODE_RANK --master_addr $MASTER train.py
"""


def read(text: str) -> ImportedJob:
    imported = import_document(read_yaml(text).data)
    parse_job(imported.document)  # as the API reads it
    return imported


def places(imported: ImportedJob) -> set[str]:
    return {sentence.partition(": ")[0] for sentence in imported.left}


def test_a_pytorch_job_keeps_its_gang_its_pods_and_its_command() -> None:
    imported = read(PYTORCH_JOB)
    assert imported.document["metadata"] == {"name": "bert-large"}
    assert imported.spec == {
        "program": {"command": ["train.py", "--lr", "0.1"]},
        "gang": {
            "nodes": {"min": 2, "max": 4},
            "gpusPerNode": 8,
            "resources": {"cpu": "64", "memory": "512Gi"},
        },
        "runtime": {
            "image": "my/image:1",
            "env": [
                {"name": "LR", "value": "0.1"},
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [
                {
                    "name": "data",
                    "persistentVolumeClaim": {"claimName": "data"},
                    "mountPath": "/data",
                    "readOnly": True,
                }
            ],
        },
        "activeDeadlineSeconds": 3600,
    }


def test_what_a_pytorch_job_loses_is_named() -> None:
    pod = "spec.pytorchReplicaSpecs.Worker.template.spec"
    assert places(read(PYTORCH_JOB)) == {
        "checkpoints",
        "metadata.labels",
        "metadata.name",
        "metadata.namespace",
        "torchrun --nnodes $NNODES",
        "spec.elasticPolicy.maxRestarts",
        "spec.runPolicy.backoffLimit",
        "spec.runPolicy.schedulingPolicy.queue",
        f"{pod}.containers[logger]",
        f"{pod}.containers[pytorch].env[IP]",
        f"{pod}.containers[pytorch].env[MASTER_PORT]",
        f"{pod}.containers[pytorch].workingDir",
        f"{pod}.hostNetwork",
        f"{pod}.initContainers",
        f"{pod}.resources.vpc.amazonaws.com/efa",
        f"{pod}.volumes[disk]",
    }


def test_a_master_counts_as_a_worker_and_a_single_process_stays_one() -> None:
    pod = (
        "{spec: {containers: [{name: pytorch, command: [python, train.py], resources: {limits: {nvidia.com/gpu: 8}}}]}}"
    )
    specs = f"{{Master: {{replicas: 1, template: {pod}}}, Worker: {{replicas: 3, template: {pod}}}}}"
    imported = read(f"{{kind: PyTorchJob, metadata: {{name: a}}, spec: {{pytorchReplicaSpecs: {specs}}}}}")
    assert imported.spec["gang"] == {"nodes": 4, "gpusPerNode": 8}
    assert imported.spec["program"] == {"command": ["train.py"], "launcher": "none"}
    assert places(imported) == {"program.launcher", "checkpoints"}


def test_a_train_job_keeps_its_model_as_an_input() -> None:
    imported = read(TRAIN_JOB)
    assert imported.spec == {
        "program": {"command": ["train.py", "--epochs", "3"], "inputs": {"model": {"source": "hf://org/model"}}},
        "gang": {"nodes": 2, "gpusPerNode": 4},
        "runtime": {"image": "my/image:1"},
    }
    lost = {"spec.runtimeRef", "spec.initializer.model", "spec.initializer.dataset", "checkpoints"}
    assert places(imported) == lost


def test_a_sky_task_keeps_its_script_and_its_folder() -> None:
    imported = read(SKY_TASK)
    script = read_yaml(SKY_TASK).data["run"]
    exports = "export SKYPILOT_NUM_NODES=$PET_NNODES\nexport SKYPILOT_NODE_RANK=$PET_NODE_RANK\n"
    assert imported.document["metadata"] == {"name": "finetune-llama"}
    assert imported.spec == {
        "program": {"command": ["bash", "-c", exports + script], "launcher": "none", "source": "~/code"},
        "gang": {
            "nodes": 2,
            "gpusPerNode": 8,
            "capacity": {"prefer": "spot"},
            "resources": {"cpu": "32", "memory": "256Gi"},
        },
        "runtime": {"image": "my/image:1", "env": [{"name": "MODEL", "value": "llama"}]},
    }
    assert places(imported) == {
        "checkpoints",
        "envs.TOKEN",
        "file_mounts./data",
        "resources.accelerators",
        "resources.infra",
        "run",
        "secrets.HF_TOKEN",
        "setup",
    }


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python train.py --a b", ProgramCommand(("train.py", "--a", "b"))),
        ("/opt/bin/python3.11 -m pkg.main", ProgramCommand(("-m", "pkg.main"))),
        ("python -c 'print(1)'", ProgramCommand(("python", "-c", "print(1)"))),
        ("lm_eval --model hf", ProgramCommand(("lm_eval", "--model", "hf"))),
        ("torchrun --standalone --nproc-per-node 2 train.py", ProgramCommand(("train.py",), ranks=2, has_ranks=True)),
        (
            "torchrun --nnodes=1:4 --nproc_per_node=8 -m pkg x",
            ProgramCommand(("-m", "pkg", "x"), nodes=(1, 4), ranks=8, has_ranks=True),
        ),
        (
            "python -m torch.distributed.run --nnodes 2 run x",
            ProgramCommand(("python", "run", "x"), nodes=2, has_ranks=True),
        ),
        ("torchrun --no-python --nnodes 2 ./run.sh", ProgramCommand(("./run.sh",), nodes=2, has_ranks=True)),
    ],
)
def test_commands_are_read_with_what_their_torchrun_says(line: str, command: ProgramCommand) -> None:
    assert read_words(shlex.split(line)) == command


def test_variables_of_a_script_are_left_to_a_shell() -> None:
    line = 'torchrun --nnodes=$N --nproc-per-node=4 --master-addr $A \\\n train.py --name "$USER run"'
    found = read_line(line)
    assert found is not None
    assert found.words == ("bash", "-c", 'exec python train.py --name "$USER run"')
    assert (found.launcher, found.nodes, found.ranks) == ("torchrun", None, 4)


@pytest.mark.parametrize("line", ["cd x && python train.py", "A=1 python train.py", "python a.py\npython b.py", "'"])
def test_what_only_a_shell_can_run_is_no_command(line: str) -> None:
    assert read_line(line) is None


def test_a_torchrun_line_is_a_job_of_the_folder_around_it() -> None:
    imported = import_torchrun("torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 train.py")
    parse_job(imported.document)
    assert imported.document["metadata"] == {"name": "train"}
    assert imported.spec == {
        "program": {"command": ["train.py"], "source": "."},
        "gang": {"nodes": 2, "gpusPerNode": 8},
    }
    assert places(imported) == {"torchrun --max-restarts 3", "gang", "program.source", "checkpoints"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "is not a mapping"),
        ({"a": 1}, "neither a kind nor a `run`"),
        ({"kind": "TFJob", "apiVersion": "kubeflow.org/v1"}, "kind 'TFJob' of 'kubeflow.org/v1'"),
        ({"kind": "TrainingJob"}, "`muster submit` takes it"),
        ({"kind": "PyTorchJob"}, "has no Master and no Worker"),
        ({"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": {}}}}, "a pod without a container"),
        ({"kind": "TrainJob", "spec": {"runtimeRef": {"name": "t"}}}, "has no spec.trainer.command"),
        ({"resources": {}}, "has no `run`"),
        ({"run": "torchrun --nnodes 2"}, "torchrun has no script to start"),
    ],
)
def test_what_can_not_be_read_says_why(document: Any, words: str) -> None:
    with pytest.raises(NotReadable, match=words):
        import_document(document)
