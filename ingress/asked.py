"""What an inference request asks for, and the checks that it has to pass whoever waits for its answer: no I/O."""

import time

import msgspec

from ingress.context import Context
from ingress.family import Admitted, Family, Framing
from ingress.schemas import Body
from ingress.stickiness import sticky_key
from ingress.tool_schemas import dialect
from shared.router import Resolved

PIN, SESSION = b"x-version-pin", b"x-session-id"  # headers that say which version serves it


class Asked(msgspec.Struct, frozen=True):
    """A request to an inference route."""

    family: Family
    body: Body
    body_bytes: int
    path: str
    pin: str | None = None
    session: str | None = None

    @property
    def reference(self) -> str:
        """The model that it names."""
        return self.family.reference(self.body, {"path": self.path})


def resolve(context: Context, asked: Asked, tenant: str) -> Resolved:
    """The version that serves it. Raises what `Router.resolve` raises."""
    sticky = sticky_key(asked.session, asked.body, tenant)
    return context.router.resolve(asked.reference, asked.pin, sticky)


def admit(context: Context, asked: Asked, resolved: Resolved, rid: str) -> Admitted:
    """What to publish, and how to answer. Raises BadRequest, Unsupported or ContextLength."""
    body, version = asked.body, resolved.version
    requests = context.admission.admit(rid, body, asked.body_bytes, version)
    for request in requests:
        request.movable = resolved.by_weights
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    framing = Framing(asked.family.route, asked.reference, int(time.time()), include_usage, bool(body.stream))
    framing.repeated = body.repeated()
    use = body.tool_use()
    if use is not None:
        framing.tools, framing.one_call = dialect(version), not use.parallel
    framing.base64 = body.in_base64()
    if len(requests) == 1:
        return Admitted(requests[0], framing)
    first = requests[0]
    sampling = msgspec.structs.replace(first.sampling, n=sum(each.sampling.n for each in requests))
    return Admitted(msgspec.structs.replace(first, sampling=sampling), framing, requests)
