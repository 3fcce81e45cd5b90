"""Two hosts on one machine: each has its own network, processes, host name, home and shared memory, and an sshd.

The files of this machine that a host sees have the same paths there, as on a shared file system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

NAMES = ("outrider-a", "outrider-b")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd")
PROGRAMS = {"ray": "from ray.scripts.scripts import main", "outrider": "from outrider.runner.cli.main import main"}
SSH_OPTIONS = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
UP_SECONDS = 20

START = """
set -e
mount --make-rprivate /
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mkdir -p -m 700 /tmp/outrider-0 {home}/ray
mkdir -p /run/sshd
mount --bind {home}/ray /tmp/outrider-0
mount --bind {home}/passwd /etc/passwd
exec /usr/sbin/sshd -D -e -f {home}/sshd_config
"""
SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HF_HUB_OFFLINE=1
"""


def missing() -> str | None:
    """The reason why two hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} is not installed (apt-get install openssh-server rsync iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"probe-{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"probe-{os.getpid()}"], check=False)
    return None


class TwoHosts:
    """``folder`` has the keys and the homes; ``bin`` has this environment's programs, for the PATH of every host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "key"
        self.bin = folder / "bin"
        self.homes = [folder / name for name in NAMES]
        # The user's own machine: on the first host's network, with its own home.
        self.laptop = folder / "laptop"
        self._hosts: list[subprocess.Popen[bytes]] = []
        tag = os.getpid() % 10000
        self._namespaces = [f"outrider-{tag}-{letter}" for letter in "ab"]
        self._links = [f"or{tag}{letter}" for letter in "ab"]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _start(self) -> None:
        for name in ("key", "host_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        self.bin.mkdir()
        for name, statement in PROGRAMS.items():
            program = self.bin / name
            program.write_text(f'#!{sys.executable}\n{statement}\nif __name__ == "__main__":\n    main()\n')
            program.chmod(0o755)
        for home in (*self.homes, self.laptop):
            home.mkdir()
            (home / ".bashrc").touch()
        _do("ip", "link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
        for namespace, link, address, name, home in zip(
            self._namespaces, self._links, ADDRESSES, NAMES, self.homes, strict=True
        ):
            _do("ip", "netns", "add", namespace)
            _do("ip", "link", "set", link, "netns", namespace)
            _do("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", link)
            for each in (link, "lo"):
                _do("ip", "-n", namespace, "link", "set", each, "up")
            # Ray asks the routing table which address is its own.
            _do("ip", "-n", namespace, "route", "add", "default", "dev", link)
            (home / "sshd_config").write_text(SSHD.format(address=address, folder=self.folder))
            # ssh takes the home from here, whatever HOME says.
            users = Path("/etc/passwd").read_text()
            (home / "passwd").write_text(re.sub(r"^(root:.*):[^:]*(:[^:]*)$", rf"\1:{home}\2", users, flags=re.M))
            isolate = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
            script = START.format(name=name, home=home)
            with (home / "sshd.log").open("wb") as log:
                self._hosts.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", namespace, *isolate, "bash", "-c", script], stdout=log, stderr=log
                    )
                )
        deadline = time.monotonic() + UP_SECONDS
        for host in range(2):
            while self.on(host, "true").returncode:
                assert time.monotonic() < deadline, (self.homes[host] / "sshd.log").read_text()
                time.sleep(0.2)

    def _stop(self) -> None:
        for host in self._hosts:
            host.kill()
            host.wait()
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._links[0]], capture_output=True, check=False)

    def on(self, host: int, command: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on one of the hosts over ssh."""
        return self.at_laptop("ssh", "-i", str(self.key), *SSH_OPTIONS, f"root@{ADDRESSES[host]}", command, seconds=seconds)

    def at_laptop(self, *command: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.laptop), "PATH": f"{self.bin}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run(
            ["ip", "netns", "exec", self._namespaces[0], *command],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
