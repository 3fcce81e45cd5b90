"""``outrider serve``: locks the data directory, checks the models, and runs the server until it is told to stop."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.model_choice import may_be_native
from outrider.runner.options.job import JobSpec
from outrider.runner.options.serve import ServeSpec
from outrider.runner.printable import printable
from outrider.runner.process_exit import end_signals
from outrider.runner.report.display import console
from outrider.runner.serve.auth import keys_of, page_token
from outrider.runner.serve.connections import OPEN_FILES_EACH, raise_open_files
from outrider.runner.serve.model_hosts import ModelHosts
from outrider.runner.serve.names import Folders
from outrider.runner.serve.own_files import OwnFiles
from outrider.runner.serve.service import Service
from outrider.runner.serve.store import Store
from outrider.runner.serve.uploads import sweep
from outrider.workers.errors import JobHeldError, OutriderError, UsageError

LOCK = "serve.lock"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
LOOPBACK = ("127.", "::1", "localhost")
# How long open requests may take when the server stops.
GRACE_SECONDS = 10
STOPPING = "finishing the rows under way; Ctrl-C again stops at once (either way the next start goes on)"
# The options of the server that are options of a batch's job too.
OF_JOBS = sorted((ServeSpec.model_fields.keys() & JobSpec.model_fields.keys()) - {"model"})


def named_models(given: list[str]) -> dict[str, str]:
    """Models by name, from ``-m name=path`` or a path or hub id alone, whose name is its last part."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals:
            name, path = Path(each).name or each, each
        if not MODEL_NAME.fullmatch(name) or not path:
            raise UsageError(f'-m: "{each}" is not NAME=MODEL with a name of letters, digits and . _ : / -')
        if name in found:
            raise UsageError(f'-m: two models are called "{name}"; name one otherwise: -m NAME=MODEL')
        found[name] = path
    return found


def serve(spec: ServeSpec) -> None:
    """Run the server until it is told to stop; the next one on the same data directory continues unfinished batches."""
    try:
        import uvicorn

        from outrider.runner.serve.app import application
        from outrider.runner.serve.http_server import HttpServer
    except ModuleNotFoundError as error:
        raise UsageError(f"outrider serve needs {error.name}: pip install 'outrider[serve]'") from None
    with _private(), _data_lock(spec.data):
        key_file, keys = keys_of(spec.api_key_file, spec.data)
        folders = Folders(spec.data.resolve())
        folders.make()
        specs = _job_specs(spec)
        _check_models(specs)
        listening = _listen(spec.host, spec.port)
        store = Store(folders.data)
        sweep(store, folders)
        changed = OwnFiles().changed
        service = Service(
            store, folders, list(specs), lambda on_event: ModelHosts(specs, on_event, _say, spec.turn, changed=changed)
        )
        names = (*spec.hostname, spec.host)
        app = application(service, store, folders, keys, names, spec.most_upload << 20)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        with _draining() as told_to_stop:
            _start(service)
            _print_addresses(spec, list(specs), listening, key_file, keys)
            stopped_before = lambda: told_to_stop.count > 0  # noqa: E731
            most = raise_open_files() // OPEN_FILES_EACH
            server = HttpServer(config, told_to_stop.begin, service.refuse_requests, stopped_before, most)
            server.run(sockets=[listening])
            told_to_stop.count += server.stopped_twice
            _close(service, told_to_stop)


def _job_specs(spec: ServeSpec) -> dict[str, JobSpec]:
    """The options of each model's batches, without input and directory."""
    shared = {name: getattr(spec, name) for name in OF_JOBS if name in spec.model_fields_set}
    models = spec.models or named_models([spec.model])
    named_models([f"{name}={path}" for name, path in models.items()])
    # skip_bad: a wrong row fails alone, as at OpenAI. (`admission_child` refuses lines that are not rows of the batch.)
    return {name: JobSpec(input=Path("-"), model=path, skip_bad=True, **shared) for name, path in models.items()}


def _check_models(specs: Mapping[str, JobSpec]) -> None:
    """Refuse models that cannot be used before the server starts."""
    with TokenizerProcess() as tokenizer_process:
        for spec in specs.values():
            for note in tokenizer_process.prepare_pair(spec.model, spec.draft, _say, may_be_native(spec))[3]:
                _say(f"note: {note}")


@contextmanager
def _private() -> Iterator[None]:
    """Files that are made meanwhile are for this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _data_lock(data: Path) -> Iterator[None]:
    """Lock the data directory (flock): one server at a time."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileExistsError:
        raise UsageError(f"--data: {data} is not a directory, or is a broken link; name another") from None
    except OSError as error:
        raise UsageError(f"--data: {data} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobHeldError(
                f"--data: {data} is served by another outrider serve; stop it, or name another directory"
            ) from None
        yield
    finally:
        os.close(handle)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        # Listen before the address is printed: clients may connect at once, and are answered in a moment.
        listening.listen(128)
        return listening
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f'--host: "{host}" is no address of this machine ({why}); give another --host') from None
        raise UsageError(f"--port: cannot listen at {host}:{port}: {why}; give another --port") from None


def _start(service: Service) -> None:
    """Start the service before its address is printed; an error (a full disk, say) ends the command."""
    try:
        service.start()
    except OutriderError:
        service.close(at_once=True)
        raise


def _print_addresses(spec: ServeSpec, models: list[str], listening: socket.socket, key_file: Path, keys: list[str]) -> None:
    port = listening.getsockname()[1]
    host = "127.0.0.1" if spec.host in ("0.0.0.0", "::") else spec.host
    at = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"serving {', '.join(models)} at {at}/v1", flush=True)
    print(f"key:  {printable(key_file)}", flush=True)
    print(f"page: {at}/#{page_token(keys)}", flush=True)
    if not spec.host.startswith(LOOPBACK):
        _say(f"note: {spec.host} is reached from other machines, and keys travel as they are: put TLS in front of it")


@dataclass
class _StopRequests:
    """How often the server was told to stop."""

    count: int = 0
    # The HTTP server has received the first signal; it is counted when that server has ended.
    stopping: bool = False

    def begin(self) -> None:
        self.stopping = True
        _say(STOPPING)


@contextmanager
def _draining() -> Iterator[_StopRequests]:
    """Count signals. The HTTP server handles the first one, and raises it again here when it has ended."""
    requests = _StopRequests()

    def handle(number: int, frame: FrameType | None) -> None:
        requests.count += 1

    def hung_up(number: int, frame: FrameType | None) -> None:
        """SIGHUP acts as a first SIGTERM, never as a second: the kernel and the shell may both send it."""
        if not (requests.stopping or requests.count):
            requests.stopping = True
            signal.raise_signal(signal.SIGTERM)

    signals = (signal.SIGINT, *end_signals())
    before = {number: signal.signal(number, hung_up if number == signal.SIGHUP else handle) for number in signals}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close(service: Service, told: _StopRequests) -> None:
    """Close the service; after a second signal without waiting for rows in progress. Their tokens are saved either way."""
    hurried = told.count > 1
    closing = threading.Thread(target=service.close, args=(hurried,), name="close")
    closing.start()
    while closing.is_alive():
        closing.join(timeout=0.2)
        if told.count > 1 and not hurried:
            hurried = True
            service.runner.close(at_once=True)


def _say(text: str) -> None:
    console().print(printable(text), markup=False, highlight=False, soft_wrap=True)


logging.getLogger("outrider.serve").addHandler(logging.StreamHandler())
