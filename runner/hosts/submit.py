"""Jobs on a cluster through Ray's job server: submit, list, follow and stop.

What is submitted is a command line of ``outrider run``. A job is its directory, so submitting it again resumes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider.runner.hosts.auth import require_token
from outrider.runner.job.directory import default_directory
from outrider.runner.job.piped_input import input_name, is_piped
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import flag_of
from outrider.workers.errors import JobError, JobHeldError, UsageError, first_line
from outrider.workers.models.draft_names import MTP, WITH_TEXTS
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.hub_gguf import of_hub
from outrider.workers.models.model_info import POCKETS
from outrider.workers.models.mtp import model_of

Result = TypeVar("Result")
Client = TypeVar("Client")

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
POLL_SECONDS = 0.5
# Ray kills a job that has not ended this long after it was asked to stop.
DRAIN_SECONDS = 600
# The job server's error while no agent has come up to start a driver, and how long that is waited for.
NO_AGENT = "No available agent"
AGENT_SECONDS = 30.0
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
# Part of the driver's message once it has accepted the input, by which a submission recognises that.
ACCEPTED = "accepted; results will be"
DIRECTORY = "outrider_directory"


@dataclass(frozen=True, slots=True)
class Submitted:
    """One submission of a job; ``attempt`` counts the submissions of the same directory."""

    id: str
    directory: str
    attempt: int
    state: str
    message: str
    started: float | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def is_at(self, directory: Path) -> bool:
        """Whether this is the job of a directory (compared without symlinks and ..)."""
        return os.path.realpath(self.directory) == os.path.realpath(directory)


def job_id(directory: Path) -> str:
    """A readable id that is the same for the same directory."""
    directory = Path(os.path.realpath(directory))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.name).strip("-") or "job"
    return f"outrider-{name[:40]}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]}"


def absolute(spec: JobSpec) -> JobSpec:
    """The same job with absolute paths, since the driver's host has another working directory."""
    if is_piped(spec.input):
        raise UsageError(
            f"{input_name(spec.input)} cannot be sent, since the driver's host reads the input itself: "
            "write it to a file that it sees"
        )
    directory = Path.cwd() / (spec.out or default_directory(spec.input))
    models = {"model": absolute_model(spec.model), "draft": absolute_model(spec.draft)}
    trace = None if spec.trace is None else Path.cwd() / spec.trace
    return spec.model_copy(update={"input": Path.cwd() / spec.input, "out": directory, "trace": trace, **models})


def absolute_model(name: str) -> str:
    """A model's name with an absolute path, if it is a path that exists here."""
    model = name.removesuffix(next(filter(name.endswith, WITH_TEXTS), ""))
    try:
        path = Path(model).expanduser()
        is_here = path.is_dir() or path.is_symlink() or (is_gguf(path) and of_hub(model) is None)
        is_here = is_here or model_of(path) is not None
    except (OSError, RuntimeError):  # a name too long, or an unknown home: opening the model will report it
        return name
    if model in (*POCKETS, MTP) or not is_here:
        return name
    return f"{path.absolute()}{name[len(model) :]}"


def command_line(spec: JobSpec) -> list[str]:
    """The options of ``outrider run`` that make this specification."""
    words = ["outrider", "run", str(spec.input)]
    for name, value in spec.model_dump(mode="json", exclude={"input"}, exclude_defaults=True).items():
        option = flag_of(JobSpec, name)
        words.append(
            option if value is True else f"--no-{option.removeprefix('--')}" if value is False else f"{option}={value}"
        )
    return words


