"""Check that this worker has the GPUs that its job requests; where it has not, the evidence shows whose fault it is.

A job that requests GPUs never trains on a CPU. It would run for hours at a hundredth of the speed, on a node that
somebody pays for, and look healthy. The launcher's preflight checks before the workers connect, and every rank checks
again, because not every worker has a preflight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from muster.local.gpus import driver_version, has_control_device
from muster.trainer.errors import NodeUnfit, UserError

WORDS_LENGTH_MAX = 300


@dataclass(frozen=True)
class GpuFacts:
    """Facts about the GPUs that a worker can observe."""

    torch: str  # its version
    built_for: str  # such as `CUDA 12.8`; empty: torch was built for the CPU alone
    count: int  # of GPUs that torch sees
    driver: str  # the version of NVIDIA's; empty: none is loaded
    control_device: bool  # /dev/nvidiactl, without which no program reaches a GPU
    words: str = ""  # torch's own, on why it sees none
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    nccl: str = ""  # the version of NCCL in torch; empty: it has none


def read_facts(environ: Mapping[str, str] = os.environ) -> GpuFacts:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    if getattr(torch.version, "hip", None):
        built = f"ROCm {torch.version.hip}"
    count, words = torch.cuda.device_count(), ""
    if not count and built:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            words = (str(error).strip().splitlines() or [""])[0][:WORDS_LENGTH_MAX]
    return GpuFacts(
        torch=torch.__version__,
        built_for=built,
        count=count,
        driver=driver_version(),
        control_device=has_control_device(),
        words=words,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        nccl=_nccl_version() if torch.version.cuda else "",
    )


def _nccl_version() -> str:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def must_have_gpus(facts: GpuFacts, ranks: int) -> None:
    """Raise UserError for a torch or a variable of the job that can see no GPU, NodeUnfit for a node that has none to
    give to `ranks` ranks.
    """
    if facts.count >= ranks:
        return
    driver = f"driver {facts.driver}" if facts.driver else "no NVIDIA driver is loaded"
    asked = f"this job asks for {_gpus(ranks)} per node"
    if not facts.built_for:
        raise UserError(
            f"{asked}, and its torch {facts.torch} was built without CUDA ({driver}): use an image (on one machine, an "
            "installation of torch) that has it, or set gang.gpusPerNode to 0 to train on the CPU"
        )
    torch = f"torch {facts.torch} for {facts.built_for} sees {facts.count or 'none'}"
    if facts.visible is not None and len([name for name in facts.visible.split(",") if name.strip()]) < ranks:
        raise UserError(
            f"{asked}, and CUDA_VISIBLE_DEVICES={facts.visible} hides them: {torch} ({driver}); leave it out of "
            "runtime.env"
        )
    why = [driver]
    if not facts.control_device:
        why.append("/dev/nvidiactl is missing: the container was started without NVIDIA's runtime, or there is no GPU")
    if facts.words:
        why.append(facts.words)
    raise NodeUnfit(f"preflight failed: {asked}, and {torch}: {'; '.join(why)}")


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
