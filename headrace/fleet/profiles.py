"""A GPU with its model, simulated: the time of a step, room for keys and values, the phases of a cold start, a price.

Three kinds: figures as given (the paper's), a roofline computed from a GPU and a model, and what `headrace bench profile`
measured. Prices are assumptions, and a scenario may name its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import BadRequest
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.pacer import Cost
from workers.engine.probe import measure
from workers.engine.request import EngineInfo
from workers.engine.sequence import Load, StepPlan, load_of
from workers.engine.sim import by_sequences

T = TypeVar("T")
GB = 1e9
MAX_MODEL_LEN = 8192
BYTES = {"fp16": 2.0, "8-bit": 1.0, "4-bit": 0.5}
PAPER_POINTS = [(20, 20.0), (45, 22.0), (80, 45.0)]  # sequences in the batch, milliseconds of a step


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """`step_ms` is the truth of the simulation; what the pacer knows of it, it finds out as it does on a device."""

    name: str
    step_ms: Callable[[Load], float]
    slots: int  # of a worker, unless its settings say otherwise
    kv_tokens: int  # that fit into a worker's memory
    cold_start_s: dict[str, float]  # by phase
    usd_per_hour: float
    gpu: str = ""

    @property
    def blocks(self) -> int:
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def start_s(self) -> float:
        return sum(self.cold_start_s.values())


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Data sheet figures, dense."""

    tflops: dict[str, float]  # by dtype of the weights
    bandwidth_gb_s: float
    memory_gb: float
    usd_per_hour: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    parameters: float
    layers: int
    heads: int  # of queries
    kv_heads: int
    head_dim: int

    def kv_bytes(self, kv_dtype: str) -> float:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[kv_dtype]


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What is reached of the data sheet."""

    compute: float = 0.55  # of large products of matrices: 170 of an A100's 312 TFLOP/s
    bandwidth: float = 0.85
    overhead_ms: float = 1.0  # of a step: launches, sampling, the scheduler
    memory: float = 0.92  # what may be used
    reserve_gb: float = 1.0  # activations, graphs, the allocator


GPUS = {
    "a100-40g": Gpu(tflops={"fp16": 312, "8-bit": 624}, bandwidth_gb_s=1555, memory_gb=40, usd_per_hour=1.3),
    "a100-80g": Gpu(tflops={"fp16": 312, "8-bit": 624}, bandwidth_gb_s=2039, memory_gb=80, usd_per_hour=1.8),
    "l40s": Gpu(tflops={"fp16": 362, "8-bit": 733}, bandwidth_gb_s=864, memory_gb=48, usd_per_hour=1.0),
    "h100-80g": Gpu(tflops={"fp16": 989, "8-bit": 1979}, bandwidth_gb_s=3350, memory_gb=80, usd_per_hour=3.0),
    "h200": Gpu(tflops={"fp16": 989, "8-bit": 1979}, bandwidth_gb_s=4800, memory_gb=141, usd_per_hour=3.8),
}
MODELS = {
    "13b": Model(parameters=13.0e9, layers=40, heads=40, kv_heads=40, head_dim=128),
    "8b": Model(parameters=8.0e9, layers=32, heads=32, kv_heads=8, head_dim=128),
}


def cold_start_s(weights_gb: float, gb_per_s: float = 2.0) -> dict[str, float]:
    """Seconds by phase: what a worker's process takes, then its weights at the speed of a link or a disk."""
    return {
        "process": 1.5,
        "imports": 3.0,
        "device": 3.0,
        "fetch": weights_gb / gb_per_s,
        "load": weights_gb / 10,
        "probe": 1.0,
    }


def paper(memory_gb: int, kv_dtype: str, points: list[tuple[int, float]] | None = None) -> Profile:
    """The reference figures: 26 GB of weights, 0.8 MB of keys and values a token in fp16, prefill within the step."""
    if memory_gb not in (40, 80):
        raise BadRequest(f"the reference GPU has 40 or 80 GB, not {memory_gb}")
    kv_gb = 13 if memory_gb == 40 else 51
    points = points or PAPER_POINTS
    return Profile(
        name=f"a100-{memory_gb}g-13b, {kv_dtype} KV",
        step_ms=by_sequences(points, 45, 1).step_ms or _no_time,
        slots=45,
        kv_tokens=int(kv_gb * GB / (0.8e6 * _bytes(kv_dtype) / BYTES["fp16"])),
        cold_start_s=cold_start_s(26),
        usd_per_hour=GPUS[f"a100-{memory_gb}g"].usd_per_hour,
        gpu=f"a100-{memory_gb}g",
    )


