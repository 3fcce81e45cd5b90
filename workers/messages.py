"""Every value that crosses between the driver, the target and the draft.

Between target and draft only token ids travel, and only what is new since the last round. What passes between them in every
round is a named tuple: each pass drives everything else out of the processor's caches, and those are packed and unpacked by
the least code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.workers.machine.pinning import Launch
from outrider.workers.speculation import Overlap

# Accepted lengths are counted up to this one, which stands for all longer ones too.
LONGEST_COUNTED = 16
# (token, log-probability): of the token that was written, then of the likeliest in its place.
TokenLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen. Greedy when ``temperature`` is 0.

    ``seed`` and ``sample`` (which of the row's n answers this is) key the noise; the defaults of all others are neutral.
    ``end_tokens`` end the row (None: those of the model do), and cannot be chosen before ``min_tokens`` others are written.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on which tokens came before, beyond the logits themselves."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalised or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Row:
    """One answer to write: a prompt and how to continue it. ``key`` is unique within the job.

    With ``logprobs`` the answer tells the log-probability of each of its tokens, and of that many of the likeliest. A row
    that is not ``assisted`` has nothing proposed. ``begun`` are tokens of the answer that an earlier target wrote, and
    ``begun_logprobs`` what it said of each: the row goes on behind them.
    """

    key: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    assisted: bool = True
    begun: tuple[int, ...] = ()
    begun_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What a target has written of a row that is still under way: the tokens behind the first ``start`` of its answer."""

    key: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model itself thought of a row's tokens: natural logarithms, before temperature and the like.

    One entry a written token: its own, and (token, log-probability) of the likeliest, best first. ``pieces`` are the bytes
    that each token named here stands for, ``offsets`` the characters of the row's text before each written token.
    """

    chosen: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    pieces: dict[int, bytes]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """A finished row: its tokens and text, why it ended, and what it took.

    The first token comes out of the prompt's own rounds, ``prefill_rounds`` of ``rounds``, after ``prefill_seconds``.
    """

    key: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    rounds: int
    proposed: int
    accepted: int
    seconds: float
    logprobs: Logprobs | None = None
    prefill_seconds: float = 0.0
    prefill_rounds: int = 0


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that cannot be done, now or on any other replica; ``message`` is for the person who wrote it."""

    key: int
    message: str


class Advance(NamedTuple):
    """One row's part of a request to the draft: ``tokens`` follow the ``start`` tokens that the draft has seen.

    ``start == 0`` opens the row (or opens it anew) and carries its sampling; at most ``limit`` candidates are wanted.
    ``prompt_length`` says how many of the row's tokens were given rather than written.
    """

    key: int
    start: int
    tokens: tuple[int, ...]
    limit: int
    sampling: Sampling | None = None
    prompt_length: int = 0


class Ask(NamedTuple):
    """The target's request of one round. ``closed`` names rows that the draft may forget.

    The draft may stop early: a candidate is not sent where the chance that it holds is under ``confidence``, or the chance
    that it and all before it hold is under ``keep``. It stops for all rows where what the latter chances exceed ``keep`` by
    comes to less than ``a_step``.

    A runner-up is sent along where the chance that the target takes it exceeds the first of ``runner_up_chances``, a second
    one of the row where its chance exceeds the second, and so on.
    """

    round: int
    rows: tuple[Advance, ...]
    closed: tuple[int, ...] = ()
    confidence: float = 0.0
    keep: float = 0.0
    a_step: float = 0.0
    runner_up_chances: tuple[float, ...] = ()


