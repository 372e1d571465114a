import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects


def test_the_names_of_the_protocol() -> None:
    assert subjects.encode_token("Qwen/Qwen3-0.6B") == "Qwen=2FQwen3-0=2E6B"
    assert subjects.request("chat", "v1.0", "fast", "acme") == "q.chat.v1=2E0.fast.acme"
    assert subjects.requests_of_lane("chat", "v1", "fast") == "q.chat.v1.fast.*"
    assert len(subjects.consumer("fast", "q.chat.v1.fast.*")) == len("fast-") + 32
    assert subjects.tenant_of_request("q.chat.v1.fast.a=2Eb") == "a.b"
    assert subjects.version_of_wake(subjects.wake("a.b", "v>1")) == ("a.b", "v>1")


@given(st.text(min_size=1, max_size=32))
def test_a_token_has_one_name_and_is_valid_in_subjects_and_keys(name: str) -> None:
    token = subjects.encode_token(name)
    assert subjects.decode_token(token) == name
    assert not set(token) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=")
    assert subjects.names_of(subjects.key(name, "x")) == [name, "x"]


@pytest.mark.parametrize("name", ["", "x" * 129, "é" * 65])
def test_empty_and_overlong_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 128 bytes"):
        subjects.encode_token(name)
