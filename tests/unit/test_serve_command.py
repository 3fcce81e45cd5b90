"""What ``outrider serve`` refuses before it serves anything, and what it says once it does."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path
from typing import Any

import pytest

from outrider.runner.options import ServeSpec
from outrider.runner.serve import serve as module
from outrider.runner.serve.serve import serve
from outrider.runner.serve.store import STORE, Store
from outrider.workers.errors import JobError, JobHeldError, ModelError, UsageError


def test_one_server_at_a_time_has_the_data(tmp_path: Path) -> None:
    with module._held(tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
        with pytest.raises(JobHeldError, match="is served by another outrider serve"), module._held(tmp_path / "data"):
            pass
    with module._held(tmp_path / "data"):
        pass


def test_data_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--data: .* cannot be written"), module._held(tmp_path / "file" / "data"):
        pass


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot be listened at"):
            module._listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match="cannot be listened at"):
        module._listen("192.0.2.1", 0)


def test_without_the_extra_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"needs uvicorn: pip install 'outrider\[serve\]'"):
        serve(ServeSpec(data=tmp_path / "data"))
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_model_that_is_not_there_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        serve(ServeSpec(data=tmp_path / "data", models={"big": str(tmp_path / "nothing")}))
    assert not (tmp_path / "data" / STORE).exists()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store._db.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(JobError, match="has format 9, this outrider reads 1"):
        Store(tmp_path)
    (tmp_path / STORE).write_bytes(b"no database" * 1000)
    with pytest.raises(JobError, match="cannot be used"):
        Store(tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_it_says_where_it_is_and_warns_where_others_listen(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        module._tell(ServeSpec(host=host), ["a", "b"], listening, Path("data/api-key"), ["sk-secret"])
        port = listening.getsockname()[1]
    said, warned = capfd.readouterr()
    assert said.splitlines()[:2] == [f"serving a, b at http://127.0.0.1:{port}/v1", "key:  data/api-key"]
    assert f"page: http://127.0.0.1:{port}/#" in said
    assert "sk-secret" not in said
    assert ("put TLS in front of it" in warned) == (host != "127.0.0.1")
