"""Everything that outrider reports as a sentence rather than a traceback.

    OutriderError
    ├── UsageError            what was asked for cannot be: exit code 2
    │   ├── InputError        bad rows in the input file, each with file:line
    │   ├── ModelError        a model that is missing, malformed or unsupported
    │   │   └── PairError     a draft that does not fit its target
    │   └── PlacementError    a request that this machine cannot grant
    ├── JobError              the job cannot run as it stands: exit code 1
    │   ├── JobHeldError      another process runs it
    │   ├── CoresHeldError    other runs hold the cores, and did not release them in time
    │   ├── NoSpaceError      a disk is full, or too many files are open: a later try may succeed
    │   ├── JobChangedError   the same directory, another input, model or parameter
    │   │   └── OldAnswersError  its answers are of an older outrider, whose texts differ from this one's
    │   ├── JobDamagedError   its journal is damaged or gone
    │   ├── JobStoppedError   the process of a job that a Python program waits for was ended from outside: exit code 130
    │   ├── RayLostError      the Ray under the job has died; the command can be run again as it stands
    │   └── RayUnsupportedError  the Ray that is installed lacks what outrider needs of it
    └── WorkerError           an actor could not start or do its work
        └── LeaseError        another run has leased its cores meanwhile

All of them cross process borders: every argument is positional and kept by ``Exception``, so they pickle.
"""

from __future__ import annotations

import errno

# Error numbers of an ``OSError`` that may be gone at the next try: a full disk, a full quota, too many open files.
MOMENTARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})


class OutriderError(Exception):
    """A failure with one clear sentence; ``exit_code`` is what the command line returns for it.

    Where there is a list of what is wrong, ``args[1]`` holds its lines, which are shown above the sentence.
    """

    exit_code = 1

    @property
    def lines(self) -> list[str]:
        return list(self.args[1]) if len(self.args) > 1 else []

    def __str__(self) -> str:
        """The sentence; bytes of a path in it that are no UTF-8 as escapes, since Ray ends a process that raises others."""
        return encodable(str(self.args[0])) if self.args else self.__class__.__name__


class UsageError(OutriderError):
    exit_code = 2


class InputError(UsageError):
    """Bad rows, a line for each: ``file:line: what is wrong and what to do``."""


class ModelError(UsageError):
    pass


class PairError(ModelError):
    pass


class PlacementError(UsageError):
    pass


class JobError(OutriderError):
    pass


class JobHeldError(JobError):
    pass


class CoresHeldError(JobError):
    pass


class NoSpaceError(JobError):
    pass


class JobChangedError(JobError):
    pass


class OldAnswersError(JobChangedError):
    pass


class JobDamagedError(JobError):
    pass


class JobStoppedError(JobError):
    exit_code = 130


class RayLostError(JobError):
    pass


class RayUnsupportedError(JobError):
    pass


class WorkerError(OutriderError):
    pass


class LeaseError(WorkerError):
    pass


def encodable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot hold: halves of surrogate pairs, as which Python keeps other bytes."""
    return text.encode(errors="backslashreplace").decode()


def first_line(error: BaseException) -> str:
    """The first line of a foreign exception's message, for a sentence of ours; its class where it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), error.__class__.__name__)


def unwritable(error: OSError, sentence: str, kind: type[OutriderError] = JobError) -> OutriderError:
    """NoSpaceError where a later try may succeed, else ``kind``."""
    return NoSpaceError(sentence) if error.errno in MOMENTARY else kind(sentence)
