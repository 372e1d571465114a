"""The official `openai` package for Node.js drives the demo model: the tests are those of node/."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .node.install import HERE, install

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NODE_MAJOR_MIN = 20
BUDGET_S = 300
TESTS = sorted(path.name for path in HERE.glob("*.test.mjs"))


@pytest.fixture(scope="module")
def node() -> str:
    """The Node.js of the machine."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("Node.js with npm is not installed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.strip().lstrip("v").partition(".")[0]) < NODE_MAJOR_MIN:
        pytest.skip(f"Node.js {version.strip()} is older than {NODE_MAJOR_MIN}, which the packages need")
    return found


@pytest.mark.parametrize("name", TESTS)
def test_the_package_for_node(demo_stack: Any, embedder: str, node: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "node_modules").symlink_to(install() / "node_modules")
    shutil.copy(HERE / name, tmp_path)
    ran = subprocess.run(
        [node, "--test", name],
        cwd=tmp_path,
        env=os.environ | {"HEADRACE_URL": demo_stack.url + "/v1", "HEADRACE_EMBEDDER": embedder},
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "# fail 0" in ran.stdout
    demo_stack.idle()  # what was aborted is cancelled


def test_the_lockfile_names_no_host() -> None:
    assert '"resolved"' not in (HERE / "package-lock.json").read_text()
