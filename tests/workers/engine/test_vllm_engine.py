"""vLLM behind our protocol, with a stand-in for vLLM: admission, text, stops, ends, resumes and its failure."""

import asyncio
import math
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from engine_driver import BUDGET_S, Driver, request

from shared.errors import Unsupported
from shared.records import EngineSettings
from shared.wire import Grammar, Input, Sampling
from workers.engine.load import LoadRefused, load_engine
from workers.engine.request import EngineInfo
from workers.engine.sim import WORDS, SimulatedText
from workers.engine.vllm_engine import VllmEngine
from workers.engine.vllm_load import vllm_arguments
from workers.engine.vllm_params import parameters


@dataclass
class StandIn:
    """Token i after a prompt p is (p[0] + i) mod 1000, one a step; `own_end` ends every request after its next token."""

    requests: dict[str, Any] = field(default_factory=dict)
    added: list[tuple[str, list[int], dict[str, Any]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    most: int = 0
    own_end: str | None = None
    error: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)  # steps wait for it
    gated: bool = False
    cached: int | None = None  # prompt tokens that it says it did not compute

    def add_request(self, request_id: str, prompt: Any, params: dict[str, Any]) -> str:
        self.added.append((request_id, prompt["prompt_token_ids"], params))
        self.requests[request_id] = [list(prompt["prompt_token_ids"]), params["max_tokens"], params["logprobs"]]
        self.most = max(self.most, len(self.requests))
        return request_id

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for each in request_ids:
            self.requests.pop(each)

    def step(self) -> list[Any]:
        assert not self.gated or self.gate.wait(BUDGET_S)
        if self.error is not None:
            raise self.error
        outputs = []
        for name, state in list(self.requests.items()):
            token = (state[0][-1] + 1) % 1000
            state[0].append(token)
            state[1] -= 1
            reason = self.own_end or ("length" if state[1] == 0 else None)
            if reason is not None:
                del self.requests[name]
            known = {token: SimpleNamespace(logprob=-0.5, rank=2), 7: SimpleNamespace(logprob=-math.inf, rank=1)}
            completion = SimpleNamespace(
                token_ids=[token], finish_reason=reason, logprobs=None if state[2] is None else [known]
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], num_cached_tokens=self.cached))
        outputs.append(SimpleNamespace(request_id="ended long ago", outputs=[]))
        return outputs


def engine_over(llm: StandIn, slots: int = 8, blocks: int = 64) -> VllmEngine:
    info = EngineInfo(
        max_model_len=min(256, blocks * 16), slots=slots, blocks_total=blocks, device="none", dtype="none"
    )
    return VllmEngine(llm, dict, SimulatedText(), info)


def run(llm: StandIn, *requests: Any, **sizes: int) -> list[Any]:
    async def main() -> list[Any]:
        driver = Driver(engine_over(llm, **sizes))
        driver.submit(*requests)
        await driver.ended()
        await driver.until(lambda: driver.engine.stats().running == driver.engine.stats().blocks_used == 0)
        driver.engine.stop()
        assert driver.engine._runs == {}
        return list(driver.outcomes.values())

    return asyncio.run(main())


def test_streams_run_to_their_length_with_text_and_usage() -> None:
    first, second = run(StandIn(), request("a", [5], max_tokens=4), request("b", [100, 200], max_tokens=2))
    assert first.ids == {0: [6, 7, 8, 9]}
    assert first.text[0] == [WORDS[token] for token in (6, 7, 8, 9)]
    assert first.finish == second.finish == {0: "length"}
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (2, 2)


def test_choices_are_requests_of_their_own_with_seeds_of_their_own() -> None:
    llm = StandIn()
    (outcome,) = run(llm, request("a", [5], max_tokens=2, n=3, seed=9))
    assert outcome.ids == {0: [6, 7], 1: [6, 7], 2: [6, 7]}
    assert outcome.usage.completion_tokens == 6
    assert len({params["seed"] for _, _, params in llm.added}) == 3


def test_a_stop_string_ends_the_request_in_vllm_too() -> None:
    llm = StandIn()
    (outcome,) = run(llm, request("a", [5], max_tokens=50, stop=[WORDS[8]]))
    assert outcome.ids == {0: [6, 7, 8]}
    assert outcome.whole_text == WORDS[6] + WORDS[7]
    assert outcome.finish == {0: "stop"}
    assert llm.aborted == ["a/0"]


def test_a_stop_id_ends_it() -> None:
    (outcome,) = run(StandIn(), request("a", [5], max_tokens=50, stop_token_ids=[8]))
    assert (outcome.ids, outcome.finish) == ({0: [6, 7, 8]}, {0: "stop"})


def test_a_resume_goes_on_behind_its_prefix() -> None:
    llm = StandIn()
    (outcome,) = run(llm, request("a", [5], max_tokens=6, min_tokens=4, prefix=[[50, 60]]))
    assert outcome.ids == {0: [61, 62, 63, 64]}
    assert outcome.usage.completion_tokens == 6
    ((_, prompt, params),) = llm.added
    assert prompt == [5, 50, 60]
    assert (params["max_tokens"], params["min_tokens"]) == (4, 2)


def test_a_resume_that_is_complete_never_reaches_vllm() -> None:
    llm = StandIn()
    (outcome,) = run(llm, request("a", [5], max_tokens=2, prefix=[[50, 60]]))
    assert (outcome.ids, outcome.finish, llm.added) == ({0: []}, {0: "length"}, [])


