"""A load holds the weights once: what is mapped from the file is not copied beside, and what is packed goes as it is packed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from random_model import save_random_llama
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from shared.settings import MIB
from workers.engine import gate, model
from workers.engine.load import LoadRefused, load_engine
from workers.engine.native import build

LOAD = """
import re, sys, threading
from pathlib import Path
from shared.records import EngineSettings
from workers.engine.load import import_engine, load_engine

def anonymous_kib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    while not over.wait(0.02):
        seen.append(anonymous_kib())

def grown_bytes(dtype):
    global over, seen
    over, seen, before = threading.Event(), [0], anonymous_kib()
    watching = threading.Thread(target=watch)
    watching.start()
    load_engine("s3", Path(sys.argv[1]), EngineSettings(dtype=dtype, kv_blocks=16, max_model_len=256), 1)
    over.set()
    watching.join()
    return (max(seen) - before) * 1024

import_engine("s3")
print(grown_bytes("bfloat16"), grown_bytes("float32"))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 48 MiB in bfloat16; its largest matrices have 4 MiB."""
    return save_random_llama(
        tmp_path_factory.mktemp("llama"), hidden=512, layers=8, heads=8, key_heads=4, vocabulary=4_000
    )


def test_the_weights_are_in_memory_once(directory: Path) -> None:
    stored = (directory / "model.safetensors").stat().st_size
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(directory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    for grown, once in zip(map(int, ran.stdout.split()), (stored, 2 * stored), strict=True):
        assert grown < 1.3 * once + 24 * MIB, f"{grown / MIB:.0f} MiB for {once / MIB:.0f} MiB of weights"


@pytest.mark.skipif(
    build.find() is None or not build.cpu_flags() >= build.CPU_NEEDED,
    reason="our kernels are not compiled for this CPU",
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_that_our_kernels_are_refused_for_gets_its_weights_back(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compare = gate.compare
    compared: list[Any] = []

    def refuse_the_first(*arguments: Any) -> None:
        compared.append(arguments)
        if len(compared) == 1:
            raise LoadRefused("it computes something else")
        compare(*arguments)  # with the model's own logits from before

    monkeypatch.setattr(model.gate, "compare", refuse_the_first)
    load_engine("s3", save_tiny_model(family, tmp_path), EngineSettings(dtype="float32", kv_blocks=16), 1)
    assert "NativeDevice" in caplog.text
    assert [type(arguments[1]).__name__ for arguments in compared] == ["NativeRunner", "TorchRunner"]
