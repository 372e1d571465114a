from pathlib import Path

import pytest

from shared.settings import Settings, SettingsError, load, to_environment


def test_the_environment_goes_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('http_port = 1111\nidle_seconds = 5\nlog_level = "debug"\n')
    settings = load(
        {"HEADRACE_DATA_DIR": str(tmp_path), "HEADRACE_HTTP_PORT": "2222"}, idle_seconds=7.5, http_host=None
    )
    assert (settings.http_port, settings.idle_seconds, settings.log_level) == (2222, 7.5, "debug")
    assert settings.http_host == "127.0.0.1"


def test_settings_travel_to_a_child_by_its_environment() -> None:
    settings = Settings(nats_url="nats://127.0.0.1:1", insecure=True, lifeline_fd=5)
    assert load(to_environment(settings)) == settings


@pytest.mark.parametrize(
    ("environ", "toml", "named"),
    [
        ({"HEADRACE_HTTP_PORT": "eighty"}, "", r"^http_port \(the variable HEADRACE_HTTP_PORT\): expected `int`"),
        ({}, "no_such_setting = 1\n", "^in headrace.toml: object contains unknown field `no_such_setting`"),
        ({}, "idle_seconds = 'long'\n", "^idle_seconds in headrace.toml: expected `float`"),
        ({"HEADRACE_IDLE_SECONDS": "-5"}, "", r"^idle_seconds \(the variable HEADRACE_IDLE_SECONDS\): .* below 0"),
        ({"HEADRACE_TARGET_UTILISATION": "0"}, "", "target_utilisation"),
        ({}, "http_port = [\n", "headrace.toml"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(environ: dict[str, str], toml: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(toml)
    with pytest.raises(SettingsError, match=named):
        load({"HEADRACE_DATA_DIR": str(tmp_path)} | environ)
