"""The simulated engine."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_driver import Driver, request, run_all

from shared.records import EngineSettings
from shared.wire import ChatMessage, Input, Sampling
from workers.engine import sim
from workers.engine.load import LoadRefused, load_engine
from workers.engine.sequence import Load
from workers.engine.sim import VOCABULARY_SIZE, WORDS, load_simulated, profile_named, simulated_info


def outputs(profile: str = "zero", prompt: str = "the same prompt", **sampling: object) -> list[list[int]]:
    engine = load_simulated(profile, EngineSettings())
    ids = engine.prepare(Input(prompt=prompt), Sampling())
    (outcome,) = run_all(engine, request("a", ids, **sampling))
    return [outcome.ids[choice] for choice in sorted(outcome.ids)]


def test_words_are_readable_and_all_different() -> None:
    assert len(set(WORDS)) == VOCABULARY_SIZE
    assert all(word[0] == " " and word[1:].isalpha() and word.islower() for word in WORDS)


def test_output_depends_on_prompt_seed_choice_and_index() -> None:
    base = outputs(temperature=1.0, seed=1, n=2)
    assert outputs(temperature=1.0, seed=1, n=2) == base
    assert base[0] != base[1]
    assert outputs(temperature=1.0, seed=2, n=2)[0] != base[0]
    assert outputs(temperature=1.0, seed=1, n=2, prompt="another prompt")[0] != base[0]
    assert len(set(base[0])) > 8
    assert all(0 <= token < VOCABULARY_SIZE for token in base[0])


def test_output_is_the_same_in_every_release() -> None:
    assert outputs(max_tokens=4, temperature=1.0, seed=7) == [EXPECTED]


EXPECTED = [1477, 2452, 2194, 2139]


def test_greedy_output_ignores_seed_and_choice() -> None:
    first, second = outputs(seed=1, n=2)
    assert first == second == outputs(seed=2)[0]


def test_without_max_tokens_there_are_64() -> None:
    assert len(outputs(max_tokens=None)[0]) == 64


def test_a_resumed_run_gives_the_same_rest() -> None:
    (whole,) = outputs(seed=3, temperature=1.0)
    assert outputs(seed=3, temperature=1.0, prefix=[whole[:5]]) == [whole[5:]]


def test_logprobs_are_given_where_asked_for() -> None:
    engine = load_simulated("zero", EngineSettings())
    with_top, without = run_all(engine, request("a", [1], logprobs=3, max_tokens=4), request("b", [1], max_tokens=4))
    assert without.logprobs == {0: []}
    assert [logprob.id for logprob in with_top.logprobs[0]] == with_top.ids[0]
    for logprob, text in zip(with_top.logprobs[0], with_top.text[0], strict=True):
        assert logprob.bytes.decode() == text
        assert len({top.id for top in logprob.top}) == 3
        assert logprob.top[0].id == logprob.id
        assert logprob.top[0].logprob == logprob.logprob


def test_a_prompt_has_about_one_token_a_word() -> None:
    engine = load_simulated("zero", EngineSettings())
    assert len(engine.prepare(Input(prompt="one two  three\nfour"), Sampling())) == 4
    messages = [
        ChatMessage(role="user", content="one two"),
        ChatMessage(role="assistant"),
        ChatMessage(role="user", content="x"),
    ]
    assert len(engine.prepare(Input(messages=messages), Sampling())) == 6
    same = [engine.prepare(Input(prompt=each), Sampling()) for each in ("one two", "two one")]
    assert same[0] == same[1][::-1]


def test_the_cost_model_goes_through_its_points() -> None:
    profile = profile_named("a100-13b")
    step_ms = profile.step_ms
    assert step_ms is not None
    assert [step_ms(Load(sequences)) for sequences in (20, 45, 80)] == [20.0, 22.0, 45.0]
    assert 18 < step_ms(Load(1)) < 20
    assert step_ms(Load(32)) == pytest.approx(20.96)
    assert step_ms(Load(150)) > 80
    for sequences in (20, 30, 45):  # the pacer knows it as far as the slots go
        assert profile.cost.ms(Load(sequences, sequences)) == pytest.approx(step_ms(Load(sequences)))


def test_the_a100_profile_holds_what_13_gb_hold() -> None:
    info = load_simulated("a100-13b", EngineSettings()).info
    assert info.slots == 45
    assert info.blocks_total * 16 * 0.8 == pytest.approx(13_000, rel=0.01)


def test_steps_of_a_fixed_time_take_that_time() -> None:
    async def main() -> None:
        driver = Driver(load_simulated("fixed-20ms", EngineSettings()))
        began = time.monotonic()
        driver.submit(*(request(str(index), [index], max_tokens=10) for index in range(50)))
        await driver.ended()
        driver.engine.stop()
        assert time.monotonic() - began >= 10 * 0.020

    asyncio.run(main())


def test_an_unloadable_model_ends_what_loads_it() -> None:
    code = (
        "from shared.records import EngineSettings; from workers.engine.load import LoadRefused, load_engine\n"
        "try: load_engine('sim:unloadable-1ms', None, EngineSettings(), 0)\n"
        "except LoadRefused: pass"
    )
    assert simulated_info("unloadable-1ms", EngineSettings()).slots == 256  # it can be registered
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr.splitlines()[-1].endswith("sim:unloadable-1ms cannot be loaded")) == (1, True)


def test_a_fatal_model_ends_the_process_with_its_first_request() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from engine_driver import request, run_all\n"
        "from shared.records import EngineSettings; from workers.engine.sim import load_simulated\n"
        "engine = load_simulated('fatal-1ms', EngineSettings()); print('loaded', flush=True)\n"
        "run_all(engine, request('a', [1])); print('answered')"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, "loaded\n"), ran.stderr


def test_one_in_twenty_requests_of_a_faulty_model_fails_and_it_is_the_same_one() -> None:
    def failed() -> list[str | None]:
        engine = load_simulated("faulty-0ms", EngineSettings())
        asked = [request(str(each), [each % 100], seed=each // 100, max_tokens=4) for each in range(1000)]
        outcomes = run_all(engine, *asked)
        assert all(outcome.error or len(outcome.ids[0]) == 4 for outcome in outcomes)
        assert not any(outcome.error and outcome.ids.get(0) for outcome in outcomes)  # not in the middle of an answer
        return [outcome.error[0] if outcome.error else None for outcome in outcomes]

    first = failed()
    assert set(first) == {None, "engine_failed"}
    assert 30 < first.count("engine_failed") < 70
    assert failed() == first


def test_a_lagging_model_is_three_times_as_slow_to_its_first_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(sim, "time", SimpleNamespace(sleep=slept.append))
    run_all(load_simulated("lagging-20ms", EngineSettings(prefill_chunk=512)), request("a", [1] * 600, max_tokens=5))
    assert slept == pytest.approx([0.06, 0.06, 0.02, 0.02, 0.02, 0.02])  # two chunks of the prompt, then a token each


def test_settings_change_the_sizes() -> None:
    info = load_simulated("zero", EngineSettings(slots=3, kv_blocks=10, max_model_len=200)).info
    assert (info.slots, info.blocks_total, info.max_model_len) == (3, 10, 160)


@pytest.mark.parametrize("profile", ["", "one", "fixed-ms", "fixed-20", "zero ", "none-20ms"])
def test_an_unknown_profile_is_refused_with_the_known_ones(profile: str) -> None:
    with pytest.raises(LoadRefused, match=r"zero, a100-13b, smollm2-cpu, fixed-<n>ms, mortal-<n>ms, .* and lag"):
        load_engine(f"sim:{profile}", None, EngineSettings(), 0)


def test_the_simulated_engine_needs_no_torch() -> None:
    code = (
        "import sys; from shared.records import EngineSettings; from workers.engine.load import load_engine;"
        "load_engine('sim:zero', None, EngineSettings(), 0); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_without_a_directory_is_refused() -> None:
    with pytest.raises(LoadRefused, match="directory"):
        load_engine("s3", None, EngineSettings(), 0)
