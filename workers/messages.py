"""Every value that crosses between the driver, the target and the draft.

Between target and draft only token ids travel (to a head the target's hidden states, too), and only those that are new
since the last round. The messages of every round are named tuples, which take the least code to pack and unpack: a pass
evicts everything else from the processor's caches, so this code always runs cold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.kernels.sampling_values import SamplingValues
from outrider.workers.counters import clock, counter, phases
from outrider.workers.machine.pinning import Launch
from outrider.workers.speculation import LayoutKind

# ``accepted_lengths`` counts longer ones as this one.
LONGEST_COUNTED = 16
# (token, log-probability) of the token that was written, then of the likeliest tokens at its position.
TokenLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampling(SamplingValues):
    """How a row's tokens are chosen. ``grammar`` constrains the answer, in llguidance's format ("": no constraint)."""

    grammar: str = ""

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

    With ``logprobs`` the result has the log-probability of each token of the answer, and of that many of the likeliest.
    ``echo``, the prompt's text (empty: decode the tokens), asks for the prompt in the result, with ``logprobs`` for those
    of its tokens, too. A row that is not ``assisted`` gets no candidates. ``resumed`` are tokens of the answer that an
    earlier target wrote, with their ``resumed_logprobs``: the row continues after them. ``shown`` are special tokens that
    are kept in its text, where texts usually leave them out. ``predicted`` are tokens that the user expects: lookup and
    suffixes find candidates in them, and they decide nothing.
    """

    key: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: str | None = None
    assisted: bool = True
    resumed: tuple[int, ...] = ()
    resumed_logprobs: tuple[TokenLogprobs, ...] = ()
    shown: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartialTokens:
    """What a target has written of an unfinished row: the tokens after the first ``start`` of its answer.

    ``proposed`` and ``accepted`` are this target's candidates for it so far, as in ``RowResult``.
    """

    key: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (natural logarithms) of a row's tokens by the model's logits, before temperature and penalties.

    One entry for each written token: in ``chosen`` its own, in ``likeliest`` (token, log-probability), best first.
    ``token_bytes`` has the bytes of each token named here, ``offsets`` the number of characters of the row's text before
    each written token.
    """

    chosen: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    token_bytes: dict[int, bytes]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Echo:
    """A row's prompt, for `echo`. The first log-probability has no meaning, since no token precedes it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """A finished row: its tokens and text, why it ended, and its rounds and seconds.

    The first ``prefill_rounds`` of ``rounds`` read the prompt, and the first token was chosen after ``prefill_seconds``.
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
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that no replica can do; ``message`` is for the user."""

    key: int
    message: str


class Advance(NamedTuple):
    """One row's part of a request to the draft: ``tokens`` follow the ``start`` tokens that the draft has seen.

    ``start == 0`` opens the row (or opens it anew) and carries its sampling; at most ``limit`` candidates are wanted.
    ``prompt_length`` of the row's tokens are its prompt. A head is also sent the ``states`` of tokens, in bf16, the last of
    them that of token ``states_end`` - 1.
    """

    key: int
    start: int
    tokens: tuple[int, ...]
    limit: int
    sampling: Sampling | None = None
    prompt_length: int = 0
    states: bytes = b""
    states_end: int = 0


class DraftRequest(NamedTuple):
    """The target's request of one round. ``closed`` names rows that the draft may forget.

    The draft may stop early. Call chance_i the chance that a row's next candidate is accepted, and reach_i the chance that
    it and all before it are. A candidate is not sent where chance_i < ``confidence`` or reach_i < ``least_reach``; the
    draft stops for all rows when sum(reach_i - least_reach) < ``least_sum``.

    A row's first runner-up is sent along where the chance that the target takes it exceeds ``runner_up_chances[0]``, its
    second where that exceeds ``runner_up_chances[1]``, and so on. ``rate`` is the expected number of tokens a second of all
    rows together, 0 where it is not known.
    """

    round: int
    rows: tuple[Advance, ...]
    closed: tuple[int, ...] = ()
    confidence: float = 0.0
    least_reach: float = 0.0
    least_sum: float = 0.0
    runner_up_chances: tuple[float, ...] = ()
    rate: float = 0.0


class DraftReply(NamedTuple):
    """The draft's reply: proposed tokens by row, and the rows it no longer knows (they are to be sent whole).

    ``seconds`` is how long the draft worked on it, ``overhead`` the part outside its model's passes. ``step`` is the cost
    of one more candidate for these rows, ``read`` that of prefilling one token (None where not known yet). ``runners_up``
    are, for some rows, (position, token): the draft's second choice in place of its candidate there. ``reaches`` are the
    chances that a row's candidates are accepted, each with all before it. A parallel draft says with ``one_pass[i]`` what a
    pass for i + 1 candidates of each of these rows takes. Of a new text the draft reads about the last ``window`` tokens
    (0: all). ``passes`` is how many the model has made since the last reply, ``skipped`` how many tokens it left unread,
    ``corrected_right`` how many candidates turned out right because of learned corrections, ``corrected_wrong`` wrong.
    """

    round: int
    tokens: dict[int, tuple[int, ...]]
    forgotten: tuple[int, ...] = ()
    seconds: float = 0.0
    step: float | None = None
    read: float | None = None
    overhead: float = 0.0
    runners_up: Mapping[int, tuple[tuple[int, int], ...]] = {}
    reaches: Mapping[int, tuple[float, ...]] = {}
    one_pass: tuple[float, ...] = ()
    window: int = 0
    passes: int = 0
    skipped: int = 0
    corrected_right: int = 0
    corrected_wrong: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What an actor loads: a local directory, and how to run it.

    ``threads`` of 0 leaves the count to the engine. ``cores`` are the CPUs that the native engine pins its threads to, one
    each; without them, or with another number of threads, it pins none. ``prefix_tokens`` bounds the prefix cache: how many
    tokens of ended rows' prompts are kept; with 0, rows share nothing. ``fast_attention`` of False computes attention as
    separate operations instead of a fused kernel (hf engine only); ``ipex`` lets the hf engine use Intel's extension where
    it is installed. ``small_cache`` stores keys and values in 8 bits where the engine can, for drafts: no text depends on
    their rounding. ``cache_precision`` is for targets: "int8" stores them so or is refused, "auto" is the engine's default.
    ``digest`` is what the files must have; "" checks nothing. A draft with a ``mask_token`` makes all its candidates in
    one pass (a parallel draft). ``states`` are the layers whose inputs a target's passes hand out; a head that reads them
    is given the directory of its ``target``.
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
    ipex: bool = True
    small_cache: bool = False
    cache_precision: str = "auto"
    digest: str = ""
    mask_token: int | None = None
    states: tuple[int, ...] = ()
    target: str = ""


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """How an actor's process was started, and the host-wide leases that it must hold before it uses its cores.

    ``shared`` leases may be held by several processes that all agreed to share.
    """

    launch: Launch
    leases: tuple[str, ...] = ()
    lease_seconds: float = 5.0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """One way for a target and its draft to share a replica: its ``kind`` says when each works, and on which cores.

    Without cores both stay where they are. ``plain``: the draft is not asked.
    """

    name: str
    kind: LayoutKind
    target_cores: tuple[int, ...] = ()
    draft_cores: tuple[int, ...] = ()
    plain: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How a replica works: how many rows at once, how many candidates it asks for (None: as many as pay).

    Candidates come from a draft ``model``, from texts (``lookup``: the row's own; ``suffix``: that, and the last
    ``answer_tokens`` tokens that rows wrote), from both or from neither. A draft sends no candidate whose chance is below
    ``draft_confidence``; where ``draft_learns``, its scores are corrected by what the target chose instead of earlier
    candidates. It scores ``draft_shortlist`` tokens of its vocabulary at most (0: all, None: as many as pay). Where there
    are several ``layouts``, they are tried on the job's own rows and the fastest is kept; ``memory_key`` is the key under
    which that choice is remembered. ``replica`` names the target in metrics; with ``trace``, target and draft keep a
    timeline. ``rows`` is about how many requests are expected, 0 where that is not known. Target and draft get the same.
    """

    batch: int
    draft_tokens: int | None
    model: bool = True
    lookup: bool = False
    suffix: bool = False
    answer_tokens: int = 0
    draft_deadline: float = 5.0
    draft_confidence: float = 0.0
    draft_learns: bool = True
    draft_shortlist: int | None = None
    runners_up: bool = True
    layouts: tuple[Layout, ...] = (Layout("shared", LayoutKind.SEQUENTIAL),)
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

    ``path`` is the numeric path that its results follow, ``pinned`` the pinning that was asked for and what the kernel
    reports, and ``differences`` one sentence for each difference between the two.
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
class TargetCounters:
    """What a target has counted since it started. A harvest carries a copy.

    ``rounds`` are passes of the target, ``row_rounds`` counts each row of each pass that gained it tokens. ``asked``
    candidates were asked for in ``asking_rows`` rounds of rows. Of ``seconds``, the time outside the phases is bookkeeping.
    ``accepted_lengths[n]`` counts the rounds in which n of a row's candidates were accepted. ``draft_passes`` leaves out
    the passes by which a draft measures its costs. ``draft_skipped`` tokens of rows' texts were not worth the draft's
    prefill. Of the verified ``runners_up``, ``runners_up_accepted`` were accepted, each one token more. ``corrected_right``
    of the draft's candidates were right because of learned corrections, ``corrected_wrong`` were wrong because of them.
    """

    seconds: float = clock("All the time of a target")
    rounds: int = counter("Passes of the target", metric=True)
    row_rounds: int = counter("Rows of passes of the target that gained tokens", metric=True)
    tokens: int = counter("Tokens committed", metric=True, over_time=True)
    asked: int = counter("Candidates asked for", metric=True, over_time=True)
    asking_rows: int = counter("Rounds of rows in which candidates could be asked for", metric=True, over_time=True)
    proposed: int = counter("Candidates that the draft proposed", metric=True, over_time=True)
    accepted: int = counter("Candidates that the target accepted", metric=True, over_time=True)
    found: int = counter("Candidates that lookup or suffixes found", metric=True, in_summary=True)
    found_accepted: int = counter("Of these, those that the target accepted", metric=True, in_summary=True)
    others_accepted: int = counter("Of the accepted, those found in other rows' answers", metric=True, in_summary=True)
    plain_rounds: int = counter("Passes without any candidate", in_summary=True)
    draft_passes: int = counter("Passes of the draft's model, those that read prompts too", metric=True, in_summary=True)
    draft_skipped: int = counter("Tokens of texts that the draft left unread", metric=True, in_summary=True)
    corrected_right: int = counter("Guesses that were right because the draft had learned", metric=True, in_summary=True)
    corrected_wrong: int = counter("Guesses that were wrong because of it", metric=True, in_summary=True)
    runners_up: int = counter("Runners-up of the draft that were verified", metric=True, in_summary=True)
    runners_up_accepted: int = counter("Runners-up that the target accepted", metric=True, in_summary=True)
    near_ties: int = counter("Choices whose score was within rounding of another token's")
    prompt_tokens: int = counter("Tokens of prompts")
    prompt_tokens_reused: int = counter("Tokens of prompts that were read for an earlier row")
    resumed_tokens: int = counter("Tokens that an earlier target had written")
    forced_tokens: int = counter("Tokens that a grammar left no choice about, and that took no pass", in_summary=True)
    verify_seconds: float = clock("passes of the target", phase=True)
    draft_seconds: float = clock("waiting for a draft that computes", phase=True)
    hop_seconds: float = clock("the rest of that waiting, the way there and back", phase=True)
    idle_seconds: float = clock("no rows", phase=True)
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (LONGEST_COUNTED + 1))


