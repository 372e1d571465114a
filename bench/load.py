"""Load OpenAI-compatible servers with streams and compare them: same prompts, in turn, in one run.

    python bench/load.py --server headrace=http://127.0.0.1:8000 --server peer=http://127.0.0.1:8100 \\
        --model smollm2 --streams 1 8 64 --rounds 3

Each round measures every server at every number of streams, one after the other, so that a busy machine hurts them alike;
the table shows medians over the rounds, and the ratio to the first server. Prompts are random common words, the same for each
server in a round, others in each round and for each --seed. One load generator process: it needs about 1 ms of CPU for a stream
of 64 tokens, which on a small machine is part of what is measured.
"""

import argparse
import asyncio
import random
import statistics
import time

import aiohttp
import msgspec

WORDS = (
    "time people way water day part sound work place year back give most very after thing our just name good sentence think "
    "say great where help through much before line right too mean old any same tell boy follow came want show also around form "
    "three small set put end does another well large must big even such because turn here why ask went men read need land"
).split()


class Measured(msgspec.Struct):
    """One server at one number of streams in one round. Times in seconds."""

    requests_per_s: float
    tokens_per_s: float
    ttft: list[float]
    tpot: list[float]
    errors: list[str]


class Streamed(msgspec.Struct):
    """One request. Seconds by `time.perf_counter`."""

    begun: float
    first: float
    last: float
    tokens: int


async def stream(session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int) -> Streamed:
    """Stream one completion. Raises ValueError for a refusal or a stream that is not whole, and what aiohttp raises."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    tokens, done = 0, False
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"{response.status} {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                break
            now = time.perf_counter()
            event = msgspec.json.decode(line[6:])
            if event.get("error"):
                raise ValueError(str(event["error"])[:200])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if event["choices"] and event["choices"][0]["text"]:
                first, last = first or now, now
    if not done or not first:
        raise ValueError("the stream ended without tokens or without [DONE]")
    return Streamed(start, first, last, tokens)


class Load:
    """A closed loop of `streams` clients that send `requests` requests in all, no prompt of which another round has."""

    def __init__(self, url: str, options: argparse.Namespace, streams: int, round_number: int) -> None:
        self._url, self._options, self._streams = url, options, streams
        self._work = f"{options.seed} {streams} {round_number}"
        self._numbers = iter(range(max(options.requests, options.per_stream * streams)))
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._tokens = 0
        self._errors: list[str] = []

    async def run(self) -> Measured:
        # a fresh connection per request: some servers close idle ones in the middle of a request
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=900)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            start = time.perf_counter()
            await asyncio.gather(*(self._client(session) for _ in range(self._streams)))
            seconds = time.perf_counter() - start
        return Measured(len(self._ttft) / seconds, self._tokens / seconds, self._ttft, self._tpot, self._errors)

    async def _client(self, session: aiohttp.ClientSession) -> None:
        for number in self._numbers:
            try:
                await self._request(session, number)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self._errors.append(repr(error)[:200])

    async def _request(self, session: aiohttp.ClientSession, number: int) -> None:
        words = random.Random(f"{self._work} {number}")
        prompt = " ".join(words.choice(WORDS) for _ in range(self._options.words))
        done = await stream(session, self._url, self._options.model, prompt, self._options.tokens)
        self._tokens += done.tokens
        self._ttft.append(done.first - done.begun)
        self._tpot.append((done.last - done.first) / max(done.tokens - 1, 1))


def percentile_ms(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else float("nan")


def rows_of(streams: int, found: dict[str, list[Measured]]) -> list[str]:
    """The table's rows for one number of streams."""
    rows = []
    first_rate: float | None = None
    for name, rounds in found.items():
        rate = statistics.median(each.tokens_per_s for each in rounds)
        first_rate = first_rate or rate
        ttft = [value for each in rounds for value in each.ttft]
        tpot = [value for each in rounds for value in each.tpot]
        rows.append(
            f"| {name} | {streams} | {statistics.median(each.requests_per_s for each in rounds):.1f} | {rate:.0f} "
            f"| {percentile_ms(ttft, 0.5):.1f} / {percentile_ms(ttft, 0.99):.1f} "
            f"| {percentile_ms(tpot, 0.5):.2f} / {percentile_ms(tpot, 0.99):.2f} "
            f"| {rate / first_rate:.2f} | {sum(len(each.errors) for each in rounds)} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL", help="several times to compare")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], help="numbers of clients at once")
    parser.add_argument("--requests", type=int, default=100, help="of each measurement at least")
    parser.add_argument("--per-stream", type=int, default=25, help="requests per client at least")
    parser.add_argument("--tokens", type=int, default=64, help="out, per request")
    parser.add_argument("--words", type=int, default=90, help="in, per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="another one: prompts that no server has cached")
    options = parser.parse_args()
    servers = dict(each.split("=", 1) for each in options.server)
    print("| server | streams | requests/s | tokens/s | TTFT p50 / p99 ms | TPOT p50 / p99 ms | ratio | errors |")
    print("|---|---|---|---|---|---|---|---|")
    failed: list[str] = []
    for streams in options.streams:
        found: dict[str, list[Measured]] = {name: [] for name in servers}
        for number in range(options.rounds):
            for name, url in servers.items():
                measured = asyncio.run(Load(url, options, streams, number).run())
                found[name].append(measured)
                failed += [f"{name}: {error}" for error in measured.errors[:1]]
        print("\n".join(rows_of(streams, found)), flush=True)
    for line in failed:
        print(line)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
