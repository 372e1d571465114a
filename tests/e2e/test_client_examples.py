"""The examples of docs/client.md, as they are written but for the address and the model."""

import re
from pathlib import Path
from typing import Any

import pytest

from headrace import HeadraceError, SyncClient

from .conftest import LocalStack

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "client.md").read_text(), re.DOTALL)
MODEL, EMBEDDER = "client-examples", "client-vectors"


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> LocalStack:
    stack.push("sim:fixed-20ms", MODEL)
    stack.push("sim:embedder", EMBEDDER)
    return stack


@pytest.mark.parametrize("way", ["http", "nats"])
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_does_what_it_says(served: LocalStack, way: str, number: int) -> None:
    url = served.http if way == "http" else served.settings().nats_url
    program = EXAMPLES[number].replace("http://127.0.0.1:8000", url).replace("mills-1", f"mills-{way}")
    program = program.replace('"smollm2"', f'"{MODEL}"').replace('"minilm"', f'"{EMBEDDER}"')
    exec(compile(program, f"client.md, example {number + 1}", "exec"), {})


def test_vectors_are_the_same_both_ways_and_so_are_refusals(served: LocalStack) -> None:
    texts = [f"A mill. {number}" for number in range(150)]  # several packs
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        (EMBEDDER, texts, {}),
        (EMBEDDER, "one", {"dimensions": 4}),
        (EMBEDDER, [[1, 2], [3]], {"session": "s"}),
        (MODEL, "one", {}),
        (EMBEDDER, "one", {"dimensions": 5000}),
        (EMBEDDER, [], {}),
        ("no-such-model", "one", {}),
    ]

    def ask(client: SyncClient, model: str, input: Any, more: dict[str, Any]) -> Any:
        try:
            return client.embed(model, input, **more)
        except HeadraceError as error:
            return error.code, error.param

    told = []
    for url in (served.http, served.settings().nats_url):
        with SyncClient(url) as client:
            told.append([ask(client, *each) for each in asked])
            with pytest.raises(HeadraceError, match="makes embeddings"):
                client.generate(EMBEDDER, "one")
    assert told[0] == told[1]
    many, short, tokens, *refused = told[0]
    assert [len(each.vectors) for each in (many, short, tokens)] == [150, 1, 2]
    assert many.vectors[0] != many.vectors[149]
    assert (len(short.vectors[0]), tokens.prompt_tokens) == (4, 3)
    assert [code for code, _ in refused] == ["wrong_task", "invalid_request", "invalid_request", "model_not_found"]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 6
    assert all("http://127.0.0.1:8000" in each for each in EXAMPLES)
