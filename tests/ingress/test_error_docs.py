"""docs/errors.md lists every error code with its status."""

import re
from pathlib import Path

from shared.errors import HeadraceError

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


def tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


def test_every_code_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", DOCUMENT.read_text(), re.MULTILINE)
    # codes that only one process uses inside, such as JetStream's own numbers, keep the code of their parent
    known = {(error.code, str(error.status), "yes" if error.retryable else "no") for error in tree(HeadraceError)}
    assert set(rows) == known
    assert len(rows) == len(set(rows))
