"""The examples of README.md are run as they are written; those of all pages name commands, options and files that there are.

What README.md shows is run in its order, on one stack. Words that stand for something (`path/to/model`, a port) get what they
stand for. A command that cannot be run in the middle of a test has its treatment in TREATED, with the reason.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import typer.main

from headrace.cli import app

from .conftest import Stack
from .examples import Block, Command, blocks_of, commands_of, words_of

ROOT = Path(__file__).parents[2]
RUN = ["README.md"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BUDGET_S = 120.0  # of one command; on an idle machine the slowest takes ten seconds


class Treatment(NamedTuple):
    """What is otherwise with a command, and why."""

    reason: str
    runs: bool = True
    after: str = ""  # run after it
    beside: str = ""  # run once it has said something


TREATED = {
    "scripts/headrace down": Treatment("what follows needs the stack", after="scripts/up --detach"),
    "scripts/headrace deploy chat@v2 --watch": Treatment(
        "it takes ten minutes, and a hundred requests at each step", beside="scripts/headrace deployments promote chat"
    ),
    "scripts/check": Treatment("it runs beside these tests in .ci/run", runs=False),
    "scripts/test": Treatment("this is a part of it", runs=False),
    'scripts/test -m "not e2e"': Treatment("a part of it runs these tests", runs=False),
    ".ci/run": Treatment("this is a part of it", runs=False),
}
SAYS = {"curl -N http://127.0.0.1:8000/v1/chat/completions": "Paris", "from openai import OpenAI": "Paris"}


TYPED = "What is the capital of France?\n"


def is_conversation(command: str) -> bool:
    """Whether it waits for what people type."""
    return re.search(r" chat [\w@-]+$", command) is not None


class Reader:
    """Somebody who types what a page says."""

    def __init__(self, stack: Stack, directory: Path, model: Path) -> None:
        self._stack, self._directory, self._model = stack, directory, model
        self.printed = ""  # so far
        (directory / ".curlrc").write_text("fail-with-body\nshow-error\n")  # else a refusal is a success to it
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = str(bound.getsockname()[1])
        here = {"HEADRACE_DATA": str(stack.data), "HEADRACE_HTTP_PORT": port, "CURL_HOME": str(directory)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = stack.env | here | {"PATH": path, "OPENAI_API_KEY": "none", "COLUMNS": "200"}

    def _stands_for(self) -> dict[str, Callable[[], str]]:
        """Words of the pages, and what to read in their place."""
        return {
            r"http://(127\.0\.0\.1|localhost):8000": lambda: self._stack.url,
            r"\b(127\.0\.0\.1|localhost):8000": lambda: self._stack.url.removeprefix("http://"),
            r"nats://(127\.0\.0\.1|localhost):4222": lambda: str(self._stack.state["nats"]),
            r"https://gateway\.example": lambda: self._stack.url,
            r"path/to/model\b": lambda: str(self._model),
            r"\bDIR\b": lambda: str(self._directory / "made"),
            r"\bhr_\.\.\.": lambda: re.findall(r"\bhr_[A-Za-z0-9_-]{20,}", self.printed)[0],
            r"\bKEY-ID\b": lambda: self._first_key(),
        }

    def _first_key(self) -> str:
        listed = json.loads(self._stack.headrace("tenants", "list", "--json").stdout)
        return next(key["id"] for tenant in listed if tenant["name"] == "acme" for key in tenant["keys"])

    def read(self, text: str) -> str:
        """What a page says, with the words that stand for something replaced."""
        for word, meaning in self._stands_for().items():
            if re.search(word, text):
                text = re.sub(word, meaning().replace("\\", r"\\"), text)
        return text

    def do(self, block: Block) -> None:
        """Run a block of Python, or the commands of one for a shell."""
        if block.language == "python":
            self._end(self._start([sys.executable, "-c", self.read(block.text)]), Command(block.where, block.text))
            return
        for command in commands_of(block):
            self._command(command)

    def _command(self, command: Command) -> None:
        treatment = TREATED.get(command.bare, Treatment("as it is"))
        if not treatment.runs:
            assert os.access(ROOT / command.bare.split()[0], os.X_OK), command
            return
        process = self._shell(command.text)
        if treatment.beside:
            assert process.stdout is not None
            self.printed += process.stdout.readline()
            self._end(self._shell(treatment.beside), command)
        self._end(process, command)
        if treatment.after:
            self._end(self._shell(treatment.after), command)

    def _shell(self, text: str) -> "subprocess.Popen[str]":
        return self._start(["bash", "-euo", "pipefail", "-c", self.read(text)])

    def _start(self, argv: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            argv,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _end(self, process: "subprocess.Popen[str]", command: Command) -> None:
        try:
            said, _ = process.communicate(TYPED if is_conversation(command.bare) else "", timeout=BUDGET_S)
        finally:
            process.kill()
        self.printed += said
        what = f"{command.where}: {command.text}\n{said}"
        assert process.returncode == 0, what
        assert '"error":' not in said, what  # in a stream that had begun
        for beginning, answer in SAYS.items():
            if command.text.startswith(beginning):
                assert answer in said, what


@pytest.fixture
def reader(demo_stack: Stack, tiny_model: Path, tmp_path: Path) -> Iterator[Reader]:
    """A newcomer before the first command: the stack is down, though the demo model has been unpacked there before."""
    demo_stack.down()
    yield Reader(demo_stack, tmp_path, tiny_model)
    demo_stack.headrace("up", "--detach", "--port", "0")  # for other tests, if it is not up
    for name in ("chat", "zero"):
        demo_stack.headrace("models", "rm", name)


def is_complete() -> bool:
    """Whether scripts/bootstrap has nothing to do, by its own measure: it would take minutes."""
    lines = (ROOT / "scripts" / "bootstrap").read_text().splitlines()
    said = [line for line in lines if line.startswith(("stamp=", "want="))]
    script = "\n".join([*said, '[[ "$(cat "$stamp")" == "$want" ]]'])
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.skipif(not is_complete(), reason="the installation is not complete: scripts/test makes it so")
def test_what_the_readme_shows_works_as_it_is_written(reader: Reader) -> None:
    blocks = [block for page in RUN for block in blocks_of(ROOT / page)]
    unknown = [block.where for block in blocks if block.page == "README.md" and not block.language]
    assert unknown == [], "neither Python nor commands: fence them with the name of their language"
    for block in blocks:
        if block.language in ("python", "shell"):
            reader.do(block)
    assert reader.printed.count("Paris") >= 2


def test_every_treatment_is_of_a_command_that_is_there() -> None:
    there = {
        command.bare
        for page in RUN
        for block in blocks_of(ROOT / page)
        if block.language == "shell"
        for command in commands_of(block)
    }
    assert TREATED.keys() - there <= {".ci/run"}  # which stands in a block of others
    for beginning in SAYS:
        assert any(block.text.startswith(beginning) or f"\n{beginning}" in block.text for block in blocks_of(PAGES[0]))


def commands() -> list[Command]:
    return [
        command
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "shell"
        for command in commands_of(block)
    ]


def test_every_command_of_every_page_has_the_options_that_it_names() -> None:
    checked = 0
    for command in commands():
        for words in words_of(command.text):
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if "headrace" in words[:1] or "scripts/headrace" in words[:1]:
                check_parses(words[1:], command)
            elif words[:1] == ["scripts/up"]:
                check_parses(["up", *words[1:]], command)
            elif words[:1] == ["python"] and words[1] != "-m":
                assert (ROOT / words[1]).exists(), command
            else:
                continue
            checked += 1
    assert checked > 60


def check_parses(words: list[str], command: Command) -> None:
    """Fails unless the command line takes these words; nothing is run."""
    current: click.Command = typer.main.get_command(app)
    parent: click.Context | None = None
    name: Any = "headrace"
    try:
        while True:
            context = current.make_context(name, words, parent=parent)
            if not isinstance(current, click.Group):
                return
            name, found, words = current.resolve_command(context, [*context._protected_args, *context.args])
            assert found is not None, command
            current, parent = found, context
    except click.UsageError as error:
        raise AssertionError(f"{command.where}: {command.text}: {error.format_message()}") from None


@pytest.mark.parametrize(
    ("text", "languages"),
    [
        ("    scripts/up --detach\n", ["shell"]),
        ("text\n    not a block\n", []),
        ("\n    from x import y\n\n    print(y)\n\ntext\n\n    HEADRACE_A=1 headrace up\n", ["python", "shell"]),
        ("```sh\ncurl x\n```\n```python\n1 +\n```\n```json\n{}\n```\n", ["shell", "python", "json"]),
        ("\n    import broken(\n", ["python"]),
        ('\n    {"error": {}}\n', [""]),
    ],
)
def test_blocks_are_found(text: str, languages: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [block.language for block in blocks_of(page)] == languages


def test_commands_are_taken_apart() -> None:
    block = Block(
        "p", 10, "shell", "a b   # why\n\n# only said\ncurl x -d '\n  {\"a\": 1}'\nc \\\n  --d | e && f > g\n"
    )
    found = list(commands_of(block))
    assert [(each.where, each.bare) for each in found] == [
        ("p:10", "a b"),
        ("p:13", "curl x -d '\n  {\"a\": 1}'"),
        ("p:15", "c \\\n  --d | e && f > g"),
    ]
    assert list(words_of("c --d | e && f > g # h")) == [["c", "--d"], ["e"], ["f"], ["g"]]
    assert list(words_of("u --by day|model [--tenant acme]")) == [["u", "--by", "day", "--tenant", "acme"]]
    with pytest.raises(AssertionError, match="does not end"):
        list(commands_of(Block("p", 1, "shell", "echo 'open")))
