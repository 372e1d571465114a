"""Structured output: which tokens may come next, by llguidance.

A grammar is compiled once and kept; each output gets a matcher of its own, a copy that shares the compiled lexer. A mask
takes some 10 us for a vocabulary of 50,000, the first of a schema up to a few ms.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from shared.errors import BadRequest
from shared.tools import decode_grammar
from shared.wire import Grammar
from workers.engine.tool_grammar import lark

COMPILED_MAX = 16  # grammars that are kept
LEXER_STATES_MAX = 50_000  # of one grammar, 1 to 2 kB each
# Unbounded space between the parts of a JSON text is a hole that a weak model never leaves.
JSON_WHITESPACE = r"[ \t\r\n]{1,24}"
PARAM = "response_format"
PARAMS = {"tools": "tools"}  # by the kind of grammar


class GrammarFailed(Exception):
    """No token may follow, or the matcher gave up: it ran into a limit."""


class Matcher:
    """Where one output stands in its grammar."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def advance(self, token: int) -> bool:
        """Take in the next token; whether the output is complete with it. Raises GrammarFailed if it may not come."""
        if not self._matcher.consume_token(token):
            raise GrammarFailed(f"token {token} does not fit the grammar: {_error(self._matcher)}")
        return bool(self._matcher.is_stopped())

    def forbidden(self, width: int) -> np.ndarray:
        """[width] bool: which tokens may not come next. Raises GrammarFailed if none may."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar cannot be followed: {_error(self._matcher)}")
        return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=width) == 0


class Grammars:
    """The compiled grammars of one model. Thread-safe; the lock is never held while something is compiled."""

    def __init__(
        self,
        vocabulary_size: int,
        token_bytes: Callable[[int], bytes],
        special_ids: Sequence[int],
        end_ids: frozenset[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`token_bytes`: what a token adds to the text; `special_ids`: those that add nothing."""
        self._vocabulary_size = vocabulary_size
        self._token_bytes = token_bytes
        self._special_ids = list(special_ids)
        self._end_ids = sorted(end_ids)
        self._encode = encode
        self._compiled: OrderedDict[tuple[str, str, bool], Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning. Raises BadRequest.

        Microseconds for a grammar that is known; else milliseconds, and half a second for the first of a process.
        """
        key = (grammar.kind, grammar.body, grammar.strict)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[key] = compiled
                if len(self._compiled) > COMPILED_MAX:
                    self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy())

    def _compile(self, grammar: Grammar) -> Any:
        # Imported with the first grammar: most workers never need it, and a cold start must not pay for it.
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)
        source = self._of_tools(grammar) if grammar.kind == "tools" else _source(grammar)
        compiled = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not compiled.is_error():
            compiled.compute_bitmask()  # some grammars cannot begin; and the first mask is the slowest
        if compiled.is_error():
            raise BadRequest(
                f"the {grammar.kind} cannot be used: {_error(compiled)}", param=PARAMS.get(grammar.kind, PARAM)
            )
        return compiled

    def _of_tools(self, grammar: Grammar) -> str:
        """Calls of tools in llguidance's own form. Raises BadRequest."""
        from llguidance import LLMatcher

        special = {self._token_bytes(token).decode("utf-8", "replace"): token for token in self._special_ids}
        try:
            return LLMatcher.grammar_from_lark(lark(decode_grammar(grammar.body), special, JSON_WHITESPACE))
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadRequest(f"the tools cannot be used: {error}", param=PARAMS["tools"]) from error

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = [self._token_bytes(token) for token in range(self._vocabulary_size)]
        vocabulary = _Vocabulary(tokens, self._special_ids, self._end_ids, self._encode)
        return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocabulary_size, eos_token=self._end_ids or None)


class _Vocabulary:
    """A vocabulary as llguidance asks for it."""

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], end_ids: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_ids[0] if end_ids else None
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _error(matcher: Any) -> str:
    return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises BadRequest."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json_schema" | "json_object":
                schema = grammar.body if grammar.kind == "json_schema" else '{"type": "object"}'
                options: Any = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not grammar.strict}
                return LLMatcher.grammar_from_json_schema(schema, defaults=options)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.body)
            case "choice":
                return LLMatcher.grammar_from_lark(_alternatives(grammar.body))
            case "grammar":
                return grammar_from("grammar", grammar.body)
    except ValueError as error:
        raise BadRequest(f"the {grammar.kind} cannot be used: {error}", param=PARAM) from error
    raise BadRequest(f"there is no kind of grammar named {grammar.kind!r}", param=PARAM)


def _alternatives(body: str) -> str:
    """A JSON list of strings as a Lark rule. Raises ValueError."""
    choices = json.loads(body)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError("a list of strings is needed, none of them empty")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
