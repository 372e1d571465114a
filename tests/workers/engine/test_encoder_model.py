"""Vectors by our engine against plain transformers: the real model, and tiny ones of every pooling."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.packing import read_directory
from shared.encoders import Encoder
from shared.records import EngineSettings
from shared.wire import Embedding, Sampling
from workers.engine.load import LoadRefused, load_engine
from workers.engine.request import EngineRequest, TokenEvent

SENTENCE_TRANSFORMERS = "sentence_transformers.models."


def encoder_of(directory: Path, settings: EngineSettings | None = None) -> Encoder:
    found = read_directory(directory, "m", "v", settings or EngineSettings(), lambda _done, _total: None).encoder
    assert found is not None
    return found


def embedded(directory: Path, inputs: list[str | list[int]], **settings: Any) -> list[np.ndarray]:
    """The vectors of one request of all inputs."""
    chosen = EngineSettings(**settings)
    engine = load_engine("s3", directory, chosen, 1, encoder_of(directory, chosen))
    ids = engine.prepare_inputs(Embedding(inputs))
    found: dict[int, np.ndarray] = {}

    async def main() -> None:
        ended = asyncio.Event()

        def on_events(events: list[TokenEvent]) -> None:
            for event in events:
                assert event.error is None
                assert event.choice not in found
                found[event.choice] = np.frombuffer(event.vector, dtype="<f4")
            if len(found) == len(ids):
                ended.set()

        engine.start(asyncio.get_running_loop(), on_events)
        sampling = Sampling(n=len(ids))
        engine.submit(EngineRequest(key="k", tenant="t", prompt_ids=[], sampling=sampling, inputs=ids))
        async with asyncio.timeout(120):
            await ended.wait()
        engine.stop()

    asyncio.run(main())
    return [found[number] for number in range(len(ids))]


@pytest.mark.model
def test_the_real_models_vectors_are_those_of_plain_transformers(
    minilm: Path, reference: Callable[[list[str]], list[list[float]]]
) -> None:
    words = "water from the headrace turns the wheel of the mill".split()
    texts = [" ".join(words[: 1 + number % 10] * (1 + number % 9)) for number in range(40)]
    texts += ["x", "Räder, 水車 и мельница", "word " * 254]
    encoder = encoder_of(minilm)
    assert (encoder.dimensions, encoder.length, encoder.positions) == (384, 256, 512)
    for mine, wanted in zip(embedded(minilm, list(texts)), reference(texts), strict=True):
        assert mine @ np.array(wanted) > 0.99999
        assert np.linalg.norm(mine) == pytest.approx(1, abs=1e-5)


def tiny(directory: Path, kind: str, pooling: str, normalize: bool, **config: Any) -> Path:
    """A model of two layers with random weights, as sentence-transformers lays it out."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(directory)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    given = {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, **config}
    torch.manual_seed(3)
    AutoModel.from_config(AutoConfig.for_model(kind, **sizes, **given)).save_pretrained(directory)
    modules = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    listed = [
        {
            "idx": number,
            "name": str(number),
            "path": "" if not number else f"{number}_{name}",
            "type": SENTENCE_TRANSFORMERS + name,
        }
        for number, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    modes |= {f"pooling_mode_{pooling}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | modes))
    return directory


def pooled(outputs: np.ndarray, pooling: str) -> np.ndarray:
    """As sentence-transformers defines them, of one text's outputs [T, D]."""
    by_name: dict[str, Callable[[], np.ndarray]] = {
        "cls_token": lambda: outputs[0],
        "mean_tokens": lambda: outputs.mean(0),
        "max_tokens": lambda: outputs.max(0),
        "mean_sqrt_len_tokens": lambda: outputs.sum(0) / np.sqrt(len(outputs)),
        "lasttoken": lambda: outputs[-1],
    }
    return by_name[pooling]()


CASES = [
    ("bert", "cls_token", True, {}),
    ("bert", "max_tokens", False, {}),
    ("bert", "mean_sqrt_len_tokens", False, {}),
    ("distilbert", "mean_tokens", True, {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2}),
    ("roberta", "mean_tokens", False, {}),
    ("qwen3", "lasttoken", True, {"num_key_value_heads": 2, "head_dim": 8}),  # a decoder that was trained for it
]


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize", "config"), CASES, ids=[f"{each[0]}-{each[1]}" for each in CASES]
)
def test_vectors_of_a_mixed_batch_are_those_of_each_text_alone(
    tmp_path: Path, kind: str, pooling: str, normalize: bool, config: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    directory = tiny(tmp_path, kind, pooling, normalize, **config)
    texts = ["a", "a b c d e f g h", "b c d", "c c c c c c c c c c c c c c c c c c c c", "h g", "a b"]
    found = embedded(directory, list(texts))
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory).eval()
    for mine, text in zip(found, texts, strict=True):
        with torch.inference_mode():
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            wanted = pooled(model(input_ids=ids).last_hidden_state[0].numpy(), pooling)
        if normalize:
            wanted = wanted / np.linalg.norm(wanted)
        assert mine == pytest.approx(wanted, abs=2e-5)
    assert embedded(directory, [tokenizer(texts[1])["input_ids"]])[0] == pytest.approx(found[1], abs=2e-5)


def test_a_model_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = tiny(tmp_path / "whole", "bert", "mean_tokens", True)
    encoder = encoder_of(directory)
    wider = Encoder(dimensions=64, length=64, positions=64, pooling="mean_tokens", normalized=True)
    for settings, chosen, reason in (
        (EngineSettings(), wider, "have 32 numbers, and its files say 64"),
        (EngineSettings(weights="int8"), encoder, "weights=int8 is for models that generate"),
        (EngineSettings(engine="vllm"), encoder, "engine=vllm is for models that generate"),
        (EngineSettings(max_model_len=65), encoder, "not within the model's 64 tokens"),
    ):
        with pytest.raises(LoadRefused, match=reason):
            load_engine("s3", directory, settings, 1, chosen)
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    weights = load_file(broken / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    save_file(
        {key: each for key, each in weights.items() if key != name}, broken / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(LoadRefused, match=f"the weights lack {name}"):
        load_engine("s3", broken, EngineSettings(), 1, encoder)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(directory, spoilt)
    save_file(
        {key: each * float("nan") for key, each in weights.items()}, spoilt / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(LoadRefused, match="not finite"):
        load_engine("s3", spoilt, EngineSettings(), 1, encoder)
