"""Model FLOPs and device peaks: how much of the hardware the model's own work uses (MFU), and all work (HFU).

Work per token, by N, the weights that a token is multiplied with (all but an embedding table, which is only looked up;
a tied table counts once, as the head), L layers of H heads of Q dimensions, and sequences of T tokens:

    MFU   6 N + 12 L H Q T                     two per weight in the forward pass, four in the backward pass
    HFU   (6 + 2 r) N + (12 + 4 r) L H Q T     r: the share of the forward pass that is done again

(Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198, on repeated
work.) Attention counts the full square of T x T, also where a mask is causal and a kernel skips half of it: so do the
sources, and so figures compare. A weight that is frozen alongside an adapter needs no gradient of its own: 4 N in place
of 6 N, and (4 + 2 r) N with repeated work; the adapter's own weights count as any trained ones. Attention has no
weights and costs the same.
"""

from __future__ import annotations

from muster.plan.model_size import ModelSize
from muster.recipe.training import Precision

# The forward pass that is done again: all of it, or about half (the attention and its neighbours; an estimate).
REPEATED = {"none": 0.0, "selective": 0.5, "full": 1.0}

# Dense peak per second by precision, from NVIDIA's data sheets of each product: where a sheet gives a figure with
# sparsity, half of it. fp32 counts TF32 as off; fp8 is that of the linear layers alone. The A10G is AWS' own
# variant, as its product page has it.
PEAKS: dict[str, dict[Precision, float]] = {
    "B200": {"fp8": 4500e12, "bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12},
    "H200": {"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H100 NVL": {"fp8": 1671e12, "bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "H100 PCIe": {"fp8": 1513e12, "bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100": {"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "L40S": {"fp8": 733e12, "bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "L4": {"fp8": 242e12, "bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    "A10G": {"bf16": 70e12, "fp16": 70e12, "fp32": 31.5e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
}


def per_token(size: ModelSize, sequence_length: int, repeated: float = 0.0) -> float:
    """FLOPs to train on one token. `repeated` is the r of the formula above; 0 gives the model's own work."""
    attention = size.layers * size.heads * size.head_dim * sequence_length
    trained, frozen = size.active_learning, size.active - size.active_learning
    weights = (6.0 + 2.0 * repeated) * trained + (4.0 + 2.0 * repeated) * frozen
    return weights + (12.0 + 4.0 * repeated) * attention


def hardware_share(size: ModelSize, sequence_length: int, recompute: str) -> float:
    """HFU over MFU. `recompute` is none, selective or full, as in parallel.activationCheckpointing."""
    return per_token(size, sequence_length, REPEATED[recompute]) / per_token(size, sequence_length)


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
    """MFU, from 0 to 1; None where the peak is not known. `tokens_per_second` is that of all ranks together."""
    return None if peak_per_rank is None else flops_per_token * tokens_per_second / (peak_per_rank * ranks)
