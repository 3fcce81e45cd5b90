"""A second user of the host, made and removed here, cannot read, write or delete anything of a running job."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import finish, outrider, start, targets_standing_still, wait_for_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make a second user"),
]
NAME = f"guest{os.getpid() % 100000}"
SYSTEM_PYTHON = "/usr/bin/python3"

# What he does, with the standard library only: he cannot read this environment. Files are given by the job's processes.
GUEST = r"""
import json, os, socket, stat, sys
told = json.load(sys.stdin)
found = []
owner, mine = told["owner"], os.getuid()
# Locks of cores, which all users may look at, and only the owner may change.
shared = set(told["leases"])

def look(path):
    try:
        status = os.lstat(path)
    except OSError:
        return
    if status.st_uid != owner or stat.S_ISLNK(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        for right, name in ((os.R_OK, "list"), (os.W_OK, "write in"), (os.X_OK, "enter")):
            if os.access(path, right) and (path not in shared or name == "write in"):
                found.append(f"can {name} {path}")
    elif stat.S_ISSOCK(status.st_mode):
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)
            found.append(f"can connect to {path}")
        except OSError:
            pass
    else:
        for flag, name in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
            if name == "read" and os.path.dirname(path) in shared:
                continue
            try:
                os.close(os.open(path, flag | os.O_NONBLOCK | os.O_NOFOLLOW))
                found.append(f"can {name} {path}")
            except OSError:
                pass

def walk(top):
    for folder, folders, files in os.walk(top):
        for each in (*folders, *files):
            yield os.path.join(folder, each)

for path in [*told["paths"], *shared, *(path for top in told["new"] for path in (top, *walk(top)))]:
    look(path)
for path in [*told["paths"], *(path for top in shared for path in walk(top)), *shared]:
    def move(path):
        os.rename(path, path + ".old")
    def link(path):
        os.symlink("/etc/passwd", os.path.join(path, "new"))
    def open_up(path):
        os.chmod(path, 0o777)
    for attack in (os.unlink, move, link, open_up, os.listdir):
        if attack is os.listdir and path in shared:
            continue
        try:
            attack(path)
            found.append(f"did {attack.__name__} to {path}")
        except OSError as error:
            if not isinstance(error, (PermissionError, FileNotFoundError, NotADirectoryError)):
                found.append(f"{path}: {error}")
with open("/proc/net/unix") as lines:
    names = [line.split()[-1] for line in lines if "@" in line.split()[-1]]
for name in names:
    if name not in told["abstract"]:
        found.append(f"the abstract socket {name}")
for process in told["processes"]:
    for secret in ("environ", "mem", "maps", "fd", "cwd", "root"):
        path = f"/proc/{process}/{secret}"
        try:
            see = {"fd": os.listdir, "cwd": os.readlink, "root": os.readlink}
            see.get(secret, lambda path: open(path, "rb").read(1))(path)
            found.append(f"can see {path}")
        except OSError:
            pass
heard = {}
for port in told["ports"]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as one:
        one.settimeout(2)
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            heard[port] = one.recv(4096).decode("latin-1")
        except OSError:
            heard[port] = ""
print(json.dumps({"found": found, "heard": heard, "uid": mine}))
"""


@pytest.fixture
def guest() -> Iterator[pwd.struct_passwd]:
    made = subprocess.run(["useradd", "--no-create-home", NAME], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no user can be made here: {made.stderr.strip()}")
    try:
        yield pwd.getpwnam(NAME)
    finally:
        subprocess.run(["userdel", NAME], capture_output=True, check=False)


def as_guest(guest: pwd.struct_passwd, told: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [SYSTEM_PYTHON if Path(SYSTEM_PYTHON).exists() else sys.executable, "-I", "-c", GUEST],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        user=guest.pw_uid,
        group=guest.pw_gid,
        extra_groups=[],
        cwd="/",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def places() -> set[str]:
    """What may be the job's: other programs make files there too."""
    names = ("outrider*", "ray*", "sem.*", "plasma*")
    return {str(path) for top in ("/tmp", "/var/tmp", "/dev/shm") for name in names for path in Path(top).glob(name)}


def abstract() -> list[str]:
    return [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line.split()[-1]]


def test_he_finds_nothing_of_a_running_job(guest: pwd.struct_passwd, tmp_path_factory: pytest.TempPathFactory) -> None:
    # A place where he can get as far as the job's directory, as in a home that is open to all.
    home = Path("/var/tmp") / f"home-{os.getpid()}"
    home.mkdir(mode=0o755)
    rows = home / "rows.jsonl"
    rows.write_text("".join(f'{{"id": "r{n}", "prompt": "def f{n}(x):", "max_tokens": 400}}\n' for n in range(200)))
    rows.chmod(0o600)
    job, cache = home / "job", home / "cache"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}
    environment.pop("OUTRIDER_CACHE", None)
    before, known_sockets = places(), abstract()
    old = os.umask(0o022)
    try:
        process = start("run", rows, "-o", job, "--batch", "1", "--draft-tokens", "3", environment=environment)
        wait_for_rows(process, job, 1)
        with targets_standing_still(process.pid):
            job_processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            sockets = [
                path
                for one in job_processes
                for path in (str(each.laddr) for each in one.net_connections("unix"))
                if path.startswith("/")
            ]
            ports = sorted(
                {
                    each.laddr.port
                    for one in job_processes
                    for each in one.net_connections("tcp")
                    if each.status == psutil.CONN_LISTEN
                }
            )
            opened = [each.path for one in job_processes for each in one.open_files()]
            own = [Path(path) for path in (*sockets, *opened) if "/outrider-0/" in path]
            leases = Path(f"/dev/shm/outrider-cores-{os.getuid()}")
            assert sockets and ports and own and list(leases.iterdir())
            paths = {str(path) for each in own for path in (each, each.parent, each.parent.parent)}
            paths |= {str(path) for path in (job, *job.iterdir(), rows)}
            told = {
                "owner": os.getuid(),
                "paths": sorted(paths),
                "new": sorted({*(places() - before - {str(home)}), "/tmp/outrider-0", str(job), str(cache / "outrider")}),
                "leases": [str(leases)],
                "abstract": known_sockets,
                "processes": [each.pid for each in job_processes],
                "ports": ports,
            }
            answer = as_guest(guest, told)
        assert answer["uid"] == guest.pw_uid
        assert answer["found"] == []
        assert len(answer["heard"]) == len(ports)
        for port, words in answer["heard"].items():
            assert "200 OK" not in words and "ray_" not in words, f"port {port} says {words!r} to one without a token"
        process.terminate()
        finish(process, 130)
        assert outrider("status", job).returncode == 0
    finally:
        os.umask(old)
        subprocess.run(["rm", "-rf", home], check=True)
