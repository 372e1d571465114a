"""What a model must be to be served, and that a refusal says why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import request, run_all
from tiny_models import GROUPED, SIZES, save_byte_tokenizer, save_tiny_model

from shared.records import EngineSettings
from workers.engine import gate
from workers.engine.load import LoadRefused, load_engine
from workers.engine.memory import block_bytes


def config(family: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **settings)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0} | more}


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("minimax", GROUPED, "linear_attention"),
        ("llama4_text", GROUPED, "chunked_attention"),
        ("llama", GROUPED | rope("dynamic", original_max_position_embeddings=128), "dynamic .* at most 128"),
        (
            "phi3",
            GROUPED
            | {"pad_token_id": 0, "original_max_position_embeddings": 64}
            | rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4),
            "longrope .* at most 64",
        ),
    ],
)
def test_configurations_that_packing_would_break_are_refused(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LoadRefused, match=reason):
        gate.refuse_by_config(config(family, **settings), None)


@pytest.mark.parametrize(
    ("family", "settings", "max_model_len"),
    [
        ("llama", GROUPED, None),
        ("gemma3_text", GROUPED, None),
        ("llama", GROUPED | rope("linear"), None),
        ("llama", GROUPED | rope("dynamic", original_max_position_embeddings=128), 128),
    ],
)
def test_configurations_that_are_safe_pass(family: str, settings: dict[str, Any], max_model_len: int | None) -> None:
    gate.refuse_by_config(config(family, **settings), max_model_len)


def save(directory: Path, family: str, **settings: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config(family, **settings)).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def refused(directory: Path, settings: EngineSettings | None = None) -> str:
    with pytest.raises(LoadRefused) as refusal:
        load_engine("s3", directory, settings or EngineSettings(dtype="float32"), 1)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("falcon", SIZES),
        ("xglm", {"vocab_size": 257, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    ],
)
def test_models_without_the_attention_interface_are_refused(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reason = refused(save(tmp_path, family, **settings))
    assert "attention interface" in reason
    assert "vLLM" in reason


@pytest.mark.filterwarnings("ignore:.*is_decoder.*")
def test_a_model_that_is_silently_wrong_when_packed_is_refused(tmp_path: Path) -> None:
    # Its attention is bidirectional: nothing but its logits tells.
    settings = SIZES | {"intermediate_size": 48, "initializer_range": 0.3}
    reason = refused(save(tmp_path, "bert", **settings))
    assert "differs" in reason
    assert "vLLM" in reason


def test_a_window_that_the_attention_is_not_told_of_is_refused(tmp_path: Path) -> None:
    # Its window is in a mask only, and longer than the prompt of the comparison.
    settings = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100}
    reason = refused(save(tmp_path, "phimoe", **settings))
    assert "2 layers of PhimoeForCausalLM have a sliding window, and only 0" in reason
    assert "vLLM" in reason


def test_what_a_model_raises_when_packed_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert "ValueError: no such luck" in refused(save_tiny_model("llama", tmp_path))


def test_the_cache_is_sized_from_the_real_shapes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from workers.engine import attention

    directory = save_tiny_model("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention.NAME)
    with torch.inference_mode():
        shapes = gate.probe(model, 2)
    assert [(shape.heads, shape.key_dim, shape.value_dim) for shape in shapes] == [(2, 16, 16)] * 2
    with pytest.raises(LoadRefused, match="2 calls in 3 layers"), torch.inference_mode():
        gate.probe(model, 3)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path)


def test_an_unknown_dtype_is_refused(tiny: Path) -> None:
    assert "int3" in refused(tiny, EngineSettings(dtype="int3"))


def test_an_unknown_type_of_keys_and_values_is_refused(tiny: Path) -> None:
    reason = refused(tiny, EngineSettings(kv_dtype="fp8"))
    assert "kv_dtype is one of auto, int8; not 'fp8'" in reason


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_served_with_keys_and_values_in_eight_bits(tiny: Path, dtype: str, kernels: str) -> None:
    engine = load_engine("s3", tiny, EngineSettings(dtype=dtype, kernels=kernels, kv_dtype="int8"), 1)
    outcome, other = run_all(engine, request("a", [1, 2, 3]), request("b", [9] * 40, max_tokens=5))
    assert outcome.usage is not None
    assert other.usage is not None


def test_a_block_in_eight_bits_has_numbers_of_a_byte_and_scales() -> None:
    shapes = [gate.LayerShape(torch.nn.Identity(), 3, 64, 48, 9, False)] * 2
    assert block_bytes(shapes, torch.bfloat16) == 2 * 16 * 3 * (64 + 48) * 2
    assert block_bytes(shapes, torch.bfloat16, int8=True) == 2 * 16 * 3 * (64 + 48 + 2 * 2)


def test_more_length_than_the_model_has_is_refused(tiny: Path) -> None:
    reason = refused(tiny, EngineSettings(max_model_len=1000))
    assert "1000" in reason
    assert "256" in reason


@pytest.mark.parametrize("name", ["max_model_len", "slots", "kv_blocks", "prefill_chunk"])
def test_sizes_below_one_are_refused(tiny: Path, name: str) -> None:
    assert f"{name} must be at least 1, not 0" in refused(tiny, EngineSettings(**{name: 0}))


def test_the_smallest_sizes_load(tiny: Path) -> None:
    settings = EngineSettings(dtype="float32", slots=1, prefill_chunk=1, kv_blocks=1)
    (outcome,) = run_all(load_engine("s3", tiny, settings, 1), request("a", [1, 2, 3], max_tokens=13))
    assert outcome.usage is not None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"not weights", "weights cannot be loaded"),
        ("model.safetensors", None, "weights cannot be loaded"),
        ("config.json", b"{", "config.json cannot be used"),
        ("config.json", b'{"model_type": "unheard-of"}', "unheard-of"),
        ("tokenizer.json", b"{}", "tokenizer cannot be loaded"),
    ],
)
def test_broken_files_are_refused(tiny: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is None:
        (tiny / name).unlink()
    else:
        (tiny / name).write_bytes(content)
    assert reason in refused(tiny)


PHASES = ["config", "tokenizer", "weights", "gate", "pack", "check", "cache"]


def test_settings_and_shapes_make_the_info(tiny: Path) -> None:
    engine = load_engine("s3", tiny, EngineSettings(dtype="float32", slots=3, kv_blocks=7, max_model_len=200), 1)
    info = engine.info
    assert (info.slots, info.blocks_total, info.max_model_len) == (3, 7, 112)
    assert (info.dtype, list(info.load_seconds)) == (
        "float32",
        PHASES,
    )
    default = load_engine("s3", tiny, EngineSettings(), 1).info
    assert default.max_model_len == 256
    assert default.blocks_total == default.slots * 16
