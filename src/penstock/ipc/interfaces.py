"""Network interfaces of this machine by name and address (Linux)."""

import fcntl
import socket
import struct
from pathlib import Path

from penstock.errors import ConfigError

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """Its IPv4 address, or an IPv6 one where it has no other."""
    found = [address for name, address in _all_addresses() if name == interface]
    if not found:
        names = sorted({name for name, _ in _all_addresses()})
        raise ConfigError(
            f"rank_interface is '{interface}', which has no address here; there are "
            f"{', '.join(names)}"
        )
    return found[0]


def interface_of(address: str) -> str | None:
    """Which one has that address."""
    return next((name for name, own in _all_addresses() if own == address), None)


def _all_addresses() -> list[tuple[str, str]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    if _IPV6_TABLE.exists():
        for line in _IPV6_TABLE.read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found
