"""Responses in the background: jobs whose records keep the items that they came from."""

import msgspec

from ingress.context import Context
from ingress.job_source import admitted_of, choice_of, error_of, version_of
from ingress.response_items import Item
from ingress.routes.responses_events import completed
from ingress.routes.responses_output import Output
from ingress.routes.responses_shapes import Response, begun, put_error, usage_of
from shared import job_status
from shared.job_records import JobRecord, Kind
from shared.job_status import State
from shared.results import Part, Result
from shared.wire import Usage

KIND: Kind = "response"

encode_items = msgspec.json.encode
_decode_items = msgspec.json.Decoder(list[Item]).decode


async def look(context: Context, tenant: str, rid: str) -> State | None:
    """What has become of one; None: there is none of that id, or not any more. Raises Unavailable."""
    state = await job_status.look(context.detached.bus, tenant, rid)
    return state if state is not None and state.record.kind == KIND else None


def items_of_record(record: JobRecord) -> list[Item]:
    """All that it came from."""
    return _decode_items(record.document)


def response_of(state: State) -> Response:
    """It, as far as it has come: its output is told once it has ended."""
    admitted = admitted_of(state.record, version_of(state))
    result = state.result
    if result is None:
        response = begun(admitted)
        response.status = "in_progress" if state.status == "running" else "queued"
        return response
    if result.error is None:
        admitted.ended_at = result.ended_at
        return completed(admitted, choice_of(result.parts[0]), result.usage or Usage(0, 0))
    response = begun(admitted)
    response.output = _unfinished(result, Output(admitted)).items()
    response.usage = None if result.usage is None else usage_of(result.usage)
    put_error(response, error_of(result.error))
    return response


def _unfinished(result: Result, output: Output) -> Output:
    choice = choice_of(result.parts[0] if result.parts else Part())
    for index, text in enumerate(choice.texts):
        output.add(text, choice.logprobs[index : index + 1])
    return output