def test_log_probabilities_are_ranked_and_finite() -> None:
    (outcome,) = run(StandIn(), request("a", [5], max_tokens=1, logprobs=1))
    (score,) = outcome.logprobs[0]
    assert (score.id, score.logprob, score.bytes) == (6, -0.5, WORDS[6].encode())
    assert [(each.id, each.logprob) for each in score.top] == [(7, -9999.0)]


def test_cached_tokens_are_told_but_never_more_than_the_prompt() -> None:
    (outcome,) = run(StandIn(cached=2), request("a", [5, 6, 7], max_tokens=2))
    assert outcome.usage.cached_tokens == 2
    (outcome,) = run(StandIn(cached=9), request("a", [5, 6, 7], max_tokens=9, prefix=[[8] * 6]))
    assert outcome.usage.cached_tokens == 3


def test_vllm_never_holds_more_than_the_slots_and_the_order_is_ours() -> None:
    llm = StandIn()
    run(llm, *(request(str(index), [index], max_tokens=3) for index in range(7)), slots=2)
    assert llm.most == 2
    assert [name for name, _, _ in llm.added] == [f"{index}/0" for index in range(7)]


def test_vllm_never_holds_more_than_the_memory() -> None:
    llm = StandIn()
    run(llm, *(request(str(index), [index] * 40, max_tokens=3) for index in range(4)), blocks=8)
    assert llm.most == 2


def test_a_cancel_frees_its_place_and_ends_its_events() -> None:
    async def main() -> None:
        llm = StandIn(gated=True)
        driver = Driver(engine_over(llm, slots=1))
        driver.submit(request("a", [5], max_tokens=200), request("b", [9], max_tokens=200), request("c", [1]))
        await driver.until(lambda: driver.engine.stats().running == 1)
        driver.engine.cancel("b")
        driver.engine.cancel("a")
        driver.engine.cancel("a")
        llm.gate.set()
        await driver.ended("c")
        driver.engine.stop()
        assert llm.aborted == ["a/0"]
        assert [name for name, _, _ in llm.added] == ["a/0", "c/0"]
        assert not driver.outcomes["a"].ended
        assert not driver.outcomes["b"].ended

    asyncio.run(main())


def test_an_end_of_vllms_own_is_a_finish_and_an_unknown_one_an_error() -> None:
    (outcome,) = run(StandIn(own_end="stop"), request("a", [5], max_tokens=9, stop=[WORDS[6] + WORDS[7]]))
    assert outcome.finish == {0: "stop"}
    assert outcome.whole_text == WORDS[6]  # what a stop string held back
    (outcome,) = run(StandIn(own_end="abort"), request("a", [5], max_tokens=9))
    assert outcome.error is not None
    assert "vLLM ended this request: abort" in outcome.error[1]


def test_a_step_that_raises_looks_like_one_that_never_ends() -> None:
    async def main() -> None:
        driver = Driver(engine_over(StandIn(error=RuntimeError("the device is gone"))))
        driver.submit(request("a", [5]))
        await driver.until(lambda: driver.engine.stats().step_started == -math.inf)
        driver.engine.stop()
        assert driver.outcomes["a"].error is None, "another worker shall have it"

    asyncio.run(main())


def test_an_abort_that_raises_looks_like_a_step_that_never_ends() -> None:
    class Unable(StandIn):
        def abort_request(self, request_ids: list[str]) -> None:
            raise RuntimeError("the device is gone")

    async def main() -> None:
        llm = Unable(gated=True)
        driver = Driver(engine_over(llm))
        driver.submit(request("a", [5], max_tokens=200))
        await driver.until(lambda: driver.engine.stats().running == 1)
        driver.engine.cancel("a")
        llm.gate.set()
        await driver.until(lambda: driver.engine.stats().step_started == -math.inf)
        driver.engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(grammar=Grammar(kind="regex", body="a+")), "response_format"),
        (Sampling(echo=True, logprobs=1), "echo"),
    ],
)
def test_what_vllm_does_otherwise_is_refused(sampling: Sampling, param: str) -> None:
    with pytest.raises(Unsupported) as raised:
        engine_over(StandIn()).prepare(Input(prompt="one two"), sampling)
    assert raised.value.param == param


def test_the_seed_of_a_resume_is_fresh_and_fits() -> None:
    seeds = [parameters(Sampling(seed=(1 << 64) - 1), choice, done, 5)["seed"] for choice in (0, 1) for done in (0, 3)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_settings_reach_vllm_in_its_words(tmp_path: Any) -> None:
    given = vllm_arguments(
        tmp_path, EngineSettings(slots=4, kv_blocks=10, max_model_len=99, tensor_parallel=2, kv_dtype="fp8")
    )
    assert given["max_num_seqs"] == 4
    assert (given["block_size"], given["num_gpu_blocks_override"]) == (16, 10)
    assert (given["max_model_len"], given["tensor_parallel_size"], given["kv_cache_dtype"]) == (99, 2, "fp8")
    with pytest.raises(LoadRefused, match="kv_dtype is one of auto, fp8"):
        vllm_arguments(tmp_path, EngineSettings(kv_dtype="int8"))


def test_without_vllm_the_refusal_names_the_extra(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(LoadRefused, match=r"headrace\[vllm\]"):
        load_engine("s3", tmp_path, EngineSettings(engine="vllm"), 1)


def test_several_devices_are_vllms_affair(tmp_path: Any) -> None:
    with pytest.raises(LoadRefused, match="tensor_parallel needs engine=vllm"):
        load_engine("s3", tmp_path, EngineSettings(tensor_parallel=2), 1)
    with pytest.raises(LoadRefused, match="engine is one of headrace, vllm; not 'sglang'"):
        load_engine("s3", tmp_path, EngineSettings(engine="sglang"), 1)
