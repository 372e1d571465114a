"""Free TCP ports on the loopback, for servers that cannot be asked to choose one themselves."""

import random
import socket

# Below the range that the kernel gives to outgoing connections (from 32768 on), so that a port found free stays free
# until its server binds it. SeaweedFS opens a gRPC port 10,000 above each of its ports: that one must be free as well.
_LOWEST, _HIGHEST = 15_000, 22_700
GRPC_OFFSET = 10_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether `port` can be bound on `host` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` different ports that are free now, each with the port GRPC_OFFSET above it free as well.

    Raises OSError when the range is used up.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_LOWEST, _HIGHEST), _HIGHEST - _LOWEST):
        if is_free(port) and is_free(port + GRPC_OFFSET):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} free ports between {_LOWEST} and {_HIGHEST}")
