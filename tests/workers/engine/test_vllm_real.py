"""vLLM itself behind our protocol, in an interpreter that has it: HEADRACE_TEST_VLLM_PYTHON names that.

It needs msgspec and numpy beside vLLM; the packages of this repository come from the path. A start takes a minute or two.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("HEADRACE_TEST_VLLM_PYTHON")
BUDGET_S = 500

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(PYTHON is None, reason="HEADRACE_TEST_VLLM_PYTHON names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def result(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    script = str(Path(__file__).with_name("vllm_script.py"))
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as errors:
        ran = subprocess.run(
            [str(PYTHON), script, str(demo_model)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=BUDGET_S,
            check=False,
        )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert ran.returncode == 0, log.read_text()[-4000:]
    decoded: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return decoded


def ids_of(result: dict[str, Any], key: str, choice: int = 0) -> list[int]:
    ids: list[int] = result["outcomes"][key]["ids"][str(choice)]
    return ids


def text_of(result: dict[str, Any], key: str, choice: int = 0) -> str:
    return "".join(result["outcomes"][key]["text"][str(choice)])


def test_a_greedy_stream(result: dict[str, Any]) -> None:
    assert "Paris" in text_of(result, "greedy")
    assert len(ids_of(result, "greedy")) == 24
    assert result["outcomes"]["greedy"]["finish"] == {"0": "length"}
    prompt_tokens, completion_tokens = result["outcomes"]["greedy"]["usage"][:2]
    assert (prompt_tokens, completion_tokens) == (len(result["prompt"]), 24)


def test_a_resume_keeps_its_prefix_and_is_not_emitted_again(result: dict[str, Any]) -> None:
    rest = ids_of(result, "resumed")
    assert len(rest) == 14
    assert rest[0] == ids_of(result, "greedy")[10]  # greedy: the same, but for ties in bfloat16
    assert result["outcomes"]["resumed"]["usage"][1] == 24


def test_a_stop_string_cuts_the_text(result: dict[str, Any]) -> None:
    whole = text_of(result, "greedy")
    assert text_of(result, "stopped") == whole[: whole.index(result["stop"])]
    assert result["outcomes"]["stopped"]["finish"] == {"0": "stop"}


def test_a_stop_id_ends_the_output(result: dict[str, Any]) -> None:
    first = ids_of(result, "greedy")
    assert ids_of(result, "stop id") == first[: first.index(first[3]) + 1]
    assert result["outcomes"]["stop id"]["finish"] == {"0": "stop"}


def test_choices_differ_and_a_seed_repeats_them(result: dict[str, Any]) -> None:
    choices = [ids_of(result, "several", choice) for choice in range(3)]
    assert len({tuple(each) for each in choices}) == 3
    assert [ids_of(result, "again", choice) for choice in range(3)] == choices
    assert result["outcomes"]["several"]["usage"][1] == 24


def test_log_probabilities_come_with_their_ranks(result: dict[str, Any]) -> None:
    for token, score in zip(ids_of(result, "scored"), result["outcomes"]["scored"]["logprobs"]["0"], strict=True):
        assert score[0] == token
        assert len(score[3]) == 3
        assert score[3][0][0] == token, "greedy: the most likely is the one that was taken"
        assert score[1] == pytest.approx(score[3][0][1])


def test_more_requests_than_slots_all_end(result: dict[str, Any]) -> None:
    assert result["info"]["slots"] == 4
    assert all(len(ids_of(result, f"many {index}")) == 6 for index in range(9))


def test_a_cancelled_run_says_nothing_more(result: dict[str, Any]) -> None:
    before, after = result["cancelled_at"]
    assert before == after < 400
    assert result["outcomes"]["long"]["finish"] == {}
    assert len(ids_of(result, "after")) == 3
    assert (result["stats"]["running"], result["stats"]["waiting"], result["stats"]["blocks_used"]) == (0, 0, 0)
