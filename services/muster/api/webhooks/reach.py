"""Addresses that webhooks may reach. Whoever may create a webhook must not use the API to reach what only the API can
reach."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from muster.words.address import is_metadata_host

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: its last four bytes are the IPv4 address that is reached


class OutOfReach(Exception):
    """The address may not receive messages; the text says why, and never what its name resolves to."""


class UnresolvedHost(Exception):
    """The host's name resolves to nothing at the moment."""


@dataclass(frozen=True)
class NetworkReach:
    """The internet, by https; and the `networks` that an administrator allows in addition, by http too."""

    networks: tuple[Network, ...] = ()

    async def addresses(self, url: str) -> list[str]:
        """The IP addresses behind a webhook's address, each of which may be reached. Whoever connects must connect to
        one of these: a name that is resolved again may answer otherwise. Raises OutOfReach, UnresolvedHost."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if is_metadata_host(host):
            raise OutOfReach(f"{host} is a machine's own metadata service, which is told nothing")
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise UnresolvedHost(f"the name {host} can't be resolved") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        for address in addresses:
            self._check(host, parts.scheme, address)
        return addresses

    def _check(self, host: str, scheme: str, text: str) -> None:
        address = _meant(ipaddress.ip_address(text.partition("%")[0]))
        if is_metadata_host(str(address)):
            raise OutOfReach(f"{host} is a link-local address or a machine's metadata service, which is told nothing")
        if any(address in network for network in self.networks):
            return
        if not address.is_global or address.is_multicast:
            words = "is an address of this machine or of a private network, which an administrator may allow"
            raise OutOfReach(f"{host} {words} (MUSTER_API_WEBHOOK_NETWORKS)")
        if scheme != "https":
            raise OutOfReach(f"{host} is on the internet, where messages go by https:// only")


def _meant(address: Address) -> Address:
    """The IPv4 address that is reached by one of IPv6, where it is one of those."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address
