"""The object store, over the S3 API. The only module that knows the minio SDK.

Blocking: call it from a thread. Everything that goes wrong is an error of `shared.errors`: NotFound for an object that is
not there, ObjectsUnavailable for a store that cannot be reached or refuses us. Messages name the endpoint, never a key.
"""

import contextlib
import hashlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

import msgspec
import urllib3
from minio import Minio
from minio.commonconfig import REPLACE, CopySource
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from shared import tls
from shared.errors import Internal, NotFound, ObjectsUnavailable
from shared.settings import MIB, Settings

CONNECT_TIMEOUT_S = 2.0
SILENCE_S = 15.0  # so long the store may take no byte, or send none
PART_BYTES = 16 * MIB  # of a multipart upload
CHUNK_BYTES = MIB // 2  # of what one read of a range holds in memory
CONNECTIONS_MAX = 16

_MISSING = {"NoSuchKey", "NoSuchBucket", "ResourceNotFound"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"}


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    size: int  # bytes
    modified: float = 0.0  # unix seconds, of the store's clock


class Source(Protocol):
    """What is written without knowing how long it is."""

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer at the end only."""


class _Changed(Exception):
    """A file is not what was hashed before."""


class _Verified(io.RawIOBase):
    """A file of `size` bytes; what would complete another file than that of `sha256` is not given out."""

    def __init__(self, file: BinaryIO, size: int, sha256: str) -> None:
        self._file, self._left, self._expected = file, size, sha256
        self._sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._sha256.update(data)
        self._left -= len(data)
        if self._left <= 0 and self._sha256.hexdigest() != self._expected:
            raise _Changed
        return data


class _Patient:
    """A connection that waits for the store as long in a send as in a receive; urllib3 sends within the connect timeout."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.settimeout(SILENCE_S)


class _HttpConnection(_Patient, urllib3.connection.HTTPConnection):
    pass


class _HttpsConnection(_Patient, urllib3.connection.HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


def _connections(settings: Settings) -> urllib3.PoolManager:
    secured = settings.s3_endpoint.startswith("https://")
    manager = urllib3.PoolManager(
        ssl_context=tls.client_context(settings.s3_tls_ca, "", "", "s3_tls") if secured else None,
        timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=SILENCE_S),
        maxsize=CONNECTIONS_MAX,
        retries=urllib3.Retry(total=1, connect=0, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
    )
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return manager


class ObjectStore:
    """One bucket of an S3 server. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.s3_endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ObjectsUnavailable(f"s3_endpoint is http(s)://HOST:PORT, not {settings.s3_endpoint!r}")
        self.endpoint = settings.s3_endpoint
        self.bucket = settings.s3_bucket
        self._client = Minio(
            parts.netloc,
            access_key=settings.s3_access_key or None,
            secret_key=settings.s3_secret_key or None,
            session_token=settings.s3_session_token or None,
            secure=parts.scheme == "https",
            region=settings.s3_region,
            http_client=_connections(settings),
        )
        if settings.s3_virtual_host is not None:
            if settings.s3_virtual_host:
                self._client.enable_virtual_style_endpoint()
            else:
                self._client.disable_virtual_style_endpoint()

    def ensure_bucket(self) -> None:
        """Make the bucket if it is not there."""
        with self._errors():
            if not self._client.bucket_exists(self.bucket):
                try:
                    self._client.make_bucket(self.bucket)
                except S3Error as error:
                    if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                        raise

    def put(self, key: str, data: bytes) -> None:
        """Write `data` as the object `key`. The store checks it against the digest that the request carries."""
        with self._errors(key):
            self._client.put_object(self.bucket, key, io.BytesIO(data), len(data))
        self._check_size(key, len(data))

    def put_file(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the file as the object `key`. Internal if its bytes are not those of `sha256`: it changed meanwhile.

        Then there is no object: it never appears before its last byte. The store checks each part against the digest that
        its request carries.
        """
        with open(path, "rb") as file, self._errors(key):
            try:
                self._client.put_object(self.bucket, key, _Verified(file, size, sha256), size, part_size=PART_BYTES)
            except _Changed:
                raise Internal(f"{path} changed while it was uploaded") from None
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                raise Internal(f"{path} cannot be read: {error}") from error
        self._check_size(key, size)

    def put_stream(self, key: str, source: Source, part_bytes: int) -> int:
        """Write what `source` gives until its end as the object `key`, holding two parts in memory at most; its size.

        There is no object before its last byte, and none if `source` raises: that goes on to the caller.
        """
        with self._errors(key):
            self._client.put_object(self.bucket, key, source, -1, part_size=part_bytes)
        return self.stat(key).size

    def get(self, key: str) -> bytes:
        """The whole of a small object."""
        with self._errors(key), self._open(key, 0, 0) as response:
            data: bytes = response.read()
        return data

    def stat(self, key: str) -> ObjectInfo:
        with self._errors(key):
            found = self._client.stat_object(self.bucket, key)
        return ObjectInfo(key, found.size or 0, found.last_modified.timestamp() if found.last_modified else 0.0)

    def touch(self, key: str) -> None:
        """Make an object new: `modified` is now. NotFound if it is not there. The store copies it onto itself."""
        with self._errors(key):
            self._client.copy_object(
                self.bucket,
                key,
                CopySource(self.bucket, key),
                metadata={"touched": str(int(time.time()))},
                metadata_directive=REPLACE,
            )

    def each(self, prefix: str) -> Iterator[ObjectInfo]:
        """The objects whose keys begin with `prefix`, in the order of their keys; asked for a thousand at a time."""
        with self._errors():
            for item in self._client.list_objects(self.bucket, prefix=prefix, recursive=True):
                modified = item.last_modified.timestamp() if item.last_modified else 0.0
                yield ObjectInfo(str(item.object_name), item.size or 0, modified)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """The same, all at once."""
        return [*self.each(prefix)]

    def abort_uploads(self, prefix: str, before: float) -> int:
        """Give up uploads to keys that begin with `prefix`, begun before that time (unix seconds) and never completed: what
        they brought takes room and is in no list of objects. How many; some hundred at a time."""
        with self._errors():
            # the SDK has these calls for its own use alone
            found = self._client._list_multipart_uploads(self.bucket, prefix=prefix)
            old = [each for each in found.uploads if each.initiated_time and each.initiated_time.timestamp() < before]
            for each in old:
                self._client._abort_multipart_upload(self.bucket, each.object_name, str(each.upload_id))
        return len(old)

    def remove(self, key: str) -> None:
        """Remove an object; not an error if it is not there."""
        with self._errors(key):
            self._client.remove_object(self.bucket, key)

    def read_range(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """`length` bytes from `offset` in order, CHUNK_BYTES at a time; fewer where the object ends before."""
        with self._errors(key):
            try:
                with self._open(key, offset, length) as response:
                    while data := response.read(CHUNK_BYTES, decode_content=False):
                        yield data
            except S3Error as error:
                if error.code != "InvalidRange":
                    raise

    @contextlib.contextmanager
    def _open(self, key: str, offset: int, length: int) -> Iterator[Any]:
        """The answer to a read of `length` bytes from `offset`, 0 meaning all; its connection is used again."""
        response = self._client.get_object(self.bucket, key, offset, length)
        try:
            yield response
        finally:
            response.close()
            response.release_conn()

    def _check_size(self, key: str, size: int) -> None:
        stored = self.stat(key).size
        if stored != size:
            raise ObjectsUnavailable(f"the object store kept {stored} of {size} bytes of {key}")

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        where = f"the object store at {self.endpoint}"
        try:
            yield
        except S3Error as error:
            if error.code in _MISSING:
                raise NotFound(f"{where} has no {key or 'bucket ' + self.bucket}") from error
            if error.code in _REFUSED:
                raise ObjectsUnavailable(f"{where} refuses the access key ({error.code})") from error
            raise ObjectsUnavailable(f"{where} answered {error.code}: {error.message}") from error
        except (ServerError, InvalidResponseError, MinioException) as error:
            raise ObjectsUnavailable(f"{where} failed: {error}") from error
        except (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
            reason = getattr(error, "reason", None) or error
            raise ObjectsUnavailable(f"{where} cannot be reached ({type(reason).__name__})") from error
