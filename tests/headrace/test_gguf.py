"""GGUF files become what a version is made of."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from msgspec.structs import replace

from headrace import gguf
from headrace.push import push_version
from shared.errors import BadRequest
from shared.records import EngineSettings, VersionLimits
from shared.settings import Settings

EMBEDDING = numpy.random.default_rng(0).standard_normal((258, 32)).astype(numpy.float16)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with a byte-level tokenizer."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer: Any = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|end|>"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    writer.add_tensor("token_embd.weight", EMBEDDING)
    writer.add_tensor("output.weight", EMBEDDING)
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", numpy.full(shape, 0.01, numpy.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(32, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_converted_and_can_be_served(file: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from workers.engine.load import load_engine

    gguf.convert(file, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    engine = load_engine("s3", tmp_path, EngineSettings(dtype="float32", kv_blocks=16), 1)
    assert engine.info.max_model_len == 64
    weights = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights, torch.from_numpy(EMBEDDING).to(torch.bfloat16))


def test_a_push_converts_it(
    file: Path, nats_url: str, s3_settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(s3_settings, nats_url=nats_url, s3_bucket="test-gguf", data_dir=str(tmp_path / "data"))
    push_version(settings, str(file), "org/gguf", "v1", EngineSettings(), VersionLimits(), 0.0)
    shown = capsys.readouterr()
    assert shown.out == "org/gguf@v1 is registered\n"
    assert f"converting {file}" in shown.err
    assert list((tmp_path / "data").iterdir()) == []  # what was converted is gone
    push_version(settings, str(file), "org/gguf", "v1", EngineSettings(), VersionLimits(warm=1), 0.0)
    assert "registered before, and its limits and settings stay as they are" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"GGUF and then nothing", b"no such thing at all"])
def test_what_cannot_be_converted_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=r"broken.gguf cannot be converted"):
        gguf.convert(path, tmp_path)
    with pytest.raises(BadRequest, match="is no file"):
        gguf.convert(tmp_path / "nothing.gguf", tmp_path)