class JobServer:
    """Ray's job server at ``address``."""

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        url = address or DEFAULT_ADDRESS
        self.address = url if "://" in url else f"http://{url}"
        require_token(say)
        try:
            from ray.dashboard.modules.job.sdk import JobSubmissionClient
        except ImportError as error:
            raise UsageError(
                f"Ray's job server needs more than is installed here ({error}): pip install 'outrider[cluster]'"
            ) from None
        self._refuse_unauthenticated()
        self._client = self._try(lambda: self._of_ray(JobSubmissionClient))

    def _refuse_unauthenticated(self) -> None:
        import requests

        try:
            answer = requests.get(f"{self.address}/api/jobs/", timeout=20)
        except (requests.RequestException, ValueError):  # ValueError: the address is no host name
            raise JobError(
                f"no job server of Ray answers at {self.address}: run this on the cluster's head, or name it with --address"
            ) from None
        if answer.status_code not in (401, 403):
            raise JobError(
                f"the job server at {self.address} answers without a token, so whoever reaches it can run programs on the "
                "cluster: start Ray with RAY_AUTH_MODE=token (cluster.yaml does)"
            )

    def _of_ray(self, client: Callable[[str], Client]) -> Client:
        try:
            return client(self.address)
        except (ValueError, TypeError, KeyError):  # what Ray's client makes of another program's answer
            raise JobError(
                f"what answers at {self.address} is no job server of Ray; name that one with --address"
            ) from None

    def _try(self, call: Callable[[], Result]) -> Result:
        from ray.exceptions import RayError

        try:
            return call()
        except (RuntimeError, ConnectionError, OSError, RayError) as error:
            raise JobError(f"the job server at {self.address}: {first_line(error)}") from error

    def all(self) -> list[Submitted]:
        """All submitted jobs of outrider on this cluster, the oldest first."""
        found = []
        for job in self._try(self._client.list_jobs):
            directory = (job.metadata or {}).get(DIRECTORY)
            if directory is None or job.submission_id is None:
                continue
            attempt = int(job.submission_id.rpartition("-")[2])
            state = str(getattr(job.status, "value", job.status))
            started = job.start_time / 1000 if job.start_time else None
            found.append(Submitted(job.submission_id, directory, attempt, state, job.message or "", started))
        return sorted(found, key=lambda job: (job.started or 0.0, job.attempt))

    def find(self, job: str) -> Submitted:
        """A job by its directory (the latest submission) or its id."""
        directory = Path.cwd() / Path(job).expanduser()
        found = [each for each in self.all() if job in (each.id, each.id.rpartition("-")[0]) or each.is_at(directory)]
        if not found:
            raise UsageError(f"{self.address} knows no job {job}; outrider list shows those it does")
        return found[-1]

    def submit(self, spec: JobSpec) -> Submitted:
        assert spec.out is not None
        base = job_id(spec.out)
        earlier = [job for job in self.all() if job.is_at(spec.out)]
        if earlier and not earlier[-1].ended:
            raise JobHeldError(f"{spec.out} is being run as {earlier[-1].id}; outrider logs -f {earlier[-1].id} follows it")
        attempt = earlier[-1].attempt + 1 if earlier else 1
        # This installation's programs first in PATH; hosts of a cluster usually have the same paths.
        path = shlex.quote(str(Path(sys.executable).parent))
        entrypoint = f"PATH={path}:$PATH exec {shlex.join(command_line(spec))}"
        identifier = f"{base}-{attempt}"

        def send() -> None:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=identifier,
                runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(DRAIN_SECONDS)}},
                metadata={DIRECTORY: str(spec.out)},
            )

        self._try(lambda: once_there_is_an_agent(send))
        return self.find(identifier)

    def logs(self, job: Submitted) -> str:
        text: str = self._try(lambda: self._client.get_job_logs(job.id))
        return text

    def follow(self, job: Submitted) -> Iterator[str]:
        """New parts of the log, until the job has ended."""
        shown = 0
        while True:
            # Asked before the log is read: if the job has ended, the log is complete.
            ended = self.find(job.id).ended
            text = self.logs(job)
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def wait_until_accepted(self, job: Submitted) -> Submitted:
        """Wait until the driver has accepted its input, or has ended."""
        while True:
            now = self.find(job.id)
            if now.ended or ACCEPTED in self.logs(now):
                return now
            time.sleep(POLL_SECONDS)

    def stop(self, job: Submitted) -> None:
        """Send SIGTERM to the driver: rows in progress may end, and the job can be submitted again."""
        self._try(lambda: self._client.stop_job(job.id))


def once_there_is_an_agent(send: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> None:
    """Call ``send``; while the head's agent, which starts drivers, has not come up, try again."""
    for _ in range(round(AGENT_SECONDS / POLL_SECONDS)):
        try:
            return send()
        except RuntimeError as error:
            if NO_AGENT not in str(error):
                raise
        wait(POLL_SECONDS)
    return send()


def complaint(logs: str) -> str:
    """The driver's error, from its log."""
    said = [line.removeprefix("outrider: ") for line in logs.splitlines() if line.startswith("outrider: ")]
    lines = [line for line in logs.splitlines() if line.strip()]
    return said[-1] if said else lines[-1] if lines else "nothing was said"


def as_json(job: Submitted) -> str:
    return json.dumps({"id": job.id, "job": job.directory, "state": job.state.lower(), "attempt": job.attempt})
