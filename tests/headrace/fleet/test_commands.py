"""`headrace simulate`, `headrace plan` and `headrace bench profile`, and the scenarios that come with the project."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.fleet.scenario import read
from shared.errors import BadRequest

SCENARIOS = sorted((Path(__file__).parents[3] / "bench" / "fleet").glob("*.toml"))
BRIEF = """
traffic = [{ rate = 15 }]
fleet = { workers = 2, kv_dtype = "8-bit" }
engine = { tpot_ms_target = 30 }
seconds = 5
warmup_s = 3
"""


@pytest.fixture
def brief(tmp_path: Path) -> Path:
    file = tmp_path / "brief.toml"
    file.write_text(BRIEF)
    return file


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_the_scenarios_of_the_project_can_be_read(file: Path) -> None:
    scenario = read(file)
    assert scenario.name == file.stem
    assert scenario.profile().blocks > 0


def test_a_scenario_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    for text, what in (
        ("traffic = [{ rte = 20 }]", "rte"),
        ("traffic = []", "traffic"),
        ("traffic = [{ rate = -1 }]", "rate"),
        ("traffic =", "wrong.toml"),
    ):
        file.write_text(text)
        with pytest.raises(BadRequest, match=what):
            read(file)


def test_a_simulation_prints_what_came_of_it(brief: Path) -> None:
    ran = command("simulate", brief)
    assert ran.exit_code == 0, ran.output
    assert "brief: a100-40g-13b, 8-bit KV, 2 workers of 45 slots" in ran.output
    assert "the SLA holds: 100.00%" in ran.output
    ran = command("simulate", brief, "--workers", 1)
    assert ran.exit_code == 1
    assert "does not hold" in ran.output


def test_json_is_the_same_for_the_same_seed(brief: Path) -> None:
    first, second, other = (command("simulate", brief, "--json", "--seed", seed).stdout for seed in (4, 4, 5))
    assert first == second != other
    found = json.loads(first)
    assert (found["scenario"], found["seed"], found["workers"], found["holds"]) == ("brief", 4, 2, True)


def test_a_plan_prints_the_smallest_fleet_and_the_closed_form(brief: Path) -> None:
    ran = command("plan", brief)
    assert ran.exit_code == 0, ran.output
    assert "closed form: 10.23 requests/s a worker at a batch of 45 (slots): 2 workers saturated" in ran.output
    found = json.loads(command("plan", brief, "--json").stdout)
    assert found["workers"] == 2
    assert found["estimate"]["batch"] == 45


def test_a_page_of_plots_is_drawn(brief: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = command("simulate", brief, "--plot", tmp_path / "page.png")
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_is_measured_and_simulated(brief: Path, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    ran = command("bench", "profile", "sim:zero", "-o", file, "--seconds", 1, "--streams", "1,2", "--tokens", 8)
    assert ran.exit_code == 0, ran.output
    brief.write_text(BRIEF.replace('kv_dtype = "8-bit"', f'profile = "{file}"'))
    ran = command("simulate", brief)
    assert ran.exit_code == 0, ran.output
    assert "sim:zero on simulated, 2 workers of 256 slots" in ran.output


def test_the_reference_scenario_at_a_tenth_of_its_size_holds() -> None:
    """Bounds of the figures in docs/capacity.md; the whole scenario takes minutes."""
    (file,) = (each for each in SCENARIOS if each.stem == "reference")
    ran = command("simulate", file, "--times", 0.1, "--workers", 12, "--seconds", 60, "--json")
    found = json.loads(ran.stdout)
    assert found["holds"]
    assert 5700 < found["requests"] < 6300
    assert found["attainment"] > 0.999
    assert 30 < found["ttft_ms"]["p50"] < 60
    assert 50 < found["ttft_ms"]["p99"] < 150
    assert 21 < found["tpot_ms"]["p99"] < 22.1
    assert 30 < found["batch"] < 40
    small = json.loads(command("simulate", file, "--times", 0.1, "--workers", 9, "--seconds", 60, "--json").stdout)
    assert not small["holds"]
    assert small["ttft_ms"]["p99"] > 1000
