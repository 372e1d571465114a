"""An inference request: read, admitted, published and answered; once only for each idempotency key."""

import time
from typing import Any

import msgspec

from ingress import answers, preferences
from ingress.answers import Receive, Scope, Send
from ingress.asked import PIN, SESSION, Asked, admit, resolve
from ingress.body import check_declared, check_encoding, read_body
from ingress.context import Context
from ingress.decoding import decode
from ingress.detached import Order, admit_detached
from ingress.family import Admitted, Family, decode_framing, encode_framing
from ingress.job_source import admitted_of, open_source, version_of, wait_ended
from ingress.job_submission import submit
from ingress.job_views import deadline_s, kept_s, location, view
from ingress.keys import Claimed, Recording, Replay
from ingress.preferences import Preference, preference
from ingress.relay import Exchange
from ingress.schemas import Body
from ingress.several import submitted
from shared import job_records, wire
from shared.errors import JobNotFound, ObjectsUnavailable, QueueFull, ResultGone, StreamGone, TooLarge, Unsupported
from shared.stream import Stream


class Inference(Exchange):
    """One POST to an inference route."""

    def __init__(self, context: Context, family: Family) -> None:
        super().__init__(context, family.route)
        self._errors = family.errors
        self._family = family
        self._recording: Recording | None = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, settings, family = self._context, self._settings, self._family
        headers = dict(scope["headers"])
        self._identify(headers.get(b"x-request-id"))
        context.check_accepting()
        check_declared(headers.get(b"content-length"), settings.request_bytes_max)
        self._caller = caller = context.identities.caller_in(scope, time.time())
        check_encoding(headers.get(b"content-encoding"))
        self._client_until = self._started + settings.request_read_s
        raw = await read_body(headers.get(b"content-length"), receive, settings.request_bytes_max)
        self._client_until = float("inf")
        self._body_read = True
        body: Body = decode(family.decoder, raw)
        caller.check_model(family.reference(body, scope))
        self._streamed = bool(body.stream)
        self._resumable = self._streamed and answers.is_true(headers.get(b"x-resumable"))
        key = headers.get(b"idempotency-key")
        wanted = preference(headers.get(preferences.HEADER))
        if wanted is not None:
            await self._watched(receive, self._serve_as_job(scope, headers, raw, key, wanted, send))
            return
        if key is None:
            await self._watched(receive, self._serve_once(scope, headers, body, len(raw), send))
            return
        self._detachable = True
        claim = context.keys.claim(caller.tenant, key, scope["path"].encode(), headers.get(b"x-version-pin", b""), raw)
        await self._watched(receive, self._serve_keyed(claim, scope, headers, body, len(raw), send))

    async def _serve_once(
        self, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        admitted = self._admit(scope, headers, body, body_bytes)
        await self._take(admitted)
        await self._publish(admitted, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int) -> Admitted:
        asked = Asked(
            self._family, body, body_bytes, scope["path"], header_text(headers, PIN), header_text(headers, SESSION)
        )
        resolved = resolve(self._context, asked, self._caller.tenant)
        self._is_of(resolved.version.model, resolved.version.version)
        admitted = admit(self._context, asked, resolved, self.rid)
        if admitted.parts and (self._resumable or self._detachable):
            name = body.SEVERAL
            raise Unsupported(
                f"{name}: so many {name}s are served without Idempotency-Key and X-Resumable only", param=name
            )
        if self._resumable:
            self._detachable = True
            admitted.request.framing = encode_framing(admitted.framing)
        return admitted

    async def _take(self, admitted: Admitted) -> None:
        """The last checks before the publish: the tenant's limits and its queue. Raises what they refuse with."""
        context, tenant = self._context, self._caller.tenant
        requests = admitted.parts or [admitted.request]
        standing = await context.limits.take(tenant, requests)
        if standing is not None:
            self._extra_headers += standing.headers
            if standing.refusal is not None:
                raise standing.refusal
        try:
            queue_max = context.identities.tenant(tenant).limits.queue_max
            context.admission.check_queue(tenant, len(requests), time.monotonic(), queue_max)
        except QueueFull:
            self._give_back(admitted)
            raise

    def _give_back(self, admitted: Admitted) -> None:
        """What was taken of the tenant's limits for what was not published after all."""
        self._context.limits.drop(each.rid for each in admitted.parts or [admitted.request])

    async def _publish(self, admitted: Admitted, send: Send) -> None:
        # not interrupted while publishing: the message can be deleted only once the ack told its sequence
        self._interruptible = False
        dispatcher, tenant = self._context.dispatcher, self._caller.tenant
        if admitted.parts:
            try:
                async with submitted(dispatcher, admitted.parts, tenant) as several:
                    await self._answer(self._family, admitted, several, send)
            finally:
                self._give_back(admitted)  # of the ones that were not published: an earlier one was refused
            return
        try:
            stream = await dispatcher.submit(admitted.request, tenant, resumable=self._resumable)
        except BaseException:
            self._give_back(admitted)
            raise
        await self._answer(self._family, admitted, stream, send)

    # -- as a job --------------------------------------------------------------------------------------------------------

    async def _serve_as_job(
        self, scope: Scope, headers: dict[bytes, bytes], raw: bytes, key: bytes | None, wanted: Preference, send: Send
    ) -> None:
        """Answer with the job that the request becomes, or with its answer if that comes as soon as is wanted."""
        self._detachable, self._counts = True, False  # its worker tells what it comes to
        context, settings, caller, bus = self._context, self._settings, self._caller, self._context.detached.bus
        path, pin, session = scope["path"], header_text(headers, PIN), header_text(headers, SESSION)
        claim = None
        if key is not None:
            marked = path.encode() + b" " + preferences.RESPOND_ASYNC
            claim = context.keys.claim(caller.tenant, key, marked, headers.get(PIN, b""), raw)

        def admitted(rid: str) -> Admitted:
            return admit_detached(context, self._family, raw, caller, rid, path=path, pin=pin, session=session)

        order = Order(endpoint=path, deadline_s=deadline_s(None, settings), keep_s=kept_s(None, settings))
        rid = job_records.new_job_id(time.time())
        self._interruptible = False  # between the record and the message there must be no end
        record = await submit(context, admitted, rid, caller.tenant, order, claim, self._extra_headers)
        self._interruptible = True
        self.rid = record.id
        self._is_of(record.request.model, record.request.version)
        wait_s = min(wanted.wait_s, settings.job_wait_max_s)
        state = await wait_ended(bus, record, wait_s, lambda: context.draining)
        if state is None:
            raise JobNotFound(f"the job {record.id} was deleted")
        if wanted.wait_s and state.result is not None:
            self._extra_headers.append((preferences.APPLIED, b"wait=%d" % wanted.wait_s))
            async with open_source(bus, record) as source:
                await self._answer(self._family, admitted_of(record, version_of(state)), source, send)
            return
        self._extra_headers.append((preferences.APPLIED, preferences.RESPOND_ASYNC))
        self._extra_headers.append((b"location", location(record.id).encode()))
        data = msgspec.json.encode(view(state))
        self._head_sent = True
        await self._send(send, answers.start(202, answers.json_headers(data, self._timed_headers())))
        await self._send(send, answers.body(data))

    # -- with an idempotency key -----------------------------------------------------------------------------------------

    async def _serve_keyed(
        self, claim: Claimed, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        self._interruptible = False  # between the record and the message there must be no end
        admitted, created = None, False
        if await claim.read() is None:
            admitted = self._admit(scope, headers, body, body_bytes)
            admitted.request.framing = encode_framing(admitted.framing)
            await self._take(admitted)
            try:
                created = await claim.create(admitted.request)
            finally:
                if not created:
                    self._give_back(admitted)
        if not created:
            await claim.published()
            request = claim.record.request
            self.rid, self._counts = request.rid, False
            self._identify(headers.get(b"x-request-id"))
            self._extra_headers.append((b"idempotent-replayed", b"true"))
            self._extra_headers += self._context.limits.headers(self._caller.tenant)
            self._is_of(request.model, request.version)
        try:
            await self._answer_keyed(claim, created, body, send)
        except StreamGone:
            if self._head_sent or claim.stream is None or not claim.stream.answered or await claim.read() is None:
                raise
            await self._answer_keyed(claim, False, body, send)  # somebody else had the answer: it is in the record
        finally:
            if admitted is not None and claim.stream is None:
                self._give_back(admitted)

    async def _answer_keyed(self, claim: Claimed, created: bool, body: Body, send: Send) -> None:
        context, record, tenant = self._context, claim.record, self._caller.tenant
        framing = decode_framing(record.request.framing)
        request = msgspec.structs.replace(record.request, input=body.to_input())
        if record.outcome is not None and not record.outcome.too_large:
            await self._answer(self._family, Admitted(request, framing), Replay(record), send)
            return
        if record.outcome is not None:
            located = await context.dispatcher.locate(request.rid, tenant, record.seq)
            if located is None:
                raise ResultGone("the request of this key was answered; the answer is not kept any more")
            stream = await context.dispatcher.attach(
                request, tenant, located.seq, b"", located.queue_left_s, keyed=True, resumable=self._resumable
            )
        else:
            context.router.check_servable(request.model, request.version)
            stream = await self._keyed_stream(claim, created, request)
            claim.stream, stream.guard = stream, claim.may_run
            self._recording = stream.recorder = claim.recording(stream)
        await self._answer(self._family, Admitted(request, framing), stream, send)

    async def _keyed_stream(self, claim: Claimed, created: bool, request: wire.Request) -> Stream:
        """The stream of a key's request that has not been answered as far as is known."""
        dispatcher, tenant = self._context.dispatcher, self._caller.tenant
        if not created and claim.record.seq:
            left_s, seq = self._settings.queue_deadline_s, claim.record.seq
            if dispatcher.may_have_moved(request):
                located = await dispatcher.locate(request.rid, tenant, seq)
                if located is not None:
                    request = msgspec.structs.replace(request, version=located.request.version)
                    seq = located.seq
            return await dispatcher.attach(
                request, tenant, seq, wire.encode(request), left_s, keyed=True, resumable=self._resumable
            )
        try:
            stream = await dispatcher.submit(request, tenant, keyed=True, resumable=self._resumable)
        except (QueueFull, TooLarge, ObjectsUnavailable):
            await claim.withdraw()  # it was certainly not stored
            raise
        claim.note_published(stream.sequence)
        return stream

    async def _before_end(self) -> None:
        if self._recording is not None:
            await self._recording.settled()


def header_text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value: Any = headers.get(name)
    return None if value is None else value.decode("utf-8", "replace")
