"""Which addresses are nobody's but ours: where requests that strangers ask for are never sent. Pure.

The tables are written out, so that what is refused does not depend on the version of Python. They are IANA's registries of
special-purpose addresses, and what clouds keep there.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

REFUSED_V4: tuple[tuple[IPv4Network, str], ...] = tuple(
    (IPv4Network(network), what)
    for network, what in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by carriers, and clouds' metadata"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "a cloud's metadata"),
        ("169.254.0.0/16", "link-local, and clouds' metadata"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "of protocols, and a cloud's metadata"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "of a name service"),
        ("192.52.193.0/24", "of a relay"),
        ("192.88.99.0/24", "of a relay"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "of a name service"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved, and broadcast"),
    )
)
GLOBAL_V6 = IPv6Network("2000::/3")  # outside of it: loopback, link-local, private, multicast, and IPv4 in disguise
REFUSED_V6: tuple[tuple[IPv6Network, str], ...] = tuple(
    (IPv6Network(network), what)
    for network, what in (
        ("2001::/23", "of protocols, and tunnels to IPv4"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "a tunnel to IPv4"),
        ("2620:4f:8000::/48", "of a name service"),
        ("3fff::/20", "for documentation"),
    )
)


def refusal(address: str) -> str | None:
    """Why nothing is sent to an IP address, in words; None: it is one of the public internet. Raises ValueError for no address.

    An IPv6 address that stands for one of IPv4 (mapped, compatible, NAT64, 6to4, Teredo) is refused, whatever it stands for:
    whoever has an address of IPv4 can say so.
    """
    parsed = ip_address(address)
    if isinstance(parsed, IPv4Address):
        return next((what for network, what in REFUSED_V4 if parsed in network), None)
    assert isinstance(parsed, IPv6Address)
    if parsed.scope_id is not None or parsed not in GLOBAL_V6:
        return "not of the public internet"
    return next((what for network, what in REFUSED_V6 if parsed in network), None)
