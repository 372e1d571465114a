"""The object store, over the S3 API. The only module that knows the minio SDK.

Blocking: call it from a thread. Everything that goes wrong is an error of `shared.errors`: NotFound for an object that is
not there, ObjectsUnavailable for a store that cannot be reached or refuses us. Messages name the endpoint, never a key.
"""

import contextlib
import hashlib
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec
import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from shared.errors import Internal, NotFound, ObjectsUnavailable
from shared.settings import MIB, Settings

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 15.0
PART_BYTES = 16 * MIB  # of a multipart upload
RANGE_BYTES = 8 * MIB  # of one ranged read
READERS = 4

_MISSING = {"NoSuchKey", "NoSuchBucket", "ResourceNotFound"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    size: int  # bytes


class _Hashing(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


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
            secure=parts.scheme == "https",
            region=settings.s3_region,
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
                maxsize=2 * READERS,
                retries=urllib3.Retry(total=1, connect=0, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
            ),
        )

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

        Then the object is removed again. The store checks each part against the digest that its request carries.
        """
        with open(path, "rb") as file, self._errors(key):
            hashing = _Hashing(file)
            try:
                self._client.put_object(self.bucket, key, hashing, size, part_size=PART_BYTES)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                raise Internal(f"{path} cannot be read: {error}") from error
        if hashing.sha256.hexdigest() != sha256:
            self.remove(key)
            raise Internal(f"{path} changed while it was uploaded")
        self._check_size(key, size)

    def get(self, key: str) -> bytes:
        """The whole of a small object."""
        return self._read(key, 0, 0)

    def stat(self, key: str) -> ObjectInfo:
        with self._errors(key):
            found = self._client.stat_object(self.bucket, key)
        return ObjectInfo(key, found.size or 0)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """The objects whose keys begin with `prefix`, in the order of their keys."""
        with self._errors():
            found = self._client.list_objects(self.bucket, prefix=prefix, recursive=True)
            return [ObjectInfo(str(item.object_name), item.size or 0) for item in found]

    def remove(self, key: str) -> None:
        """Remove an object; not an error if it is not there."""
        with self._errors(key):
            self._client.remove_object(self.bucket, key)

    def read_ranges(self, key: str, start: int, size: int) -> Iterator[bytes]:
        """Bytes [start, size) of an object of `size` bytes, in order, read by READERS ranged requests at a time.

        At most 2 x READERS ranges are held in memory. A store that has fewer bytes ends the iteration early.
        """
        offsets = iter(range(start, size, RANGE_BYTES))
        with ThreadPoolExecutor(READERS, thread_name_prefix="objects") as pool:
            pending: deque[Future[bytes]] = deque()
            try:
                while True:
                    while len(pending) < 2 * READERS and (offset := next(offsets, None)) is not None:
                        pending.append(pool.submit(self._read, key, offset, min(RANGE_BYTES, size - offset)))
                    if not pending:
                        return
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _read(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, 0 meaning all; fewer where the object ends before."""
        with self._errors(key):
            try:
                response = self._client.get_object(self.bucket, key, offset, length)
            except S3Error as error:
                if error.code == "InvalidRange":
                    return b""
                raise
            try:
                return response.read()
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
