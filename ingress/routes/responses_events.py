"""The events of a streamed response.

Their numbers and bytes are a function of its tokens: a client that has some of them goes on anywhere.
"""

import time
from typing import Any

from ingress.family import Admitted, Choice
from ingress.response_items import CallItem, MessageItem, OutputText
from ingress.routes.openai import ContentLogprob, HeadraceBody
from ingress.routes.responses_output import Output, OutputItem, whole
from ingress.routes.responses_shapes import IncompleteDetails, Response, begun, put_error, usage_of
from ingress.sse import KEEPALIVE, encode
from shared.dispatch import Delta
from shared.errors import HeadraceError
from shared.wire import Usage


class ResponseEvents:
    """`after`: the number of the last event that the client has; it is not told again what came up to there.

    A delta without anything in it opens the stream, and what has something begins the response.
    """

    keepalive = KEEPALIVE

    def __init__(self, admitted: Admitted, after: int = -1) -> None:
        self.open_choices = 1
        self._admitted, self._after = admitted, after
        self._output = Output(admitted, self)
        self._number = 0  # of the next event
        self._out: list[bytes] = []
        self._response: Response | None = None  # once it was told
        self._in_progress = False

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        self._out = out
        for delta in deltas:
            self._open()
            something = delta.ids or delta.text or delta.finish is not None
            if something and not self._in_progress:
                self._begin()
            self._output.add(delta.text, delta.logprobs)
            if delta.finish is not None:
                self._output.end(delta.finish)
                self.open_choices -= 1

    def closing(self, usage: Usage, claims: int) -> bytes:
        self._out = []
        self._open()
        response = begun(self._admitted)  # whether it was kept is known by now
        complete(response, self._output, usage, self._admitted.ended_at)
        self._tell(f"response.{response.status}", response=response, headrace=HeadraceBody(claims))
        return b"".join(self._out)

    def failure(self, error: HeadraceError) -> bytes:
        """Of one in the background that has not ended, only this telling fails: whoever has the events goes on after them."""
        self._out = []
        response = self._open()
        if response.background and self._admitted.ended_at is None:
            told = {"code": error.code, "message": error.message, "param": error.param}
            data = encode(
                {"type": "error", "sequence_number": self._number - 1, **told}
            )  # of the last one that is kept
            return b"".join(self._out) + b"event: error\ndata: %b\n\n" % data
        response.output = self._output.items()
        put_error(response, error)
        self._tell("response.failed", response=response)
        return b"".join(self._out)

    # -- the life of the response ----------------------------------------------------------------------------------------

    def _open(self) -> Response:
        if self._response is None:
            self._response = response = begun(self._admitted)
            self._tell("response.created", response=response)
            if response.background:
                self._tell("response.queued", response=response)
        return self._response

    def _begin(self) -> None:
        self._in_progress = True
        response = self._open()
        response.status = "in_progress"
        self._tell("response.in_progress", response=response)

    # -- its output --------------------------------------------------------------------------------------------------------

    def begun(self, index: int, item: OutputItem) -> None:
        self._tell("response.output_item.added", output_index=index, item=item)
        if isinstance(item, MessageItem):
            self._tell_part("response.content_part.added", index, item, part=OutputText(""))

    def text(self, index: int, item: MessageItem, text: str, logprobs: list[ContentLogprob]) -> None:
        number = self._next()
        if number > self._after:
            self._out.append(
                b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%d,'
                b'"item_id":"%b","output_index":%d,"content_index":0,"delta":%b,"logprobs":%b}\n\n'
                % (number, item.id.encode(), index, encode(text), encode(logprobs) if logprobs else b"[]")
            )

    def arguments(self, index: int, item: CallItem, text: str) -> None:
        self._tell("response.function_call_arguments.delta", item_id=item.id, output_index=index, delta=text)

    def done(self, index: int, item: OutputItem) -> None:
        if isinstance(item, CallItem):
            told = {"item_id": item.id, "output_index": index, "name": item.name, "arguments": item.arguments}
            self._tell("response.function_call_arguments.done", **told)
        else:
            [part] = item.content
            assert isinstance(part, OutputText), "an answer has texts of its own"
            self._tell_part("response.output_text.done", index, item, text=part.text, logprobs=part.logprobs)
            self._tell_part("response.content_part.done", index, item, part=part)
        self._tell("response.output_item.done", output_index=index, item=item)

    # -- one event ---------------------------------------------------------------------------------------------------------

    def _tell_part(self, kind: str, index: int, item: MessageItem, **fields: Any) -> None:
        self._tell(kind, item_id=item.id, output_index=index, content_index=0, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        number = self._next()
        if number > self._after:
            data = encode({"type": kind, "sequence_number": number, **fields})
            self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def complete(response: Response, output: Output, usage: Usage, ended_at: float | None) -> None:
    """`response` has all of its output."""
    response.output, response.usage = output.items(), usage_of(usage)
    if output.status == "incomplete":
        response.status, response.incomplete_details = "incomplete", IncompleteDetails()
    else:
        response.status = "completed"
        response.completed_at = int(time.time() if ended_at is None else ended_at)


def completed(admitted: Admitted, choice: Choice, usage: Usage) -> Response:
    """The response of an output that is complete: what its events come to."""
    response = begun(admitted)
    complete(response, whole(admitted, choice), usage, admitted.ended_at)
    return response
