"""Finds sockets of processes that listen beyond the loopback address, from /proc."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# TCP_LISTEN in /proc/net/tcp.
LISTEN = "0A"
SOCKET = re.compile(r"socket:\[(\d+)\]")


def beyond_loopback(processes: Iterable[int], proc: Path = Path("/proc")) -> list[tuple[int, str]]:
    """Where these processes listen on an address that is not loopback: process id and address:port."""
    wide = dict(_listening_beyond_loopback(proc))
    found = []
    for process in processes:
        with suppress(OSError):  # the process has ended
            for entry in (proc / str(process) / "fd").iterdir():
                with suppress(OSError):
                    if (match := SOCKET.fullmatch(str(entry.readlink()))) and match[1] in wide:
                        found.append((process, wide[match[1]]))
    return sorted(set(found))


def _listening_beyond_loopback(proc: Path) -> Iterator[tuple[str, str]]:
    """Inode and address:port of each socket of this network namespace that listens on an address that is not loopback."""
    for kind in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (proc / "self/net" / kind).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                if words[3] == LISTEN and not (where := _address(address)).is_loopback:
                    yield words[9], f"{where}:{int(port, 16)}"


def _address(kernel: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address from its hexadecimal form: words of four bytes, each in this machine's byte order."""
    words = bytes.fromhex(kernel)
    packed = b"".join(int.from_bytes(words[at : at + 4]).to_bytes(4, sys.byteorder) for at in range(0, len(words), 4))
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address
