"""POST /v1/responses."""

import msgspec

from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice, OnePath
from ingress.responses_body import ResponsesBody
from ingress.routes.responses_events import ResponseEvents, completed
from ingress.routes.responses_shapes import Response
from ingress.sse import Events, encode
from shared.wire import Usage

PATH = "/v1/responses"


class Responses(OnePath):
    """OpenAI's newer family: items instead of messages."""

    route, summary = PATH, "Response, as OpenAI has it"
    decoder, answer_type = msgspec.json.Decoder(ResponsesBody), Response
    errors: ErrorShape = OPENAI

    def events(self, admitted: Admitted) -> Events:
        return ResponseEvents(admitted)

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        return encode(completed(admitted, choices[0], usage))
