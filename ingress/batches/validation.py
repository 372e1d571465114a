"""Whether a file is a batch: every line is looked at before anything of it runs."""

import hashlib
from collections.abc import AsyncIterator, Callable

import msgspec

from ingress.batches.lines import METHOD, LineError, RawLine, decode_line
from ingress.batches.pace import Pace
from ingress.batches.record import Problem
from shared.errors import HeadraceError

PROBLEMS_MAX = 100  # that are told
DIGEST_BYTES = 12


class _Model(msgspec.Struct):
    model: str


_decode_model = msgspec.json.Decoder(_Model).decode


class Validator:
    """Takes the lines one after the other. Of a custom id it keeps a digest only."""

    def __init__(
        self, endpoint: str, lines_max: int, line_bytes_max: int, check_model: Callable[[str], HeadraceError | None]
    ) -> None:
        """`check_model`: why a model, as a line names it, will never do."""
        self.lines = 0
        self.problems: list[Problem] = []
        self._endpoint, self._lines_max, self._line_bytes_max = endpoint, lines_max, line_bytes_max
        self._check_model = check_model
        self._first: dict[bytes, int] = {}  # by custom id: its line
        self._models: dict[str, HeadraceError | None] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Those that lines name, whatever version or alias of them."""
        return tuple(sorted({reference.partition("@")[0] for reference in self._models}))

    @property
    def over(self) -> bool:
        """Nothing more need be looked at."""
        return len(self.problems) >= PROBLEMS_MAX or self.lines > self._lines_max

    def take(self, line: RawLine) -> None:
        self.lines += 1
        if self.lines > self._lines_max:
            self._note("too_many_lines", f"a batch has at most {self._lines_max} lines", None, line.number)
        elif len(line.data) > self._line_bytes_max:
            self._note("line_too_long", f"a line has at most {self._line_bytes_max} bytes", None, line.number)
        else:
            try:
                self._look(line)
            except LineError as error:
                self._note(error.code, error.message, error.param, line.number)

    def close(self) -> None:
        """There are no more lines."""
        if not self.lines:
            self.problems.append(Problem("empty_file", "the file has no line"))

    def _look(self, line: RawLine) -> None:
        asked = decode_line(line.data)
        digest = hashlib.blake2b(asked.custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        before = self._first.setdefault(digest, line.number)
        if before != line.number:
            raise LineError("duplicate_custom_id", f"the custom_id is that of line {before}", "custom_id")
        if asked.method != METHOD:
            raise LineError("invalid_method", f"method: {METHOD} is expected, got {asked.method!r:.80}", "method")
        if asked.url != self._endpoint:
            raise LineError(
                "mismatched_url", f"url: {self._endpoint} is the batch's endpoint, got {asked.url!r:.80}", "url"
            )
        try:
            model = _decode_model(asked.body).model
        except msgspec.DecodeError:
            return  # the line runs, and its answer says what is wrong
        if model not in self._models:
            self._models[model] = self._check_model(model)
        if (refusal := self._models[model]) is not None:
            raise LineError(refusal.code, refusal.message, "body.model")

    def _note(self, code: str, message: str, param: str | None, line: int) -> None:
        self.problems.append(Problem(code, message, param, line))


async def validate(validator: Validator, lines: AsyncIterator[RawLine]) -> None:
    """Show the validator every line, in slices."""
    pace = Pace()
    async for line in lines:
        validator.take(line)
        if validator.over:
            break
        await pace.breathe()
    validator.close()
