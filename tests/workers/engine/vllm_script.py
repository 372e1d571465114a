"""Runs in an interpreter that has vLLM: drives one engine through all that test_vllm_real.py looks at, prints it as JSON.

python vllm_script.py MODEL_DIRECTORY
"""

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from engine_driver import Driver, request

from shared.records import EngineSettings
from shared.wire import Input, Sampling
from workers.engine.load import load_engine


async def drive(engine: Any) -> dict[str, Any]:
    driver = Driver(engine)
    prompt = engine.prepare(Input(prompt="The capital of France is"), Sampling())

    async def one(key: str, ids: list[int] | None = None, **sampling: Any) -> Any:
        driver.submit(request(key, ids or prompt, **sampling))
        await driver.ended(key)
        return driver.outcomes[key]

    greedy = await one("greedy", max_tokens=24, ignore_eos=True)
    ids = greedy.ids[0]
    await one("resumed", max_tokens=24, ignore_eos=True, prefix=[ids[:10]])
    stop = greedy.whole_text[12:16]
    await one("stopped", max_tokens=24, ignore_eos=True, stop=[stop])
    await one("several", max_tokens=8, n=3, temperature=1.0, seed=5, ignore_eos=True)
    await one("again", max_tokens=8, n=3, temperature=1.0, seed=5, ignore_eos=True)
    await one("scored", max_tokens=2, logprobs=3, ignore_eos=True)
    await one("stop id", max_tokens=24, ignore_eos=True, stop_token_ids=[ids[3]])
    driver.submit(
        *(request(f"many {index}", [*prompt, 100 + index], max_tokens=6, ignore_eos=True) for index in range(9))
    )
    driver.submit(request("long", prompt, max_tokens=400, ignore_eos=True))
    await driver.until(lambda: driver.outcomes["long"].ids.get(0))
    engine.cancel("long")
    await driver.ended(*(f"many {index}" for index in range(9)))
    await driver.until(lambda: engine.stats().running == 0)
    seen = len(driver.outcomes["long"].ids[0])
    await one("after", max_tokens=3, ignore_eos=True)
    stats = engine.stats()
    engine.stop()
    return {
        "outcomes": {key: dataclasses.asdict(outcome) for key, outcome in driver.outcomes.items()},
        "stop": stop,
        "prompt": prompt,
        "cancelled_at": [seen, len(driver.outcomes["long"].ids[0])],
        "stats": msgspec.to_builtins(stats),
        "info": msgspec.to_builtins(engine.info),
    }


def main() -> None:
    begin = time.monotonic()
    settings = EngineSettings(engine="vllm", dtype="bfloat16", max_model_len=512, slots=4, prefill_chunk=256)
    engine = load_engine("s3", Path(sys.argv[1]), settings, 0)
    loaded = time.monotonic() - begin
    result = asyncio.run(drive(engine)) | {"load_s": loaded}
    print("RESULT " + json.dumps(result, default=msgspec.to_builtins), flush=True)


if __name__ == "__main__":
    main()
