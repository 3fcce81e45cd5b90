"""Everything that outrider reports as a sentence rather than a traceback.

    OutriderError
    ├── UsageError            what was asked for cannot be: exit code 2
    │   ├── InputError        bad rows in the input file, each with file:line
    │   ├── ModelError        a model that is missing, malformed or unsupported
    │   │   └── PairError     a draft that does not fit its target
    │   └── PlacementError    a request that this machine cannot grant
    ├── JobError              the job cannot run as it stands: exit code 1
    │   ├── JobHeldError      another process runs it
    │   ├── CoresHeldError    other runs hold the cores, and no longer was to be waited
    │   ├── NoSpaceError      a disk is full, or no more files can be opened, which may be over in a moment
    │   ├── JobChangedError   the same directory, another input, model or parameter
    │   │   └── OldAnswersError  answers by an older outrider, which those of this one would be unlike
    │   ├── JobDamagedError   its journal is damaged or gone
    │   ├── JobStoppedError   somebody else has ended the process of a job that a program waits for: exit code 130
    │   ├── RayLostError      the Ray under the job has died; the command can be run again as it stands
    │   └── RayUnsupportedError  the Ray that is installed lacks what outrider needs of it
    └── WorkerError           an actor could not start or do its work
        └── LeaseError        the cores it was to have are another run's by now

All of them cross process borders: every argument is positional and kept by ``Exception``, so they pickle.
"""

from __future__ import annotations

import errno

# Of ``OSError``: what may be had again in a moment.
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
        return str(self.args[0]) if self.args else self.__class__.__name__


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


def first_line(error: BaseException) -> str:
    """What a foreign exception says, short enough for a sentence of ours; its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), error.__class__.__name__)


def unwritable(error: OSError, sentence: str, kind: type[OutriderError] = JobError) -> OutriderError:
    """``kind`` where the same try would fail again."""
    return NoSpaceError(sentence) if error.errno in MOMENTARY else kind(sentence)


class LeaseError(WorkerError):
    pass
