"""From a line to the job that it is, and from what came of the job to the line of the output."""

import time
from collections.abc import Mapping

import msgspec

from ingress.batches.lines import Line
from ingress.batches.record import BatchRecord, End
from ingress.context import Context
from ingress.decoding import decode
from ingress.detached import admit_detached
from ingress.family import Admitted, Family, Framing
from ingress.identity import Caller
from ingress.job_source import StoredAnswer, answer_of
from ingress.schemas import Body
from shared.errors import Cancelled, GenerationDeadline, HeadraceError, Internal, QueueDeadline
from shared.results import Result
from shared.tenants import ApiKey
from shared.wire import Input, Request, Sampling

HTTP_OK = 200
UNFINISHED = {  # codes and messages of lines that have no answer, by how their batch ends
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "failed": ("batch_failed", "This request was not executed: the batch could not go on."),
}
GIVEN_UP = {
    Cancelled.code,
    QueueDeadline.code,
    GenerationDeadline.code,
}  # what a job's end is called when its time is over


class ResponsePart(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ErrorPart(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct):
    """A line of the output file or of the error file."""

    id: str
    custom_id: str
    response: ResponsePart | None
    error: ErrorPart | None


class LineJob(msgspec.Struct):
    """A line on its way: what has to be kept to tell its answer."""

    number: int  # 0: the first
    rid: str
    custom_id: str
    end: int  # where the next line begins in the input
    bytes: int = 0  # of its job's message
    framing: Framing | None = None  # None: nothing could be asked
    logprobs: int | None = None
    model: str = ""
    version: str = ""
    sequence: int = 0  # of its message in JOB; 0: it is not there
    refusal: HeadraceError | None = None  # why it was not asked
    unasked: bool = False  # the batch had ended before
    done: bool | None = None  # a result is known of: it is an answer (True), or an error
    purgeable: bool = True  # once its message is gone

    @property
    def kept_bytes(self) -> int:
        """What is kept of its request for its answer, whatever has become of it."""
        return 0 if self.framing is None else len(self.framing.repeated)


def rid_of(record: BatchRecord, number: int) -> str:
    """The rid of a line's job: the same whoever submits it, and however often."""
    return f"{record.id}-{number + 1}"


def number_of(record: BatchRecord, rid: str) -> int | None:
    """The line whose job that is; None: it is none of the batch's."""
    batch, _, number = rid.rpartition("-")
    return int(number) - 1 if batch == record.id and number.isdigit() else None


class Asker:
    """The checks of a synchronous request, for lines; `families` by their routes."""

    def __init__(self, context: Context, families: Mapping[str, Family]) -> None:
        self._context, self._families = context, families

    def why_not(self, record: BatchRecord, reference: str) -> HeadraceError | None:
        """Why no line with that model will ever have an answer; None: one may."""
        try:
            _caller(record).check_model(reference)
            self._context.router.resolve(reference, None, "")
        except HeadraceError as error:
            return error if error.status in (403, 404) else None
        return None

    def ask(self, record: BatchRecord, job: LineJob, line: Line) -> Request:
        """The request of a line; `job` is completed. Raises what a synchronous request is refused with."""
        family, raw = self._families[record.endpoint], bytes(line.body)
        try:
            admitted = admit_detached(
                self._context, family, raw, _caller(record), job.rid, path=record.endpoint, session=job.rid
            )
        except HeadraceError:
            self._note(job, family, raw)
            raise
        request = admitted.request
        job.framing, job.logprobs = admitted.framing, request.sampling.logprobs
        job.model, job.version = request.model, request.version
        return request

    def _note(self, job: LineJob, family: Family, raw: bytes) -> None:
        """What can be known of a line that is refused: it may have been asked before, when it was not."""
        try:
            body: Body = decode(family.decoder, raw)
            job.logprobs, repeated = body.logprobs_wanted(), body.repeated()
        except HeadraceError:
            return
        reference = family.reference(body, {"path": family.route})
        job.framing = Framing(family.route, reference, int(time.time()), False, False, base64=body.in_base64())
        job.framing.repeated = repeated

    def tell(self, record: BatchRecord, job: LineJob, result: Result | None) -> tuple[bytes, bool]:
        """The line of the output, or of the error file, with its end; whether it is an answer."""
        if job.unasked or _was_given_up(record.end, result):
            code, message = UNFINISHED[record.end or "failed"]
            return _line(job, None, ErrorPart(code, message)), False
        if result is None:
            refusal = job.refusal or Internal("the request has no result")
            told = StoredAnswer(refusal.status, encode(refusal.body()))
        elif job.framing is None:
            raise AssertionError("a line that has a result was asked")
        else:
            sampling = Sampling(n=len(result.parts), logprobs=job.logprobs)
            request = Request(job.rid, job.model, job.version, Input(), sampling)
            family = self._families[job.framing.route]
            told = answer_of(family, Admitted(request, job.framing), result, _request_id(job))
        response = ResponsePart(told.status, _request_id(job), msgspec.Raw(told.body))
        return _line(job, response, None), told.status == HTTP_OK


def _caller(record: BatchRecord) -> Caller:
    """Whoever made the batch."""
    return Caller(record.tenant, ApiKey(id=record.id, sha256="", models=record.models), record.id)


def _was_given_up(end: End | None, result: Result | None) -> bool:
    return end is not None and result is not None and result.error is not None and result.error.code in GIVEN_UP


def _request_id(job: LineJob) -> str:
    return f"req_{job.rid}"


def _line(job: LineJob, response: ResponsePart | None, error: ErrorPart | None) -> bytes:
    told = OutputLine("batch_req_" + job.rid.removeprefix("batch_"), job.custom_id, response, error)
    return encode(told) + b"\n"


encode = msgspec.json.Encoder().encode
