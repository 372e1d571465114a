"""Embeddings through a whole server beside plain transformers: the same texts, in turn, in one run.

    python bench/embeddings.py DIRECTORY --data .headrace --model NAME [--texts 512] [--rounds 5]

DIRECTORY holds the model that NAME serves on the stack of --data, one that pools by the mean and normalises. Plain
transformers does as sentence-transformers does: texts sorted by length, in batches of 32, padded to the longest. The server
gets them all in one request, as OpenAI's SDK sends it (base64). The table shows medians over the rounds, of texts a second,
and of CPU time a text: of this process, and of all the stack's together. On a busy machine only the latter says much.
"""

import argparse
import base64
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as workers have it: before torch is imported

import random
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import psutil
import torch
from load import WORDS
from transformers import AutoModel, AutoTokenizer

BATCH = 32
COSINE_MIN = 0.9999
KINDS = {"short": (4, 12), "mixed": (4, 160), "long": (140, 160)}  # words of a text


class Cost(msgspec.Struct):
    """Of a round."""

    texts_per_s: float
    cpu_ms: float  # a text


Vectors = list[list[float]]
Embed = Callable[[list[str]], Vectors]


class Plain:
    """A loop over batches."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModel.from_pretrained(directory).eval()

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        found: dict[int, list[float]] = {}
        for first in range(0, len(order), BATCH):
            numbers = order[first : first + BATCH]
            given = self._tokenizer(
                [texts[number] for number in numbers],
                padding="longest",
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            mask = given["attention_mask"][:, :, None]
            outputs = self._model(**given).last_hidden_state
            vectors = torch.nn.functional.normalize((outputs * mask).sum(1) / mask.sum(1))
            found |= dict(zip(numbers, vectors.tolist(), strict=True))
        return [found[number] for number in range(len(texts))]


def server(url: str, model: str) -> Embed:
    """Asks for all texts at once."""
    client = httpx.Client(base_url=url, timeout=600)

    def vectors(texts: list[str]) -> Vectors:
        body = {"model": model, "input": texts, "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", json=body).raise_for_status().json()
        raw = [base64.b64decode(each["embedding"]) for each in answer["data"]]
        return [list(struct.unpack(f"<{len(each) // 4}f", each)) for each in raw]

    return vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    chosen = random.Random(given.seed)
    stack = json.loads((given.data / "stack.json").read_text())
    plain, served = Plain(given.directory), server(stack["http"], given.model)
    plain(["warm up"])
    served(["warm up"])
    print("| texts | | texts/s | CPU ms a text |")
    print("|---|---|---|---|")
    for kind, words in KINDS.items():
        rounds = []
        for _ in range(given.rounds):
            texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(*words))) for _ in range(given.texts)]
            rounds.append(compare(plain, served, texts, stack["pid"]))
        for name, costs in zip(("plain transformers", "the stack"), zip(*rounds, strict=True), strict=True):
            rate, cpu = (statistics.median(each) for each in zip(*map(msgspec.structs.astuple, costs), strict=True))
            print(f"| {kind}, {words[0]} to {words[1]} words | {name} | {rate:.0f} | {cpu:.2f} |")
        ratios = [statistics.median(find(mine) / find(other) for other, mine in rounds) for find in FIELDS]
        print(f"| | ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


FIELDS: tuple[Callable[[Cost], float], ...] = (lambda cost: cost.texts_per_s, lambda cost: cost.cpu_ms)


def compare(plain: Embed, served: Embed, texts: list[str], pid: int) -> tuple[Cost, Cost]:
    """The costs of both. Raises ValueError if their vectors do not agree."""
    first, one = measure(lambda: plain(texts), len(texts), time.process_time)
    second, other = measure(lambda: served(texts), len(texts), lambda: cpu_s(pid))
    for vector, known in zip(second, first, strict=True):
        if sum(a * b for a, b in zip(vector, known, strict=True)) < COSINE_MIN:
            raise ValueError("the server's vectors are not the model's")
    return one, other


def measure(work: Callable[[], Vectors], texts: int, clock: Callable[[], float]) -> tuple[Vectors, Cost]:
    begin, begin_cpu = time.perf_counter(), clock()
    found = work()
    return found, Cost(texts / (time.perf_counter() - begin), (clock() - begin_cpu) * 1e3 / texts)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of all below it."""
    parent = psutil.Process(pid)
    times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
