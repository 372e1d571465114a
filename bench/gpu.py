"""The engine on a GPU: each attention, eager and from graphs, keys and values in 16 and 8 bits, as one table.

    python bench/gpu.py [DIRECTORY] [--batches 1,8,32,128] [--prompt 512] [--output 64] [--json FILE]

Without a DIRECTORY the model is a random Llama of 1.1e9 weights. A line is one burst of equal requests: the decode step is the
median after the last prompt was computed; "weights alone" is what reading them once takes at the speed of a large copy.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import save_random_llama

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.runner_cuda import CudaRunner

VARIANTS: dict[str, dict[str, Any]] = {
    "triton, graphs": {"attention": "triton"},
    "triton, eager": {"attention": "triton"},
    "triton, graphs, fp8": {"attention": "triton", "kv_dtype": "fp8"},
    "triton, graphs, int8": {"attention": "triton", "kv_dtype": "int8"},
    "varlen": {"attention": "varlen"},
    "torch": {"attention": "torch"},
}
SLOTS = 128


class Burst:
    """Equal requests, all at once, and when their tokens came."""

    def __init__(self, engine: BatchEngine, count: int, prompt: int, output: int) -> None:
        self._engine = engine
        self._left = count
        self._count = count
        self._done = asyncio.Event()
        self._steps: list[tuple[float, int]] = []
        self._sizes = (prompt, output)

    def on_events(self, events: list[TokenEvent]) -> None:
        self._steps.append((time.perf_counter(), sum(len(event.ids) for event in events)))
        for event in events:
            if event.error is not None:
                raise SystemExit(f"the engine failed: {event.error}")
            self._left -= event.finish is not None
        if self._left == 0:
            self._done.set()

    async def run(self) -> dict[str, float]:
        prompt, output = self._sizes
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        for index in range(self._count):
            ids = [(7919 * position + 31 * index) % 250 for position in range(prompt)]
            self._engine.submit(
                EngineRequest(key=f"{begin} {index}", tenant="bench", prompt_ids=ids, sampling=sampling)
            )
        await self._done.wait()
        full = [index for index, (_, tokens) in enumerate(self._steps) if tokens == self._count]
        decodes = [self._steps[index][0] - self._steps[index - 1][0] for index in full[1:]]
        total = self._steps[-1][0] - begin
        return {
            "decode_ms": statistics.median(decodes) * 1e3 if decodes else float("nan"),
            "prefill_tokens_s": self._count * prompt / (self._steps[full[0]][0] - begin) if full else float("nan"),
            "output_tokens_s": self._count * output / total,
        }


async def measure(engine: BatchEngine, batches: list[int], prompt: int, output: int) -> dict[int, dict[str, float]]:
    current: list[Burst] = []
    engine.start(asyncio.get_running_loop(), lambda events: current[-1].on_events(events))
    results = {}
    for batch in batches:
        for _ in range(2):  # the first compiles kernels
            current.append(Burst(engine, batch, prompt, output))
            results[batch] = await current[-1].run()
    await asyncio.to_thread(engine.stop)
    return results


def copy_bytes_s() -> float:
    """Bytes read and written in a second by a large copy on the device."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        target.copy_(source)
    begin.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 5 * 2 * 2**32 / (begin.elapsed_time(end) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--variants", default=",".join(f"'{name}'" for name in VARIANTS), help="quoted names")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda is not available")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    bandwidth = copy_bytes_s()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_bytes_s": bandwidth, "variants": {}}
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.directory or save_random_llama(Path(scratch))
        torch.cuda.empty_cache()
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        for name, settings in VARIANTS.items():
            if f"'{name}'" not in arguments.variants:
                continue
            try:
                report["variants"][name] = run_variant(
                    name, directory, settings, batches, arguments, weights / bandwidth
                )
            except Exception as error:  # the other variants are worth measuring all the same
                report["variants"][name] = {"error": f"{type(error).__name__}: {error}"}
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1))


def run_variant(
    name: str, directory: Path, settings: dict[str, Any], batches: list[int], arguments: Any, weights_s: float
) -> dict[str, Any]:
    """Load, run all batch sizes, print a line each."""
    chosen = EngineSettings(dtype="bfloat16", slots=SLOTS, max_model_len=4096, prefill_chunk=2048, **settings)
    engine = load_engine("s3", directory, chosen, 1)
    assert isinstance(engine, BatchEngine)
    runner = engine._runner
    if name.endswith("eager") and isinstance(runner, CudaRunner):
        runner.graphs = None
    results = asyncio.run(measure(engine, batches, arguments.prompt, arguments.output))
    for batch, figures in results.items():
        print(
            f"{name:<22} B={batch:<4} decode {figures['decode_ms']:7.2f} ms (weights alone {weights_s * 1e3:.2f})"
            f"  {batch / figures['decode_ms'] * 1e3:8.0f} tok/s  prefill {figures['prefill_tokens_s']:8.0f} tok/s"
            f"  burst {figures['output_tokens_s']:7.0f} tok/s",
            flush=True,
        )
    return {"blocks": engine.info.blocks_total, "load_s": engine.info.load_seconds, "batches": results}


if __name__ == "__main__":
    main()
