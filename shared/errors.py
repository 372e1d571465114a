"""Every error that a caller of Headrace can see, as a tree. Codes are stable; texts are not.

HeadraceError
+-- BadRequest              400 invalid_request          the body or a parameter is wrong; `param` names it by path
|   +-- ContextLength       400 context_length_exceeded  prompt (and max_tokens) over the model's length
|   +-- Unsupported         400 unsupported_parameter    known to the API, not served by this model or engine
|   +-- PreviousNotFound    400 previous_response_not_found  `previous_response_id` is of no response that is kept and has ended
|   +-- WrongTask           400 wrong_task               it was asked to embed and generates, or the other way round
|   +-- VersionConflict     400 version_conflict         X-Version-Pin and `model@version` differ
|   +-- KeyReused           422 idempotency_key_reused   the idempotency key came before, with another body
+-- InvalidApiKey           401 invalid_api_key          no key, or one that is unknown, revoked or expired
+-- RoleMissing             403 role_missing             the key's role does not allow it
+-- ModelNotAllowed         403 model_not_allowed        the key is for other models
+-- NotFound                404 not_found                no such route or object
|   +-- ModelNotFound       404 model_not_found          unknown model
|   +-- VersionNotFound     404 version_not_found        unknown version or alias of a known model
|   +-- VersionRetired      404 version_retired          the version was taken out of service
|   +-- StreamNotFound      404 stream_not_found         nobody has that request, or has it any more
|   +-- JobNotFound         404 job_not_found            no such job, or its time is over
|   +-- ResponseNotFound    404 response_not_found       no such response, or it is not kept any more
|   +-- DeploymentNotFound  404 deployment_not_found     no such deployment
|   +-- FileNotFound        404 file_not_found           the tenant has no such file
|   +-- BatchNotFound       404 batch_not_found          the tenant has no such batch
|   +-- TenantNotFound      404 tenant_not_found         no such tenant
|   +-- ApiKeyNotFound      404 api_key_not_found        the tenant has no such key
+-- Conflict                409 version_exists           same version, other bytes
|   +-- VersionInUse        409 version_in_use           the version cannot be removed; the message says what uses it
|   +-- DeploymentActive    409 deployment_active        the model's traffic is being moved by a deployment
|   +-- DeploymentState     409 deployment_state         the deployment cannot do that in its state
|   +-- FileInUse           409 file_in_use              a batch that has not ended reads the file
|   +-- BatchState          409 batch_state              the batch cannot do that in its status
|   +-- TenantExists        409 tenant_exists            there is a tenant of that name
|   +-- ApiKeyOver          409 api_key_over             the key is revoked or expired
|   +-- ResultGone          409 idempotency_result_gone  the key's request was answered, and its answer is not kept any more
+-- TooLarge                413 request_too_large        over request_bytes_max, or over the bus's limit without an object store
+-- HeadersTooLarge         431 headers_too_large        the head of the request is over head_bytes_max
+-- QueueFull               429 queue_full               the tenant's queue or the stream is at its limit
|   +-- TooManyFiles        429 too_many_files           the tenant has as many files as it may
|   +-- TooManyBatches      429 too_many_batches         the tenant has as many batches that have not ended as it may
+-- RequestsLimited         429 rate_limited_requests    the tenant's requests a minute are used up
+-- TokensLimited           429 rate_limited_tokens      the tenant's tokens a minute are used up
+-- ConcurrencyLimited      429 concurrency_limited      as many of the tenant's requests run as may
+-- Internal                500 internal_error           a defect of ours; the request id finds it in the logs
|   +-- EngineFailed        500 engine_failed            the engine raised on this request
|   +-- Poisoned            500 request_poisoned         the request ended four workers; it is in the DLQ
|   +-- Diverged            500 diverged                 a resumed stream could not be reproduced
|   +-- StreamGone          500 stream_gone              the request is no longer stored and its body is not known
+-- Unavailable             503 bus_unavailable          JetStream cannot be reached or refuses to store
|   +-- VersionFailed       503 version_failed           the version cannot be loaded; the message says why
|   +-- NoCapacity          503 no_capacity              max_replicas is 0
|   +-- NoReplicaForPin     503 no_replica_for_pin       the version that was asked for by name was rolled back
|   +-- ScalerUnavailable   503 scaler_unavailable       what the workers run on cannot be reached: the controller's alone
|   +-- ObjectsUnavailable  503 objects_unavailable      the object store cannot be reached
|   +-- Draining            503 draining                 this process is shutting down
|   +-- TooManyConnections  503 too_many_connections     this process has as many connections as it may
+-- QueueDeadline           504 queue_deadline           nobody took the request in time
+-- GenerationDeadline      504 generation_deadline      the generation did not finish in time
+-- Cancelled               499 cancelled                the caller went away or asked for it
"""

from typing import ClassVar

# What a caller sent may be part of it, and it is stored, logged and sent to where less fits than in a request: the record of a
# batch tells of up to 100 errors.
MESSAGE_CHARACTERS_MAX = 1000


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else text[: MESSAGE_CHARACTERS_MAX - 3] + "..."