def roofline(
    gpu_name: str, model_name: str, weights: str, kv_dtype: str, efficiency: Efficiency | None = None, slots: int = 64
) -> Profile:
    """A step takes as long as its arithmetic or its bytes do: prefill is bound by the one, decode by the other."""
    gpu, model, reached = _named(GPUS, gpu_name, "GPU"), _named(MODELS, model_name, "model"), efficiency or Efficiency()
    if weights not in gpu.tflops and weights != "4-bit":
        raise BadRequest(f"{gpu_name} does not compute with weights of {weights}")
    flops_ms = gpu.tflops.get(weights, gpu.tflops["fp16"]) * 1e9 * reached.compute
    bytes_ms = gpu.bandwidth_gb_s * 1e6 * reached.bandwidth
    weight_bytes = model.parameters * _bytes(weights)
    token_bytes = model.kv_bytes(kv_dtype)
    token_flops = 2 * model.parameters
    pair_flops = 4 * model.layers * model.heads * model.head_dim

    def step_ms(load: Load) -> float:
        flops = token_flops * (load.decodes + load.prefill) + pair_flops * (load.context + load.pairs)
        moved = weight_bytes + token_bytes * (load.context + load.prefill)
        return reached.overhead_ms + max(flops / flops_ms, moved / bytes_ms)

    kv_bytes = (gpu.memory_gb * reached.memory - reached.reserve_gb) * GB - weight_bytes
    if kv_bytes < token_bytes * MAX_MODEL_LEN / 4:
        raise BadRequest(f"{model_name} with weights of {weights} does not fit into {gpu_name}")
    return Profile(
        name=f"roofline {gpu_name}, {model_name}, {weights} weights, {kv_dtype} KV",
        step_ms=step_ms,
        slots=slots,
        kv_tokens=int(kv_bytes / token_bytes),
        cold_start_s=cold_start_s(weight_bytes / GB),
        usd_per_hour=gpu.usd_per_hour,
        gpu=gpu_name,
    )


def slower(profile: Profile, times: float) -> Profile:
    """The same with steps that take so many times as long."""
    return msgspec.structs.replace(
        profile, name=f"{profile.name}, x{times:g}", step_ms=lambda load: times * profile.step_ms(load)
    )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace bench profile` writes."""

    name: str
    cost: Cost
    slots: int
    kv_tokens: int
    cold_start_s: dict[str, float]
    usd_per_hour: float = 0.0


def measured(file: Path) -> Profile:
    """Raises BadRequest for what is no profile."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadRequest(f"{file} is no profile: {error}") from error
    return Profile(
        name=found.name,
        step_ms=found.cost.ms,
        slots=found.slots,
        kv_tokens=found.kv_tokens,
        cold_start_s=found.cold_start_s,
        usd_per_hour=found.usd_per_hour,
    )


class _Probed:
    """A device as the engine's own probe sees it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.seconds = 0.0

    def forward(self, plan: StepPlan) -> None:
        self.seconds += self._profile.step_ms(load_of(plan.slices)) / 1e3

    def sample(self, plan: StepPlan, computed: None) -> None:
        pass


def probed_cost(profile: Profile, slots: int, blocks: int, prefill_chunk: int) -> Cost:
    """What an engine's probe makes of this profile when it starts."""
    device = _Probed(profile)
    info = EngineInfo(max_model_len=MAX_MODEL_LEN, slots=slots, blocks_total=blocks, device=profile.gpu, dtype="")
    return measure(device, info, prefill_chunk, lambda: device.seconds)


def _bytes(dtype: str) -> float:
    return _named(BYTES, dtype, "dtype")


def _named(known: dict[str, T], name: str, what: str) -> T:
    if name not in known:
        raise BadRequest(f"no {what} {name!r}: there are {', '.join(known)}")
    return known[name]


def _no_time(load: Load) -> float:
    return 0.0
