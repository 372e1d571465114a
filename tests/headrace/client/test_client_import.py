"""`from headrace import Client` is for scripts: it takes no time, and nothing that they do not need."""

import subprocess
import sys

import pytest

import headrace

SHOW = "import sys; print([name for name in ('torch', 'transformers', 'fastapi', 'nats') if name in sys.modules])"


def test_the_client_comes_without_what_it_does_not_use() -> None:
    for lines in ("import headrace", "from headrace import Client, SyncClient; Client('http://x')"):
        ran = subprocess.run([sys.executable, "-c", f"{lines}; {SHOW}"], capture_output=True, text=True, check=True)
        assert ran.stdout == "[]\n"
    over_nats = "from headrace import Client; Client('nats://x')"
    ran = subprocess.run([sys.executable, "-c", f"{over_nats}; {SHOW}"], capture_output=True, text=True, check=True)
    assert ran.stdout == "['nats']\n"


def test_what_the_package_offers_is_there_and_nothing_else() -> None:
    assert {getattr(headrace, name).__name__ for name in headrace.__all__} == set(headrace.__all__)
    with pytest.raises(AttributeError):
        _ = headrace.nothing
