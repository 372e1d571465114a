"""The examples of docs/client.md, as they are written but for the address and the model."""

import re
from pathlib import Path

import pytest

from .conftest import LocalStack

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "client.md").read_text(), re.DOTALL)
MODEL = "client-examples"


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> LocalStack:
    stack.push("sim:fixed-20ms", MODEL)
    return stack


@pytest.mark.parametrize("way", ["http", "nats"])
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_does_what_it_says(served: LocalStack, way: str, number: int) -> None:
    url = served.http if way == "http" else served.settings().nats_url
    program = EXAMPLES[number].replace("http://127.0.0.1:8000", url).replace('"smollm2"', f'"{MODEL}"')
    exec(compile(program.replace("mills-1", f"mills-{way}"), f"client.md, example {number + 1}", "exec"), {})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5
    assert all("http://127.0.0.1:8000" in each for each in EXAMPLES)