# Parts of a target's time; the rest is its own bookkeeping.
PHASES = phases(TargetCounters)
OTHER_PHASE = "other"


@dataclass(frozen=True, slots=True)
class Slice:
    """One phase of a process's work, from ``started`` to ``ended`` in nanoseconds of its clock."""

    name: str
    started: int
    ended: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The slices of a process's timeline since the last fetch; ``dropped`` more did not fit into it."""

    slices: tuple[Slice, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """Which layout a target uses (``took``), the tokens a second of each that was tried, and a sentence on why."""

    took: str
    rates: dict[str, float]
    sentence: str
    target_cores: tuple[int, ...] = ()
    draft_cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Harvest:
    """Rows that ended since the last harvest, the counters so far, and the timeline where one is kept.

    ``written`` is what unfinished rows have gained; some of them may have ended since. ``layout`` is the layout in use and
    what is known of the others, once there is a choice; ``costs`` are those by which the number of candidates is chosen,
    and how far the forecasts made from them were right.
    """

    ended: tuple[RowResult | RowFailure, ...]
    counters: TargetCounters
    trace: Trace = Trace()
    layout: LayoutRecord | None = None
    costs: dict[str, Any] = field(default_factory=dict)
    written: tuple[PartialTokens, ...] = ()
    # Sentences for the user, each printed once.
    notes: tuple[str, ...] = ()
