"""Examples in Markdown pages: blocks of code, what language they are in, and the commands of those for a shell."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INDENT = "    "
FENCES = {"python": "python", "py": "python", "sh": "shell", "bash": "shell", "shell": "shell", "console": "shell"}
OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<"}

_is_command = re.compile(
    r"([A-Z_]+=\S* )*((\./)?scripts/|\.ci/run|headrace\b|curl\b|python\b|pip\b|npm\b|node\b|nats\b|kubectl\b|docker\b|export\b)"
).match


class Block(NamedTuple):
    """A block of code. `language`: python, shell, or what its fence or its looks say."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """A command of a shell, all of its lines."""

    where: str
    text: str

    @property
    def bare(self) -> str:
        """Without what is said about it."""
        return re.sub(r"\s+#.*$", "", self.text, flags=re.MULTILINE).strip()


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, fenced or indented by four spaces after an empty line."""
    blocks: list[Block] = []
    lines = page.read_text().split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        start = number
        if line.startswith("```"):
            number = next((end for end in range(start + 1, len(lines)) if lines[end].startswith("```")), len(lines))
            text = "\n".join(lines[start + 1 : number])
            blocks.append(
                Block(page.name, start + 2, FENCES.get(line[3:].strip(), line[3:].strip() or _guess(text)), text)
            )
        elif line.startswith(INDENT) and (not number or not lines[number - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith(INDENT) or not lines[number + 1].strip()):
                number += 1
            text = "\n".join(each[len(INDENT) :] for each in lines[start : number + 1]).rstrip()
            blocks.append(Block(page.name, start + 1, _guess(text), text))
        number += 1
    return blocks


def _guess(text: str) -> str:
    if _is_command(text):
        return "shell"
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return "python" if re.match(r"(from \w+|import \w+)", text) else ""
    return "python" if any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) else ""


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a block: as many lines each as a shell needs."""
    pending: list[str] = []
    for number, line in enumerate(block.text.split("\n")):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending.append(line)
        text = "\n".join(pending)
        complete = subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False)
        if complete.returncode == 0 and not line.endswith("\\"):
            yield Command(f"{block.page}:{block.line + number + 1 - len(pending)}", text)
            pending = []
    assert not pending, f"{block.where}: it does not end: {pending[0]}"


def words_of(text: str) -> Iterator[list[str]]:
    """The simple commands in one, as their words; of `a|b` that stands for a choice the first, of `[--option]` the option."""
    text = re.sub(r"(?<=\w)\|[\w|]+", "", text)
    text = re.sub(r" \[(--?[^\]]*)\]", r" \1", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if word in OPERATORS:
            yield words
            words = []
        else:
            words.append(word)
    yield words
