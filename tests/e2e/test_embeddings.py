"""/v1/embeddings with a real encoder and a simulated one: OpenAI's SDK against real processes, from no worker on."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import CHAT, COMPLETIONS, Stack, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.model]

PATH = "/v1/embeddings"
TEXTS = [
    "A mill.",
    "Water turns the wheel of the mill. " * 20,
    "Räder aus Eichenholz",
    "x",
    "The headrace feeds the wheel.",
]
DIMENSIONS = 384

Reference = Callable[[list[str]], list[list[float]]]


@pytest.fixture(scope="module")
def vectors_stack(stack: Stack, minilm: Path) -> Stack:
    stack.push(minilm, "minilm", "--max-replicas", "1")
    stack.push("sim:embedder", "vectors")
    stack.push("sim:zero", "zero")
    return stack


def cosine(one: list[float], other: list[float]) -> float:
    products = sum(a * b for a, b in zip(one, other, strict=True))
    return products / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def refusal(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_the_sdk_gets_the_models_own_vectors_from_no_worker_on(vectors_stack: Stack, reference: Reference) -> None:
    assert not vectors_stack.workers("minilm")
    with openai.OpenAI(base_url=vectors_stack.url + "/v1", api_key="none", max_retries=0) as client:
        told = client.embeddings.create(model="minilm", input=TEXTS)  # it asks for base64
        floats = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
        assert "minilm" in [model.id for model in client.models.list()]
    assert [each.index for each in told.data] == list(range(len(TEXTS)))
    wanted = reference(TEXTS)
    for each, other, known in zip(told.data, floats.data, wanted, strict=True):
        assert len(each.embedding) == DIMENSIONS
        assert cosine(each.embedding, known) > 0.9999
        assert each.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert sum(number * number for number in each.embedding) == pytest.approx(1, abs=1e-5)
    answer = vectors_stack.post(PATH, {"model": "minilm", "input": TEXTS[0]})
    assert answer.json()["usage"] == {"prompt_tokens": 5, "total_tokens": 5}  # [CLS] a mill . [SEP]
    by_ids = vectors_stack.post(PATH, {"model": "minilm", "input": [101, 1037, 4971, 1012, 102]})
    assert by_ids.json()["data"][0]["embedding"] == pytest.approx(answer.json()["data"][0]["embedding"], abs=1e-5)
    log = next((vectors_stack.data / "logs").glob(f"worker-{vectors_stack.worker('minilm')['id']}*")).read_text()
    assert "first_token=" in log
    vectors_stack.idle()


def test_what_a_model_does_not_do_is_refused(vectors_stack: Stack) -> None:
    long = {"model": "minilm", "input": ["short", "word " * 300]}
    error = refusal(vectors_stack.post(PATH, long))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "256" in error["message"]
    assert "302" in error["message"]
    error = refusal(vectors_stack.post(PATH, {"model": "minilm", "input": "a", "dimensions": 100}))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "dimensions")
    assert refusal(vectors_stack.post(PATH, {"model": "zero", "input": "a"}))["code"] == "wrong_task"
    messages = [{"role": "user", "content": "Hi"}]
    for path, body in ((CHAT, {"messages": messages}), (COMPLETIONS, {"prompt": "Hi"})):
        error = refusal(vectors_stack.post(path, body | {"model": "minilm"}))
        assert (error["code"], error["param"]) == ("wrong_task", "model")
    vectors_stack.idle()


def test_thousands_of_inputs_come_back_in_order(vectors_stack: Stack) -> None:
    inputs = [" ".join(f"{number:04d}") + " again" * (number % 50) for number in range(2048)]
    asked = {"model": "vectors", "input": inputs, "encoding_format": "base64", "dimensions": 16}
    answer = vectors_stack.post(PATH, asked)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(2048))
    found = [struct.unpack("<16f", base64.b64decode(each["embedding"])) for each in data]
    assert len(set(found)) == 2048
    for number in (0, 777, 2047):
        alone = vectors_stack.post(PATH, {"model": "vectors", "input": inputs[number], "dimensions": 16}).json()
        assert found[number] == pytest.approx(alone["data"][0]["embedding"], abs=1e-7)
        assert sum(each * each for each in found[number]) == pytest.approx(1, abs=1e-5)
    some = {"model": "vectors", "input": inputs[:40]}
    once, again = (vectors_stack.post(PATH, some, **{"Idempotency-Key": "some"}) for _ in range(2))
    assert (once.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert again.json() == once.json()
    error = refusal(vectors_stack.post(PATH, {"model": "vectors", "input": ["a"] * 2049}))
    assert error["param"] == "input"
    assert "2049" in error["message"]
    vectors_stack.idle()


def test_a_job_and_a_batch_have_the_routes_own_answers(vectors_stack: Stack) -> None:
    bodies = [{"model": "vectors", "input": [f"line {number}", "and"], "dimensions": 16} for number in range(5)]
    wanted = [vectors_stack.post(PATH, body).json() for body in bodies]
    many = {"model": "vectors", "input": [f"word {number}" for number in range(100)], "encoding_format": "base64"}
    made = vectors_stack.post("/v1/jobs", {"endpoint": PATH, "body": many})
    assert made.status_code == 202, made.text
    job = httpx.get(vectors_stack.url + made.headers["location"], params={"wait": 30}, timeout=60).json()
    assert job["status"] == "completed"
    result = httpx.get(f"{vectors_stack.url}/v1/jobs/{job['id']}/result").json()
    assert result["data"] == vectors_stack.post(PATH, many).json()["data"]
    assert refusal(httpx.get(f"{vectors_stack.url}/v1/jobs/{job['id']}/events"))["param"] == "stream"
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body})
        for number, body in enumerate(bodies)
    ]
    with openai.OpenAI(base_url=vectors_stack.url + "/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        batch = wait_for(lambda: (found := client.batches.retrieve(batch.id)).completed_at and found, 60, "the batch")
        assert batch.output_file_id is not None
        told = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    found = {each["custom_id"]: each["response"]["body"] for each in told}
    assert [found[str(number)] for number in range(5)] == wanted
    vectors_stack.idle()


def test_a_worker_that_is_killed_costs_no_vector(vectors_stack: Stack, reference: Reference) -> None:
    inputs = [f"Sentence {number}: " + "the wheel of the mill turns. " * 20 for number in range(96)]
    vectors_stack.post(PATH, {"model": "minilm", "input": "wake up"})
    worker = vectors_stack.worker("minilm")
    metrics = f"http://127.0.0.1:{worker['metrics_port']}/metrics"

    def steps() -> float:
        lines = httpx.get(metrics).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("headrace_engine_steps_total{"))

    before = steps()
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(vectors_stack.post, PATH, {"model": "minilm", "input": inputs})
        wait_for(lambda: steps() >= before + 3, what="a part of the vectors")
        assert not answering.done()
        vectors_stack.kill(worker["pid"])
        answer = answering.result()
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["x-headrace-claims"]) > 1
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(inputs)))
    some = list(range(0, len(inputs), 15))
    for number, known in zip(some, reference([inputs[number] for number in some]), strict=True):
        assert cosine(data[number]["embedding"], known) > 0.9999
    vectors_stack.idle()


def test_many_callers_share_the_batches(vectors_stack: Stack, reference: Reference) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=vectors_stack.url, timeout=120) as client:
            return await asyncio.gather(
                *(client.post(PATH, json={"model": "minilm", "input": f"caller {number}"}) for number in range(32))
            )

    answers = asyncio.run(ask())
    wanted = reference([f"caller {number}" for number in range(32)])
    for answer, known in zip(answers, wanted, strict=True):
        assert answer.status_code == 200, answer.text
        assert cosine(answer.json()["data"][0]["embedding"], known) > 0.9999
    vectors_stack.idle()