class Candidates(NamedTuple):
    """The draft's reply: proposed tokens by row, and the rows it no longer knows (they are to be sent whole).

    ``seconds`` is how long the draft was at work on it, ``beside`` what of that was no pass of its model. ``step`` is what
    one more candidate for these rows costs, ``read`` a token of a text that it did not know (None where not known yet).
    ``runners_up`` are, for some rows, (place, token): what the draft would have said second instead of its candidate there.
    """

    round: int
    tokens: dict[int, tuple[int, ...]]
    forgotten: tuple[int, ...] = ()
    seconds: float = 0.0
    step: float | None = None
    read: float | None = None
    beside: float = 0.0
    runners_up: Mapping[int, tuple[tuple[int, int], ...]] = {}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What an actor loads: a local directory, and how to run it.

    ``threads`` of 0 leaves the count to the engine. ``cores`` are the CPUs that the native engine pins its threads to, one
    each; without them, or with another number of threads, it pins none. ``prefix_tokens`` bounds how much of ended rows'
    prompts is kept for rows that begin alike; with 0, rows share nothing. ``fast_attention`` of False spells attention out
    step by step, which only the hf engine can. With ``small_cache`` keys and values take 8 bits where the engine can, which
    is for drafts: no text depends on their rounding. ``digest`` is what the files must have; "" checks nothing.
    """

    path: str
    engine: str
    precision: str
    device: str = "cpu"
    threads: int = 0
    allow_pickle: bool = False
    cores: tuple[int, ...] = ()
    prefix_tokens: int = 0
    fast_attention: bool = True
    small_cache: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Seat:
    """An actor's place: how its process was started, and what it must hold host-wide before it uses its cores.

    ``shared`` leases are held together with others that agreed to share.
    """

    launch: Launch
    leases: tuple[str, ...] = ()
    lease_seconds: float = 5.0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way for a target and its draft to share a replica: how their work overlaps, and on which cores each does it.

    Without cores both stay where they are. ``plain`` is the rival: no draft at all.
    """

    name: str
    overlap: Overlap
    target_cores: tuple[int, ...] = ()
    draft_cores: tuple[int, ...] = ()
    plain: bool = False


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """How a target serves its rows: how many at once, how many candidates it asks for (None: as many as pay).

    Candidates come from a draft ``model``, from the row's own text by ``lookup``, from both, or from nowhere; a draft sends
    none that it holds less likely than ``draft_confidence``. Where there are several ``arrangements``, they are tried on
    the job's own rows and the fastest is kept; ``memory_key`` names what the choice may be remembered for. ``replica`` is
    what metrics name the target by; with ``trace``, target and draft keep a timeline. ``rows`` is about how many requests
    are to be expected, 0 where nobody knows. A draft is told the same.
    """

    batch: int
    draft_tokens: int | None
    model: bool = True
    lookup: bool = False
    draft_deadline: float = 5.0
    draft_confidence: float = 0.0
    runners_up: bool = True
    arrangements: tuple[Arrangement, ...] = (Arrangement("turns", Overlap.TURNS),)
    memory_key: str = ""
    trace: bool = False
    replica: int = 0
    rows: int = 0

    @property
    def rows_at_once(self) -> int:
        return min(self.batch, self.rows) if self.rows else self.batch


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What an actor says of itself once its model is loaded.

    ``path`` is the numeric path that its results follow, ``pinned`` what was asked of its pinning and what was got, and
    ``differences`` one sentence for each thing that was not.
    """

    pid: int
    host: str
    load_seconds: float
    engine: str
    notes: tuple[str, ...]
    path: dict[str, str]
    pinned: dict[str, Any]
    differences: tuple[str, ...]


@dataclass(slots=True)
class Progress:
    """Running totals of a target since it started. A harvest carries a copy.

    ``rounds`` are passes of the target, ``row_rounds`` counts each row of each pass that gained it tokens. ``asked``
    candidates were asked for in ``asking_rows`` turns of rows. Of ``seconds``, what the named phases leave was spent on
    bookkeeping. ``accepted_lengths[n]`` counts the turns in which n of a row's candidates held. Of the ``runners_up`` that
    were tried, ``runners_up_held`` brought a token more. ``resumed_tokens`` had been written by an earlier target.
    """

    seconds: float = 0.0
    rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    asked: int = 0
    asking_rows: int = 0
    proposed: int = 0
    accepted: int = 0
    runners_up: int = 0
    runners_up_held: int = 0
    near_ties: int = 0
    plain_rounds: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    resumed_tokens: int = 0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    hop_seconds: float = 0.0
    idle_seconds: float = 0.0
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (LONGEST_COUNTED + 1))


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that a process did from one moment to another, in nanoseconds of its own clock."""

    name: str
    started: int
    ended: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a process's timeline has gained since it was last fetched; ``dropped`` slices found no place in it."""

    slices: tuple[Slice, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """Which arrangement a target settled on, tokens a second of each that was tried, and the sentence that says why."""

    took: str
    rates: dict[str, float]
    sentence: str
    target_cores: tuple[int, ...] = ()
    draft_cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Harvest:
    """Rows that ended since the last harvest, the totals so far, and the timeline where one is kept.

    ``written`` is what rows under way have gained, some of which may have ended since.
    ``layout`` is the arrangement in use and what is known of the others, once that is settled; ``costs`` are the prices by
    which candidates are asked for, and how well they foretell what rounds take.
    """

    ended: tuple[RowResult | RowFailure, ...]
    progress: Progress
    trace: Trace = Trace()
    layout: LayoutRecord | None = None
    costs: dict[str, Any] = field(default_factory=dict)
    written: tuple[Written, ...] = ()
    # What the user should hear of, once.
    notes: tuple[str, ...] = ()
