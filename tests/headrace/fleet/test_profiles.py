"""Simulated GPUs: the figures of the paper, and the roofline's arithmetic."""

from pathlib import Path

import msgspec
import pytest

from headrace.fleet.profiles import Efficiency, Measured, measured, paper, probed_cost, roofline
from shared.errors import BadRequest
from workers.engine.pacer import Cost
from workers.engine.sequence import Load

PERFECT = Efficiency(compute=1.0, bandwidth=1.0, overhead_ms=0.0)


@pytest.mark.parametrize(("sequences", "ms"), [(20, 20.0), (45, 22.0), (80, 45.0)])
def test_the_steps_of_the_reference_gpu_are_those_of_the_paper(sequences: int, ms: float) -> None:
    assert paper(40, "fp16").step_ms(Load(sequences, sequences, 600 * sequences)) == pytest.approx(ms)


@pytest.mark.parametrize(("memory", "kv", "requests"), [(40, "fp16", 26), (40, "8-bit", 53), (80, "fp16", 104)])
def test_so_many_requests_of_600_tokens_fit(memory: int, kv: str, requests: int) -> None:
    assert paper(memory, kv).kv_tokens // 600 in (requests, requests + 1, requests + 2)


@pytest.mark.parametrize(("kv", "ms"), [("8-bit", 23.8), ("fp16", 30.9)])
def test_decoding_is_bound_by_the_bytes_of_weights_and_keys(kv: str, ms: float) -> None:
    """45 requests of 600 tokens: 26 GB of weights and 10.8 or 21.6 GB of KV at 1.55 TB/s."""
    profile = roofline("a100-40g", "13b", "fp16", kv, PERFECT)
    assert profile.step_ms(Load(45, 45, 45 * 600)) == pytest.approx(ms, rel=0.01)


def test_prefill_is_bound_by_arithmetic() -> None:
    """5,000 tokens of a 13B model are 130 TFLOP: a second of an A100 at 130 TFLOP/s."""
    profile = roofline("a100-80g", "13b", "fp16", "fp16", Efficiency(compute=130 / 312, overhead_ms=0.0))
    assert profile.step_ms(Load(1, 0, 0, 5000, 0)) == pytest.approx(1000, rel=0.01)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not fit"):
        roofline("a100-40g", "13b", "fp16", "fp16", Efficiency(memory=0.7))
    with pytest.raises(BadRequest, match="no GPU 'abacus'"):
        roofline("abacus", "13b", "fp16", "fp16")


def test_the_pacer_knows_what_its_probe_finds() -> None:
    cost = probed_cost(roofline("a100-80g", "13b", "fp16", "8-bit", PERFECT), 64, 2000, 512)
    assert cost.step == pytest.approx(26 / 2.039, rel=0.05)
    assert cost.context == pytest.approx(0.4096e6 / 2.039e9, rel=0.01)
    assert probed_cost(paper(40, "fp16"), 45, 1000, 512).decode == pytest.approx(0.08)


def test_a_measured_profile_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    cost = Cost(step=10.0, decode=1.0)
    file.write_bytes(
        msgspec.json.encode(Measured(name="cpu", cost=cost, slots=32, kv_tokens=4096, cold_start_s={"load": 2.0}))
    )
    profile = measured(file)
    assert profile.step_ms(Load(4, 4, 100)) == 14.0
    assert (profile.slots, profile.blocks, profile.start_s) == (32, 256, 2.0)
    file.write_text("{}")
    with pytest.raises(BadRequest, match="no profile"):
        measured(file)


@pytest.mark.parametrize("gpu", ["a100-80g", "h100-80g", "h200"])
def test_the_probe_sees_what_a_prompt_costs(gpu: str) -> None:
    """128 tokens would take no longer on these than reading the weights does, and seem to be free."""
    profile = roofline(gpu, "13b", "fp16", "fp16")
    cost = probed_cost(profile, 64, 2000, 512)
    for load in (Load(1, 0, 0, 512, 512 * 257), Load(9, 8, 4000, 512, 512 * 257)):
        assert cost.ms(load) == pytest.approx(profile.step_ms(load), rel=0.3)