class HeadraceError(Exception):
    """An error with a stable `code`, an HTTP `status` and whether the same request may succeed later (`retryable`)."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = _cut(message)
        self.param = None if param is None else _cut(param)
        self.retry_after = retry_after  # seconds

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as every front door shows it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(HeadraceError):
    code, status, type = "invalid_request", 400, "invalid_request_error"


class ContextLength(BadRequest):
    code = "context_length_exceeded"


class Unsupported(BadRequest):
    code = "unsupported_parameter"


class PreviousNotFound(BadRequest):
    code = "previous_response_not_found"


class WrongTask(BadRequest):
    code = "wrong_task"


class VersionConflict(BadRequest):
    code = "version_conflict"


class KeyReused(BadRequest):
    code, status = "idempotency_key_reused", 422


class InvalidApiKey(HeadraceError):
    code, status, type = "invalid_api_key", 401, "authentication_error"


class RoleMissing(HeadraceError):
    code, status, type = "role_missing", 403, "permission_error"


class ModelNotAllowed(HeadraceError):
    code, status, type = "model_not_allowed", 403, "permission_error"


class NotFound(HeadraceError):
    code, status, type = "not_found", 404, "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class VersionNotFound(NotFound):
    code = "version_not_found"


class VersionRetired(NotFound):
    code = "version_retired"


class StreamNotFound(NotFound):
    code = "stream_not_found"


class JobNotFound(NotFound):
    code = "job_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class DeploymentNotFound(NotFound):
    code = "deployment_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class BatchNotFound(NotFound):
    code = "batch_not_found"


class TenantNotFound(NotFound):
    code = "tenant_not_found"


class ApiKeyNotFound(NotFound):
    code = "api_key_not_found"


class MethodNotAllowed(HeadraceError):
    code, status, type = "method_not_allowed", 405, "invalid_request_error"


class BodyTimeout(HeadraceError):
    code, status, type, retryable = "request_timeout", 408, "invalid_request_error", True


class Conflict(HeadraceError):
    code, status, type = "version_exists", 409, "conflict_error"


class VersionInUse(Conflict):
    code = "version_in_use"


class DeploymentActive(Conflict):
    code = "deployment_active"


class DeploymentState(Conflict):
    code = "deployment_state"


class FileInUse(Conflict):
    code = "file_in_use"


class BatchState(Conflict):
    code = "batch_state"


class TenantExists(Conflict):
    code = "tenant_exists"


class ApiKeyOver(Conflict):
    code = "api_key_over"


class ResultGone(Conflict):
    code = "idempotency_result_gone"


class TooLarge(HeadraceError):
    code, status, type = "request_too_large", 413, "invalid_request_error"


class HeadersTooLarge(HeadraceError):
    code, status, type = "headers_too_large", 431, "invalid_request_error"


class QueueFull(HeadraceError):
    code, status, type, retryable = "queue_full", 429, "rate_limit_error", True


class TooManyFiles(QueueFull):
    code, retryable = "too_many_files", False


class TooManyBatches(QueueFull):
    code, retryable = "too_many_batches", False


class RequestsLimited(HeadraceError):
    code, status, type, retryable = "rate_limited_requests", 429, "rate_limit_error", True


class TokensLimited(HeadraceError):
    code, status, type, retryable = "rate_limited_tokens", 429, "rate_limit_error", True


class ConcurrencyLimited(HeadraceError):
    code, status, type, retryable = "concurrency_limited", 429, "rate_limit_error", True


class Internal(HeadraceError):
    code = "internal_error"


class EngineFailed(Internal):
    code = "engine_failed"


class Poisoned(Internal):
    code = "request_poisoned"


class Diverged(Internal):
    code = "diverged"


class StreamGone(Internal):
    code = "stream_gone"


class Unavailable(HeadraceError):
    code, status, type, retryable = "bus_unavailable", 503, "server_error", True


class VersionFailed(Unavailable):
    code, retryable = "version_failed", False


class NoCapacity(Unavailable):
    code, retryable = "no_capacity", False


class NoReplicaForPin(Unavailable):
    code, retryable = "no_replica_for_pin", False


class ScalerUnavailable(Unavailable):
    code = "scaler_unavailable"


class ObjectsUnavailable(Unavailable):
    code = "objects_unavailable"


class Draining(Unavailable):
    code = "draining"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


class QueueDeadline(HeadraceError):
    code, status, type, retryable = "queue_deadline", 504, "server_error", True


class GenerationDeadline(HeadraceError):
    code, status, type = "generation_deadline", 504, "server_error"


class Cancelled(HeadraceError):
    code, status, type = "cancelled", 499, "server_error"


def _tree(root: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    """By the codes that they bring; a kind of one of them that only its process knows has the other one's."""
    found = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def by_code(code: str, message: str, param: str | None = None) -> HeadraceError:
    """The error that came over the wire as (code, message, param); an unknown code becomes Internal."""
    return _tree(HeadraceError).get(code, Internal)(message, param=param)
