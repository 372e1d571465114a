"""Going over to compiled kernels while requests are served: nothing waits for it, and no running request notices."""

import asyncio
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import BUDGET_S, Driver, request, run_all
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.engine import Drawn, Runner
from workers.engine.load import load_engine
from workers.engine.native import build
from workers.engine.native.runner import NativeRunner, UpgradingRunner
from workers.engine.scheduler import Sequence, Slice, StepPlan

compiled = pytest.mark.skipif(
    not build.can_build() or not build.cpu_flags() >= build.CPU_NEEDED, reason="no compiler, or no kernels for this CPU"
)


class Named(Runner):
    """Gives each sequence its own name as a token, and says who gave it in the log probabilities."""

    def __init__(self, name: int, logprobs: bool = False) -> None:
        self.name = name
        self.logprobs = logprobs
        self.steps: list[list[int]] = []

    def forward(self, plan: StepPlan) -> None:
        self.steps.append([int(part.sequence.key) for part in plan.slices])

    def sample(self, plan: StepPlan, computed: None) -> Drawn:
        tokens = [self.name + int(part.sequence.key) for part in plan.slices if part.samples]
        return Drawn(tokens, [None] * len(tokens) if self.logprobs else None)


def sequence(name: int) -> Sequence:
    return Sequence(str(name), "t", 0, Sampling(), [1, 2, 3], 3, 10)


def plan(*parts: tuple[Sequence, bool]) -> StepPlan:
    return StepPlan([Slice(each, 0, 1, samples) for each, samples in parts])


def test_a_sequence_stays_with_what_computed_its_first_token() -> None:
    retired: list[bool] = []
    old, new = Named(100), Named(200, logprobs=True)
    runner = UpgradingRunner(old, lambda: retired.append(True))
    a, b, c, d = (sequence(name) for name in range(4))

    def tokens(*parts: tuple[Sequence, bool]) -> list[int]:
        step = plan(*parts)
        return runner.sample(step, runner.forward(step)).tokens

    assert tokens((a, True), (b, False)) == [100]
    runner.offer(new)
    assert tokens((c, True), (a, True), (b, False), (d, True)) == [202, 100, 203]
    assert new.steps == [[2, 3]]
    assert old.steps == [[0, 1], [0, 1]]
    assert tokens((c, True), (d, True), (b, True)) == [202, 203, 101]
    assert not retired
    assert tokens((d, True), (c, True)) == [203, 202]
    assert retired == [True]
    assert tokens((a, True), (c, True)) == [200, 202], "one that comes back after that is computed anew"
    assert retired == [True]


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that waits for this file to exist before it gives what the real one made."""
    made, go, compiler = build.build(), tmp_path / "go", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ntouch {tmp_path}/called\nwhile [ ! -e {go} ]; do sleep 0.02; done\ncp {made} "$(eval echo \\${{$#}})"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    return go


@compiled
def test_requests_are_served_while_the_kernels_are_compiled_and_by_them_afterwards(
    slow_compiler: Path, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    plain = load_engine("s3", directory, EngineSettings(dtype="float32", kernels="torch"), 1)
    expected = run_all(plain, request("a", [1, 2, 3], max_tokens=60), request("b", [9, 8], max_tokens=60))
    engine: Any = load_engine("s3", directory, EngineSettings(dtype="float32"), 1)

    async def main() -> None:
        driver = Driver(engine)
        driver.submit(request("a", [1, 2, 3], max_tokens=60))
        await driver.ended("a")
        assert not isinstance(engine._runner._current, NativeRunner)
        await asyncio.to_thread(slow_compiler.touch)
        # Long requests run across the change-over; then there are none but new ones.
        number = 0
        while not isinstance(engine._runner._current, NativeRunner) or engine._runner._retiring is not None:
            driver.submit(request(f"b{number}", [9, 8], max_tokens=60))
            await driver.ended(f"b{number}")
            number += 1
        driver.submit(request("a again", [1, 2, 3], max_tokens=60))
        await driver.ended()
        await driver.idle()
        assert driver.outcomes["a"].ids == driver.outcomes["a again"].ids == expected[0].ids
        assert all(driver.outcomes[f"b{each}"].ids == expected[1].ids for each in range(number))

    async def bounded() -> None:
        async with asyncio.timeout(BUDGET_S):
            await main()

    asyncio.run(bounded())
    engine.stop()


@compiled
def test_a_second_start_takes_what_the_first_compiled(slow_compiler: Path, tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    slow_compiler.touch()
    first = build.build()
    (tmp_path / "called").unlink()
    engine: Any = load_engine("s3", directory, EngineSettings(dtype="float32"), 1)
    assert isinstance(engine._runner, NativeRunner)
    assert build.build() == first
    assert not (tmp_path / "called").exists()


@compiled
def test_a_compiler_that_fails_leaves_torch_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = shutil.which("false")
    assert failing is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", failing)
    with pytest.raises(build.CannotBuild, match="false failed"):
        build.build()
    engine: Any = load_engine("s3", save_tiny_model("llama", tmp_path / "model"), EngineSettings(), 1)
    end = time.monotonic() + BUDGET_S
    while "plain torch goes on" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert "plain torch goes on" in caplog.text
    (outcome,) = run_all(engine, request("a", [1, 2, 3]))
    assert len(outcome.ids[0]) == 12


def test_no_compiler_and_no_place_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "no such thing"))
    assert not build.can_build()
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        build.build()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.CannotBuild, match="cannot be kept in"):
        build.build()


def test_another_cpu_gets_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build._path()
    assert build._path() == path
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx512f"}))
    assert build._path() != path


@compiled
def test_a_model_that_the_kernels_compute_otherwise_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.build()
    real = NativeRunner.forward
    monkeypatch.setattr(NativeRunner, "forward", lambda self, step: torch.flip(real(self, step), [1]))
    engine: Any = load_engine("s3", save_tiny_model("llama", tmp_path / "model"), EngineSettings(dtype="float32"), 1)
    assert not isinstance(engine._runner, NativeRunner)
    assert "LlamaForCausalLM does without" in caplog.text
    (outcome,) = run_all(engine, request("a", [1, 2, 3]))
    assert len(outcome.ids[0]) == 12
