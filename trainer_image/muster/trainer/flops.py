"""Model FLOPs and device peaks, for the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from muster.contract.architecture import Architecture
from muster.contract.training import Precision

# Dense peak per second by precision, from the vendors' data sheets (without sparsity). fp32 counts TF32 as off.
PEAKS: dict[str, dict[Precision, float]] = {
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    "A10G": {"bf16": 70e12, "fp16": 70e12, "fp32": 31.5e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
}


def per_token(architecture: Architecture, sequence_length: int) -> float:
    """FLOPs to train on one token: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B).

    N are the weights that a token is multiplied with: all but the embedding table, which is only looked up (a tied
    table counts once, as the head). Attention counts the full T; repeated work counts for nothing.
    """
    a = architecture
    embedding = 0 if a.tied_head else a.vocab_size * a.dim
    return 6.0 * (a.parameters - embedding) + 12.0 * a.layers * a.heads * a.head_dim * sequence_length


def peak(device_name: str, precision: Precision) -> float | None:
    """The peak of a device by its name as CUDA gives it (`NVIDIA H100 80GB HBM3`); None where it is not known."""
    name = device_name.replace("-", " ")
    for sku, peaks in PEAKS.items():
        if all(word in name.split() for word in sku.split()):
            return peaks.get(precision)
    return None


def utilisation(
    flops_per_token: float, tokens_per_second: float, peak_per_rank: float | None, ranks: int
) -> float | None:
    """MFU, from 0 to 1. tokens_per_second: over all ranks."""
    return None if peak_per_rank is None else flops_per_token * tokens_per_second / (peak_per_rank * ranks)
