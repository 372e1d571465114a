"""Errors come over the wire by their codes."""

import pytest

from shared import streams
from shared.errors import HeadraceError, Internal, Unavailable, by_code


@pytest.mark.parametrize(
    ("code", "kind"), [("bus_unavailable", Unavailable), ("internal_error", Internal), ("?", Internal)]
)
def test_a_code_is_of_one_kind_whatever_else_the_process_knows(code: str, kind: type[HeadraceError]) -> None:
    assert issubclass(streams.ApiError, Unavailable), "it has the code of what it is a kind of, and other arguments"
    error = by_code(code, "it is away", "model")
    assert type(error) is kind
    assert (error.message, error.param) == ("it is away", "model")
