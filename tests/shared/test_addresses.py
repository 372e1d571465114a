"""No address that only we can reach is taken for one of the public internet, in whatever form it comes."""

import pytest

from shared.addresses import refusal

PUBLIC = ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.1", "169.253.1.1"]
PUBLIC += ["11.0.0.1", "126.255.255.255", "128.0.0.1", "192.0.1.1", "223.255.255.255", "168.63.129.17"]
PUBLIC += ["2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "2001:4860:4860::8888", "3ffe::1"]

REFUSED = ["0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"]
REFUSED += ["168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192"]
REFUSED += ["192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9"]
REFUSED += ["224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"]
REFUSED += ["::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1"]
REFUSED += ["64:ff9b::8.8.8.8", "64:ff9b:1::a00:1", "100::1", "2001::1", "2001:10::1", "2001:20::1", "2001:db8::1"]
REFUSED += [
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
]
REFUSED += ["fe80::1%eth0", "2606:4700:4700::1111%eth0", "ff02::1", "ff0e::1", "4000::1", "8000::1"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_sent_to(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize("address", REFUSED)
def test_no_other_address_is(address: str) -> None:
    assert refusal(address)


@pytest.mark.parametrize("name", ["localhost", "", "127.1", "0x7f000001", "2130706433", "1.1.1.1 ", "[::1]"])
def test_what_is_no_address_is_told_apart(name: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        refusal(name)
