"""The token of a Ray cluster. A cluster without one is never joined.

Ray's servers listen on every interface, and without a token anybody who reaches their ports can run programs on all hosts.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from outrider.workers.errors import JobError, UsageError

PROBE_SECONDS = 60.0
# What a file system without hard links (vfat, many of FUSE) answers to one.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
OPEN, WANTS_TOKEN = 0, 3
# Run without a token in another process, since Ray reads its settings once per process.
PROBE = f"""
import sys
from outrider.workers.ray_compat import answers_anybody
sys.exit({OPEN} if answers_anybody(sys.argv[1]) else {WANTS_TOKEN})
"""


def token_file() -> Path:
    """The file from which Ray reads the token if no environment variable holds it."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if named:
        return Path(named)
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:  # a user without an entry in passwd, as in containers
        raise UsageError(
            "there is no home directory to look for the cluster's token in: set HOME, or RAY_AUTH_TOKEN_PATH to the "
            "token's file"
        ) from None


def make_token() -> tuple[Path, bool]:
    """The token's file, readable by its user only, and whether it was made here. (Ray would make it readable by all.)"""
    path = token_file()
    if not has_token(path):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_token(path)
            return path, True
        except OSError as error:
            if not has_token(path):
                raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    make_private(path)
    return path, False


def _write_token(path: Path) -> None:
    """Write a new token, whole or not at all; FileExistsError if another process makes one meanwhile."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(handle)
        if path.exists():  # without a token, as a full disk or a kill leaves it
            whole.replace(path)
        else:
            _link(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def _link(whole: Path, path: Path) -> None:
    try:
        os.link(whole, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        whole.replace(path)


def has_token(path: Path) -> bool:
    """Whether the token's file is readable and not empty."""
    try:
        return path.is_file() and bool(path.read_bytes().strip())
    except OSError as error:
        raise UsageError(
            f"the cluster's token in {path} cannot be read ({error.strerror}): the file and its folder must be yours; "
            "RAY_AUTH_TOKEN_PATH names another file"
        ) from None


def make_private(path: Path) -> bool:
    """Remove the permissions of group and others; whether that was needed."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return False
    try:
        path.chmod(0o600)
    except OSError as error:
        raise UsageError(f"{path} can be read by others and cannot be changed ({error.strerror}): chmod 600 it") from None
    return True


def require_token(say: Callable[[str], None]) -> None:
    """Make Ray use a token; an error if there is none. To be called before Ray is imported."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode not in (None, "token"):
        raise UsageError(
            f"RAY_AUTH_MODE is {mode}: a cluster is joined with a token only, since whoever reaches its ports without one "
            "can run programs on its hosts; set RAY_AUTH_MODE=token here and where Ray is started"
        )
    if not os.environ.get("RAY_AUTH_TOKEN"):
        path = token_file()
        if not has_token(path):
            raise UsageError(
                f"there is no token for the cluster in {path}: copy it from the cluster's head, or make one with "
                "outrider token before the cluster is started"
            )
        if make_private(path):
            say(f"note: {path} could be read by others; it is yours alone now")
    os.environ["RAY_AUTH_MODE"] = "token"


def refuse_unauthenticated(address: str) -> None:
    """Refuse a cluster that answers without a token."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")}
    without |= {"RAY_AUTH_MODE": "disabled", "RAY_LOG_TO_STDERR": "0"}
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", PROBE, address],
            env=without,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        raise JobError(f"the cluster at {address} does not answer") from None
    if answer == OPEN:
        raise JobError(
            f"the cluster at {address} answers without a token, so whoever reaches its ports can run programs on its "
            "hosts: start Ray with RAY_AUTH_MODE=token on all of them (cluster.yaml does)"
        )
    if answer != WANTS_TOKEN:
        raise JobError(f"the cluster at {address} did not answer whether it needs a token")
