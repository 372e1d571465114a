"""Tool calls in the text of a model: a parser for each dialect of `shared.tools`, fed as the text comes.

What a parser makes of a text does not depend on how the text was cut; what turns out to be no call is content, all of it.
"""

from ingress.tool_calls.hermes import HermesParser
from ingress.tool_calls.llama3 import Llama3Parser
from ingress.tool_calls.mistral import MistralParser
from ingress.tool_calls.parser import Arguments, Begin, Content, Parser, Piece
from ingress.tool_calls.whole import Call, parse_whole

__all__ = ["Arguments", "Begin", "Call", "Content", "Parser", "Piece", "new_parser", "parse_whole"]

PARSERS: dict[str, type[Parser]] = {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}


def new_parser(dialect: str, one_call: bool) -> Parser:
    """A parser at the beginning of an output. `one_call`: what it calls after its first call is left out."""
    return PARSERS[dialect](one_call)
