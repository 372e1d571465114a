"""The text side of a real model: chat template, tokeniser, token bytes. Only fast (Rust) tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shared.errors import BadRequest
from shared.wire import Grammar, Input
from workers.engine.chat import ChatTemplate
from workers.engine.grammar import Grammars, Matcher
from workers.engine.load import LoadRefused
from workers.engine.text import CONTEXT_IDS, Detokenizer, ShownTokens, TextStream


class HuggingFaceText:
    """The `TextSide` of the tokenizer in a model's directory."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, end_ids: frozenset[int]) -> None:
        self.vocabulary_size = vocabulary_size
        self.end_ids = end_ids
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_bytes: dict[int, bytes] = {}
        self._pieces = _byte_level_pieces() if "ByteLevel" in repr(self._backend.decoder) else {}
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, how in added.items() if how.special)
        self._template = ChatTemplate(tokenizer)
        self._grammars = Grammars(vocabulary_size, self._bytes, sorted(self.special_ids), end_ids, self._plain_ids)

    def encode(self, prompt: Input) -> list[int]:
        param = "prompt"
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif prompt.prompt is not None:
            ids = self._ids(prompt.prompt, special=True, param=param)
        else:
            param = "messages"
            # The template has put the special tokens where they belong.
            ids = self._ids(self._template.render(prompt.messages or [], prompt.tools), special=False, param=param)
        if not ids:
            raise BadRequest("the prompt is empty", param=param)
        return ids

    def stream(self, prompt_ids: Sequence[int], shown: Sequence[str] = ()) -> TextStream:
        plain = Detokenizer(self._decode, prompt_ids[-CONTEXT_IDS:])
        found = {token: text for text in shown if (token := self._backend.token_to_id(text)) in self.special_ids}
        return ShownTokens(plain, found, lambda: Detokenizer(self._decode, ())) if found else plain

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(list(ids))

    def matcher(self, grammar: Grammar) -> Matcher:
        return self._grammars.matcher(grammar)

    def token_bytes(self, token: int) -> bytes:
        known = self._token_bytes.get(token)
        if known is None:
            known = self._token_bytes[token] = self._bytes(token)
        return known

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=True)

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _ids(self, text: str, special: bool, param: str) -> list[int]:
        try:
            # encode_batch lets other threads run meanwhile, encode does not
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (UnicodeError, TypeError) as error:
            raise BadRequest(f"the text cannot be tokenised: {error}", param=param) from error

    def _bytes(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._pieces and all(letter in self._pieces for letter in piece):
            return bytes(self._pieces[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model's directory. Raises LoadRefused."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise LoadRefused(f"the tokenizer cannot be loaded: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise LoadRefused(f"{type(tokenizer).__name__} is not a fast tokenizer, and only those are supported")
    return tokenizer


def end_ids(*named: Any) -> frozenset[int]:
    """The ids that end an output, wherever a model's files name them: generation config, config, tokenizer."""
    found: set[int] = set()
    for each in named:
        ids = getattr(each, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _byte_level_pieces() -> dict[str, int]:
    """The letters by which byte-level tokenizers write the 256 bytes (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
