"""A version's life on a whole stack: a model in shards is pushed, served, and removed once nothing uses it."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

BUDGET_S = 90.0
ASKED: dict[str, Any] = {"prompt": "a b c", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def shards(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model in several files with an index."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "shards"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(directory, max_shard_size="40KB")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert (directory / "model.safetensors.index.json").exists()
    return directory


def greedy(directory: Path) -> str:
    """What the model itself says to the prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer(ASKED["prompt"], return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=ASKED["max_tokens"], do_sample=False)
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_model_in_shards_is_served_and_removed_once_nothing_uses_it(
    stack: Any, tiny_model: Path, shards: Path
) -> None:
    stack.push(shards, "shards", "--set", "dtype=float32", "--idle-seconds", "1")
    stack.push("sim:zero", "shards", version="v2")
    with httpx.Client(base_url=stack.http, timeout=BUDGET_S) as client:

        def ask(model: str) -> httpx.Response:
            return client.post("/v1/completions", json=ASKED | {"model": model})

        assert ask("shards").raise_for_status().json()["choices"][0]["text"] == greedy(tiny_model)
        refused = stack.headrace("models", "rm", "shards@v1")
        assert refused.returncode == 1
        assert "shards@v1 is in use: the alias stable points at it; 100% of the model's traffic" in refused.stderr

        deadline = time.monotonic() + BUDGET_S
        while (removed := stack.headrace("models", "rm", "shards")).returncode:
            assert "in use: workers: 1" in removed.stderr, removed.stderr  # until it was idle for a second
            assert time.monotonic() < deadline
        assert removed.stdout.startswith("removed shards@v1, and ")
        while (gone := ask("shards@v1")).status_code == 200:  # the ingress hears of it by a watch
            assert time.monotonic() < deadline
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "version_retired")
        assert "shards" not in [model["id"] for model in client.get("/v1/models").json()["data"]]
