"""The token of a cluster: private, never printed, and asked for."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from second_user import as_guest, only_root

from outrider.runner.hosts import auth, port_check
from outrider.runner.hosts.ray_start import joined_ray, own_cluster
from outrider.workers.errors import JobError, UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        # Set first, so that what the code itself sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_and_for_its_owner_alone(home: Path) -> None:
    path, new = auth.make_token()
    assert (path, new) == (home / ".ray/auth_token", True)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    token = path.read_text()
    assert len(token) == 64
    assert auth.make_token() == (path, False)
    assert path.read_text() == token
    assert auth.make_token()[0].read_text() == token


def test_a_token_that_ray_wrote_for_all_to_read_is_taken_away_from_them(home: Path) -> None:
    path, _ = auth.make_token()
    path.chmod(0o644)
    said: list[str] = []
    auth.require_token(said.append)
    assert mode(path) == 0o600
    assert said == [f"note: {path} could be read by others; it is yours alone now"]


def test_without_a_token_no_cluster_is_joined() -> None:
    with pytest.raises(UsageError, match=r"there is no token for the cluster in .*auth_token: .*outrider token"):
        auth.require_token(lambda _: None)


def test_without_a_home_the_token_is_where_a_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for attempt in (lambda: auth.require_token(lambda _: None), auth.make_token):
        with pytest.raises(
            UsageError, match=r"^there is no home directory to look for .* set HOME, or RAY_AUTH_TOKEN_PATH"
        ):
            attempt()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert auth.make_token() == (tmp_path / "token", True)


@only_root
@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_a_token_that_cannot_be_read_is_a_sentence(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the other user can get, unlike a folder of pytest's.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        home = Path(name)
        monkeypatch.setenv("HOME", name)
        path, _ = auth.make_token()
        for folder, bits in ((home, 0o755), (path.parent, 0o755 if hidden == "file" else 0o700)):
            folder.chmod(bits)
        for attempt in (lambda: auth.require_token(lambda _: None), auth.make_token):
            said = as_guest(attempt)
            assert said.startswith(f"UsageError: the cluster's token in {path} cannot be read (Permission denied)"), said


def test_an_empty_token_is_none(home: Path) -> None:
    path, _ = auth.make_token()
    path.write_text("\n")
    with pytest.raises(UsageError, match="there is no token for the cluster in"):
        auth.require_token(lambda _: None)


@pytest.mark.parametrize("left", ["", "\n"])
def test_a_token_of_which_a_kill_left_an_empty_file_is_made_again(left: str, home: Path) -> None:
    path, _ = auth.make_token()
    path.write_text(left)
    path.chmod(0o644)
    assert auth.make_token() == (path, True)
    assert len(path.read_text()) == 64 and mode(path) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_token_that_another_process_makes_meanwhile_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: Path, path: Path) -> None:
        path.write_text("theirs")
        link(source, path)

    monkeypatch.setattr(auth.os, "link", late)
    path, new = auth.make_token()
    assert (path.read_text(), new) == ("theirs", False)
    assert list(path.parent.iterdir()) == [path]


def test_a_token_is_made_where_there_are_no_hard_links(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(auth.os, "link", refused)
    path, new = auth.make_token()
    assert (len(path.read_text()), new, mode(path)) == (64, True, 0o600)
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_token_is_a_sentence(home: Path) -> None:
    (home / ".ray/auth_token").mkdir(parents=True)
    with pytest.raises(UsageError, match="auth_token cannot be written: Is a directory"):
        auth.make_token()


def test_a_home_without_room_for_a_token_is_a_sentence(home: Path) -> None:
    (home / ".ray").write_text("a file")
    with pytest.raises(UsageError, match=r"auth_token cannot be written: File exists"):
        auth.make_token()


def test_authentication_that_is_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    auth.make_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UsageError, match="RAY_AUTH_MODE is disabled: a cluster is joined with a token only"):
        auth.require_token(lambda _: None)


def test_a_cluster_is_not_joined_from_outside() -> None:
    with pytest.raises(UsageError, match=r"--address: ray:// is not joined from outside"), joined_ray("ray://a:1"):
        pass


@pytest.mark.parametrize(
    "address",
    ["local", "host", "host:", ":6379", "host:x", "host:0", "host:70000", "10.0.0..1:6379", ".:6379", f"{'x' * 64}:6379"],
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UsageError, match=f'--address: "{address}" is not HOST:PORT'), joined_ray(address):
        pass


@pytest.mark.parametrize("listens", [True, False])
def test_a_cluster_whose_head_does_not_answer_is_said_to_be_so(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_check, "ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        unanswered = pytest.raises(JobError, match=f"no answer from {address} for 0.1 s; is the cluster up")
        with unanswered, joined_ray(address, patience=0.1):
            pass


def raylet(address: str, folder: str = "/tmp/outrider-7/ray") -> list[str]:
    return ["/x/raylet", "--raylet_socket_name=s", f"--gcs-address={address}", f"--session_dir={folder}/session_1"]


def test_auto_is_the_cluster_that_this_user_or_root_has_started_and_nobody_elses_word() -> None:
    mine, guest = os.getuid(), os.getuid() + 1
    embedded = raylet("127.0.0.1:9", "/tmp/outrider-7/a_b3c4d5")
    forged = [(guest, raylet("10.0.0.66:6379")), (mine, ["/x/sleep", "--gcs-address=10.0.0.67:1"]), (mine, [])]
    assert own_cluster([*forged, (mine, raylet("10.0.0.1:6379")), (mine, embedded)]) == "10.0.0.1:6379"
    assert own_cluster([(0, raylet("10.0.0.1:6379")), (mine, raylet("10.0.0.1:6379", "/tmp/ray"))]) == "10.0.0.1:6379"
    with pytest.raises(JobError, match="--address auto: no Ray of yours runs on this host; give the address"):
        own_cluster([*forged, (mine, embedded)])
    with pytest.raises(JobError, match=r"several run on this host, at 10.0.0.1:6379, 10.0.0.2:6379; give the address"):
        own_cluster([(mine, raylet("10.0.0.1:6379")), (mine, raylet("10.0.0.2:6379"))])
