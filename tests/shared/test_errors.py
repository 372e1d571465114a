"""Errors come over the wire by their codes."""

import pytest

from shared import streams
from shared.errors import MESSAGE_CHARACTERS_MAX, HeadraceError, Internal, ModelNotFound, Unavailable, by_code


@pytest.mark.parametrize(
    ("code", "kind"), [("bus_unavailable", Unavailable), ("internal_error", Internal), ("?", Internal)]
)
def test_a_code_is_of_one_kind_whatever_else_the_process_knows(code: str, kind: type[HeadraceError]) -> None:
    assert issubclass(streams.ApiError, Unavailable), "it has the code of what it is a kind of, and other arguments"
    error = by_code(code, "it is away", "model")
    assert type(error) is kind
    assert (error.message, error.param) == ("it is away", "model")


def test_what_a_caller_sent_makes_no_message_long() -> None:
    error = ModelNotFound(f"the model `{'x' * 5_000_000}` does not exist", param="y" * 5_000_000)
    assert error.param is not None
    assert len(error.message) == len(error.param) == MESSAGE_CHARACTERS_MAX
    assert error.message.startswith("the model `xxx")
    assert HeadraceError("z" * MESSAGE_CHARACTERS_MAX).message == "z" * MESSAGE_CHARACTERS_MAX
