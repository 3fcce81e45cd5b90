"""``outrider bench`` before any model loads: prompts, options old and new, and every refusal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from built_once import CliRunner
from fakes import END, FakeEngine, Nonsense, hashed
from mtp import with_mtp
from test_verifier import finish, verifier

from outrider.runner import continued
from outrider.runner import run_job as running
from outrider.runner.bench import bench as bench_module
from outrider.runner.bench.plot import check_plot, plot
from outrider.runner.bench.table import Measured, comparison, table
from outrider.runner.bench.tasks import CODE, LENGTHS, SHORT, TOKENS, examples, sizes
from outrider.runner.cli.main import app
from outrider.runner.options.bench import BenchSpec
from outrider.runner.options.job import JobSpec
from outrider.runner.planning.replica_memory import ProcessMemory, ReplicaMemory
from outrider.runner.quality import quantize as quantize_module
from outrider.runner.writable import check_file
from outrider.workers.errors import JobError, LeaseError, UsageError
from outrider.workers.messages import ModelSpec, Row, RowResult, Sampling
from outrider.workers.models.hub_names import hub_id
from outrider.workers.models.model_info import ModelInfo, find
from outrider.workers.models.model_memory import ModelMemory
from outrider.workers.models.preparation import choose_draft

MODEL_INFO = ModelInfo("facebook/opt-6.7b", "/models/opt", "opt", 2048, 50272, "float16", (2,), 1, "digest")
MEMORY = ReplicaMemory(ProcessMemory(ModelMemory(1), "native", True), None)


class LetterTokenizer:
    """A token a letter, and one at the start of a text."""

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        assert path == MODEL_INFO.path
        return [(0, *(ord(letter) % 500 for letter in one)) for one in prompts]


TOKENIZER: Any = LetterTokenizer()


def options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> BenchSpec:
    """What the command line asks of the benchmark."""
    asked: list[BenchSpec] = []
    monkeypatch.setattr(bench_module, "bench", asked.append)
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert asked, result.output
    return asked[0]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--algorithm", "awq"], {"bits": 4, "method": "awq", "out": Path("opt-1.3b-awq-int4")}),
        (["--algorithm", "awq", "--precision", "w4a8", "-o", "x"], {"bits": 4, "method": "awq", "out": Path("x")}),
        (["--precision", "w4abf16"], {"bits": 4, "method": "auto"}),
        (["--algorithm", "smoothquant"], {"bits": 8, "method": "smoothquant"}),
        (["--precision", "w8a8", "--calibration", "t"], {"bits": 8, "method": "auto", "calibration": Path("t")}),
    ],
)
def test_the_older_tools_quantise_by_our_own_command(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: dict[str, Any]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(quantize_module, "quantize", made.append)
    result = CliRunner().invoke(app, ["bench", "--model_name", "facebook/opt-1.3b", "--task", "quantize", *arguments])
    assert result.exit_code == 0, result.exception
    found = made[0].model_dump()
    assert found["model"] == "facebook/opt-1.3b"
    assert {name: found[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--task", "quantize", "--algorithm", "magic"], r"--algorithm: must be "),
        (["--task", "quantize", "--precision", "bf16"], r'--precision: --task quantize makes w4abf16, .*, got "bf16"'),
        (["--task", "quantize", "--new-tokens", "5"], r"--new-tokens is for measuring, and --task quantize makes"),
        (
            ["--task", "quantize", "--algorithm", "awq", "--precision", "w8af32"],
            r"^--algorithm: awq is not for 8 bits; choose one of auto, rtn, gptq, smoothquant$",
        ),
        (["--task", "decode", "--algorithm", "awq"], r"--algorithm is for --task quantize"),
    ],
)
def test_what_the_tasks_do_not_share_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_the_classic_sizes() -> None:
    assert sizes((), ()) == [(length, count) for length in (256, 512) for count in TOKENS] + [(1024, 60), (1968, 60)]
    assert sizes((256, 1968), (7,)) == [(256, 7), (1968, 7)]
    assert sizes((1000,), ()) == [(1000, count) for count in TOKENS]


def test_prompts_of_given_lengths_are_exactly_as_long() -> None:
    made = examples("benchmark", (), (), MODEL_INFO, TOKENIZER)
    assert sorted({len(one.prompt) for one in made}) == sorted(LENGTHS)
    wide = ModelInfo(**{name: getattr(MODEL_INFO, name) for name in MODEL_INFO.__slots__} | {"context": 40_000})
    [long] = examples("benchmark", (30_000,), (5,), wide, TOKENIZER)
    assert len(long.prompt) == 30_000, "the bundled text is repeated where it is too short"


def test_the_short_tasks() -> None:
    decode = examples("decode", (), (), MODEL_INFO, TOKENIZER)
    assert [one.new_tokens for one in decode] == [30] * len(SHORT) == [30] * 10
    code = examples("benchmark_code", (), (16, 32), MODEL_INFO, TOKENIZER)
    assert [one.new_tokens for one in code] == [16, 32] * len(CODE)
    assert all(prompt.startswith(("def ", "class ", "import ")) for prompt in CODE)


@pytest.mark.parametrize(
    ("task", "lengths", "new_tokens", "message"),
    [
        (
            "benchmark",
            (4096,),
            (),
            "a prompt of 4,096 tokens and 60 new ones do not fit into facebook/opt-6.7b, which holds 2,048; "
            "ask for prompts of at most 1,988",
        ),
        ("benchmark", (5,), (2048,), "which holds 2,048; ask for at most 2,043 new tokens"),
        ("decode", (), (2040,), "do not fit into facebook/opt-6.7b"),
        ("decode", (256,), (), "--lengths chooses the prompts of --task benchmark"),
    ],
)
def test_what_does_not_fit_is_refused(
    task: str, lengths: tuple[int, ...], new_tokens: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        examples(task, lengths, new_tokens, MODEL_INFO, TOKENIZER)


def test_old_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "--model_name opt-6.7b --task benchmark --assisted_generation --draft_precision w8a8 --do_sample --fast_attention"
    spec = options(monkeypatch, *old.split())
    assert (spec.model, spec.task, spec.draft, spec.draft_precision) == ("opt-6.7b", "benchmark", "auto", "w8a8")
    assert (spec.temperature, spec.fast_attention) == (1.0, True)
    assert options(monkeypatch, "-m", "facebook/opt-13b", "--no-assisted").draft == "none"
    spec = options(monkeypatch, "-m", "facebook/opt-13b", "--assistant-model", "facebook/opt-350m")
    assert spec.draft == "facebook/opt-350m"
    spec = options(monkeypatch, "--do_sample", "--temperature", "0.1", "--top_p", "0.95", "--no-fast-attention")
    assert (spec.temperature, spec.top_p, spec.fast_attention) == (0.1, 0.95, False)
    assert options(monkeypatch).temperature == 0.0


def test_run_takes_the_old_spellings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[JobSpec] = []
    monkeypatch.setattr(running, "run", lambda spec, as_json: asked.append(spec) or 0)
    for arguments in ("--no-assisted --do_sample", "--assisted_generation --assistant_model lookup --fast_attention"):
        assert (
            CliRunner().invoke(app, ["run", "prompts.txt", "--model_name", "opt-6.7b", *arguments.split()]).exit_code == 0
        )
    assert [(spec.model, spec.draft, spec.temperature) for spec in asked] == [
        ("opt-6.7b", "none", 1.0),
        ("opt-6.7b", "lookup", 0.0),
    ]


def test_numbers_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = options(monkeypatch, "--lengths", "256, 512", "--new-tokens", "64", "--draft-tokens", "6", "--repeat", "3")
    assert (spec.lengths, spec.new_tokens, spec.draft_tokens, spec.repeat) == ((256, 512), (64,), 6, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lengths 12x", "--lengths: .* got '12x'"),
        ("--new-tokens 0", "^--new-tokens: must be whole numbers from 1 on, got 0$"),
        ("--lengths 8,0", "^--lengths: must be whole numbers from 1 on, got 8, 0$"),
        ("--task spell", "--task: .* got 'spell'"),
        ("--precision int3", "--precision: .* got 'int3'"),
        ("--repeat 0", "--repeat: "),
        ("--no-assisted --draft lookup", "--no-assisted runs without a draft, --draft lookup with one: leave out one"),
    ],
)
def test_bad_options_get_one_sentence(monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(monkeypatch, *arguments.split())


def test_a_comparison_needs_something_to_compare() -> None:
    for spec in (BenchSpec(compare=True, draft="none"), BenchSpec(compare=True, draft_tokens=0)):
        with pytest.raises(UsageError, match="--compare measures plain and assisted"):
            bench_module.bench(spec)


@pytest.mark.slow
def test_a_usual_draft_that_cannot_run_is_lookup_instead(tmp_path: Path) -> None:
    """Not a comparison of plain generation with itself: only the native engine runs layers for multi-token prediction."""
    with_mtp("qwen3-5", tmp_path, vocab_size=4096)
    for file in find("pocket").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    said: list[str] = []
    setup = bench_module._prepare(BenchSpec(model=str(tmp_path), precision="fp16", new_tokens=(4,)), said.append)
    assert (setup.draft, setup.draft_model, setup.draft_name) == (None, None, "lookup")
    assert any("only the native engine runs multi-token prediction" in sentence for sentence in said)


def test_files_that_cannot_be_written_are_found_out_first(tmp_path: Path) -> None:
    for spec, message in (
        (BenchSpec(json_file=tmp_path / "no" / "a.json"), "--json: .*a.json cannot be written: No such file"),
        (BenchSpec(json_file=Path("/proc/a.json")), "--json: /proc/a.json cannot be written"),
        (BenchSpec(plot=tmp_path), "--plot: .* cannot be written: Is a directory"),
        (BenchSpec(json_file=Path("-")), "^--json: give the name of a file; - is not standard output"),
    ):
        with pytest.raises(UsageError, match=message):
            bench_module.bench(spec)


def test_a_file_called_minus_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", "./-"):
        with pytest.raises(UsageError, match=r"^--trace: give the name of a file; .*is named by its whole path"):
            check_file("--trace", Path(name))
    check_file("--trace", tmp_path / "-")


def test_figures_and_chart_are_two_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "link").symlink_to(tmp_path)
    spec = BenchSpec(json_file=tmp_path / "link" / "a.svg", plot=tmp_path / "a.svg")
    with pytest.raises(UsageError, match=r"^--json and --plot both name .*/a\.svg: give each a file of its own$"):
        bench_module.bench(spec)


def test_tables_are_out_before_files_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds what is printed back until it is flushed."""
    out = mock.Mock()
    monkeypatch.setattr(sys, "stdout", out)
    bench_module._print(mock.Mock(), {}, [])
    assert out.flush.called


def test_a_file_that_may_not_be_looked_at_is_found_out_first() -> None:
    with pytest.raises(UsageError, match=r"--json: x+ cannot be written: File name too long"):
        bench_module.bench(BenchSpec(json_file=Path("x" * 300)))


def test_looking_whether_a_file_can_be_written_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Any:
        raise UsageError("far enough")

    monkeypatch.setattr(bench_module, "_prepare", stop)
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for file in (kept, tmp_path / "new.json"):
        with pytest.raises(UsageError, match="far enough"):
            bench_module.bench(BenchSpec(json_file=file))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("kept.json", "{}")]


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("opt-6.7b", "facebook/opt-6.7b"),
        ("OPT-125M", "facebook/opt-125m"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("llama-2-7b-chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("codellama-7b", "codellama/CodeLlama-7b-hf"),
        ("CodeLlama-7b-hf", "codellama/CodeLlama-7b-hf"),
        ("code-llama-2-7b", "codellama/CodeLlama-7b-hf"),
        ("codellama-7b-instruct", "codellama/CodeLlama-7b-Instruct-hf"),
        ("Qwen1.5-7B-Chat", "Qwen/Qwen1.5-7B-Chat"),
        ("qwen1.5-0.5b-chat", "Qwen/Qwen1.5-0.5B-Chat"),
        ("starcoder", "bigcode/starcoder"),
        ("gpt_bigcode", "bigcode/starcoder"),
        ("starcoderbase-7b", "bigcode/starcoderbase-7b"),
        ("tiny_starcoder_py", "bigcode/tiny_starcoder_py"),
        ("llama-160m", "JackFram/llama-160m"),
        ("AMD-Llama-135m-code", "amd/AMD-Llama-135m-code"),
        ("qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen3-8B-base", "Qwen/Qwen3-8B-Base"),
        ("gemma-3-270m-it", "google/gemma-3-270m-it"),
        ("Gemma-2-9B", "google/gemma-2-9b"),
        ("pythia-1.4b-deduped", "EleutherAI/pythia-1.4b-deduped"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("SmolLM2-1.7B-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        ("smollm3", "HuggingFaceTB/SmolLM3-3B"),
        ("smollm3-3b-base", "HuggingFaceTB/SmolLM3-3B-Base"),
        ("lfm2-1.2b", "LiquidAI/LFM2-1.2B"),
        ("Granite-4.0-H-Tiny", "ibm-granite/granite-4.0-h-tiny"),
        ("granite-4.0-micro-base", "ibm-granite/granite-4.0-micro-base"),
        ("falcon-h1-1.5b-deep-instruct", "tiiuae/Falcon-H1-1.5B-Deep-Instruct"),
        ("Falcon-H1-34B-instruct", "tiiuae/Falcon-H1-34B-Instruct"),
        ("StarCoder2-15B", "bigcode/starcoder2-15b"),
        ("falcon-7b-instruct", "tiiuae/falcon-7b-instruct"),
        ("falcon-rw-1b", "tiiuae/falcon-rw-1b"),
        ("BLOOMZ-7B1", "bigscience/bloomz-7b1"),
        ("bloom", "bigscience/bloom"),
        ("mpt-7b-chat", "mosaicml/mpt-7b-chat"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("Phi-1_5", "microsoft/phi-1_5"),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("facebook/opt-6.7b", "facebook/opt-6.7b"),
        ("mamba-2.8B", "state-spaces/mamba-2.8b-hf"),
        ("falcon-mamba-7b-instruct", "tiiuae/falcon-mamba-7b-instruct"),
        ("opt-6.8b", "opt-6.8b"),
        ("pocket", "pocket"),
    ],
)
def test_short_names(short: str, full: str) -> None:
    assert hub_id(short) == full


@pytest.mark.parametrize(
    ("family", "vocabulary", "draft"),
    [
        ("bloom", 250880, "bigscience/bloom-560m"),
        ("bloom", 64000, "lookup"),
        ("mamba", 50280, "state-spaces/mamba-130m-hf"),
        ("mamba", 50288, "lookup"),
        ("codegen", 51200, "Salesforce/codegen-350M-mono"),
        ("gpt2", 50257, "distilbert/distilgpt2"),
        ("gpt2", 64000, "lookup"),  # GPT-SW3, which has a tokenizer of its own
        ("gpt_neo", 50257, "EleutherAI/gpt-neo-125m"),
        ("granitemoehybrid", 100352, "ibm-granite/granite-4.0-350m"),
        ("granitemoehybrid", 49152, "lookup"),
        ("qwen3_next", 151936, "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_usual_draft_of_a_family_goes_with_its_usual_tokens_only(family: str, vocabulary: int, draft: str) -> None:
    assert choose_draft(ModelInfo("target", "", family, 1024, vocabulary, "float32", (), 0, "")) == draft


PAST_THE_END = Sampling(end_tokens=())


def test_a_row_that_is_not_assisted_has_nothing_proposed_and_goes_past_end_tokens() -> None:
    engine, proposer = FakeEngine(), Nonsense(seed=4)
    engine.choose = lambda tokens, sampling: END if len(tokens) == 6 else hashed(tokens, sampling)
    proposer.choose = engine.choose
    rows = [
        Row(1, (1, 2, 3), 20),
        Row(2, (1, 2, 3), 20, PAST_THE_END),
        Row(3, (1, 2, 3), 20, PAST_THE_END, assisted=False),
    ]
    ended = finish(verifier(engine, proposer), rows)
    stopped, assisted, plain = (ended[row.key] for row in rows)
    assert isinstance(stopped, RowResult) and isinstance(assisted, RowResult) and isinstance(plain, RowResult)
    assert (stopped.finish_reason, assisted.finish_reason) == ("stop", "length")
    assert assisted.tokens == plain.tokens and len(plain.tokens) == 20 and END in plain.tokens
    assert plain.proposed == 0 < assisted.proposed
    assert 3 not in proposer.asked and 2 in proposer.asked


def test_the_prefill_ends_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.target.verifier.PREFILL_TOKENS", 4)
    [result] = finish(
        verifier(FakeEngine(), Nonsense(seed=1)), [Row(1, (1,) * 10, 8, PAST_THE_END, assisted=False)]
    ).values()
    assert isinstance(result, RowResult)
    assert result.prefill_rounds == 3, "10 tokens in pieces of 4"
    assert result.rounds - result.prefill_rounds == 7
    assert 0 < result.prefill_seconds < result.seconds


class FakePair:
    """Answers with an engine that writes one end token after the other as soon as it may."""

    def set_layout(self, name: str | None) -> None:
        pass

    def answer(self, row: Row) -> RowResult:
        [result] = finish(verifier(FakeEngine(choose=lambda tokens, sampling: END), Nonsense(seed=1)), [row]).values()
        assert isinstance(result, RowResult)
        return result

    def peak_bytes(self) -> int:
        return 1


@pytest.mark.parametrize(("stop_at_end", "tokens"), [(False, 9), (True, 1)])
def test_answers_are_as_long_as_asked_unless_they_may_end(
    monkeypatch: pytest.MonkeyPatch, stop_at_end: bool, tokens: int
) -> None:
    spec = options(monkeypatch, *(["--stop-at-end"] if stop_at_end else []))
    pair: Any = FakePair()
    ask = bench_module._Asker(spec, pair, print)
    row = ask(bench_module.Example((1, 2, 3), 9), 1, bench_module.PLAIN)
    assert row.new_tokens == tokens
    assert f"| {tokens} |" in " ".join(table([row]).split())


def test_what_was_measured_while_the_benchmark_was_stopped_is_measured_again() -> None:
    """Ctrl-Z for a minute made an example a minute slower."""
    keys: list[int] = []
    said: list[str] = []

    class Stopped(FakePair):
        def answer(self, row: Row) -> RowResult:
            keys.append(row.key)
            if len(keys) == 1:  # what the kernel sends where a stopped process goes on
                os.kill(os.getpid(), signal.SIGCONT)
            return replace(super().answer(row), seconds=60.0 if len(keys) == 1 else 1.0)

    pair: Any = Stopped()
    before = signal.getsignal(signal.SIGCONT)
    with continued.counted():
        ask = bench_module._Asker(BenchSpec(), pair, said.append)
        assert ask(bench_module.Example((1, 2, 3), 9), 1, bench_module.PLAIN).total_seconds == 1.0
    assert keys == [1, 2] and said == [
        "the benchmark was stopped for a while: what was measured just then is measured again"
    ]
    assert signal.getsignal(signal.SIGCONT) == before


def test_cores_lost_to_another_run_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    def measure(spec: BenchSpec, setup: Any, plan: str, modes: Any, say: Any, lost: Any) -> Any:
        tries.append(plan)
        if len(tries) == 1:
            raise LeaseError("core 0 is held by process 7 (waited 5 s)")
        return {"plain": [Measured(8, (1, 2, 3), 1.0, 0.5, 0, 0, 2, 1)]}, {}, None

    setup = bench_module.BenchSetup(MODEL_INFO, None, "none", ModelSpec("/models/opt", "native", "w4a8"), None, [], MEMORY)
    monkeypatch.setattr(bench_module, "_prepare", lambda spec, say: setup)
    monkeypatch.setattr(bench_module, "_plan_pair", lambda spec, setup, machine, say: f"plan {len(tries)}")
    monkeypatch.setattr(bench_module, "local_ray", lambda cores, resources, actors: nullcontext())
    monkeypatch.setattr(bench_module, "_measure_all", measure)
    bench_module.bench(BenchSpec(draft="none"))
    assert tries == ["plan 0", "plan 1"], "each try on cores that were free when it began"
    printed = capsys.readouterr()
    assert "| Example# |" in printed.out and "waiting for cores: core 0 is held by process 7" in printed.err


class WholePair(FakePair):
    """A pair that is up; ``on_answer`` is called with the number of each row, and may raise."""

    def __init__(self, on_answer: Callable[[int], None], layouts: int = 1) -> None:
        self.reports: dict[str, Any] = {}
        self.layout: Any = None
        self.chooses_layout = layouts > 1
        self._on_answer = on_answer

    def __call__(self, *arguments: object) -> WholePair:
        return self

    def __enter__(self) -> WholePair:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def answer(self, row: Row) -> RowResult:
        self._on_answer(row.key)
        if self.chooses_layout and row.key > 3:
            self.layout = SimpleNamespace(sentence="shared, measured")
        return super().answer(row)


def measure(monkeypatch: pytest.MonkeyPatch, pair: WholePair, spec: BenchSpec) -> None:
    """The benchmark of three examples with this pair."""
    target = ModelSpec("/models/opt", "native", "w4a8")
    made = [bench_module.Example((1, 2, 3)[:length], 9) for length in (1, 2, 3)]
    setup = bench_module.BenchSetup(MODEL_INFO, None, "lookup", target, None, made, MEMORY)
    monkeypatch.setattr(bench_module, "_prepare", lambda spec, say: setup)
    monkeypatch.setattr(bench_module, "_plan_pair", lambda *arguments: None)
    monkeypatch.setattr(bench_module, "local_ray", lambda cores, resources, actors: nullcontext())
    monkeypatch.setitem(sys.modules, "outrider.runner.bench.pair", SimpleNamespace(Pair=pair))
    bench_module.bench(spec)


@pytest.mark.parametrize(
    ("problem", "runs", "options", "said", "rows"),
    [
        # Behind the warm-up, one row for each mode.
        (KeyboardInterrupt(), 0, {}, None, 0),
        (KeyboardInterrupt(), 1, {}, "1 of 3 examples", 1),
        (KeyboardInterrupt(), 2, {}, "2 of 3 examples", 2),
        (JobError("the target failed"), 2, {}, "2 of 3 examples", 2),
        (KeyboardInterrupt(), 2, {"repeat": 3}, "0 of 3 examples and 2 of 3 runs of the next", 1),
        (KeyboardInterrupt(), 7, {"repeat": 3}, "2 of 3 examples and 1 of 3 runs of the next", 3),
        (KeyboardInterrupt(), 1, {"compare": True}, "1 of 3 examples", 1),
    ],
)
def test_what_was_measured_before_an_end_amid_examples_is_printed(
    problem: BaseException,
    runs: int,
    options: dict[str, Any],
    said: str | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """An hour's figures were lost with the last example."""
    modes = 2 if options.get("compare") else 1

    def on_answer(key: int) -> None:
        # With two modes, between the two of an example.
        if key == modes + modes * runs + modes:
            raise problem

    spec = BenchSpec(draft="lookup", json_file=tmp_path / "b.json", **options)
    with pytest.raises(type(problem)):
        measure(monkeypatch, WholePair(on_answer), spec)
    printed = capsys.readouterr().out
    assert not (tmp_path / "b.json").exists()
    if said is None:
        assert printed == ""
        return
    assert printed.startswith(f"**Incomplete: {said}.**\n\n")
    assert printed.count(f"\n{rows} of 3 examples: ") == modes and "All examples" not in printed
    numbered = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    tables = ["Example#", *map(str, range(1, rows + 1))]
    assert numbered == tables * (3 if options.get("compare") else 1)


def test_a_benchmark_that_was_stopped_while_it_chose_a_layout_chooses_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds that the stop was in made one of the layouts slow."""
    chosen: list[int] = []

    def on_answer(key: int) -> None:
        if key == 2:  # within the trial
            chosen.append(key)
            if len(chosen) == 1:
                os.kill(os.getpid(), signal.SIGCONT)

    measure(monkeypatch, WholePair(on_answer, layouts=2), BenchSpec(draft="lookup"))
    printed = capsys.readouterr()
    assert len(chosen) == 2
    assert "as a layout was being chosen: the models are started again" in printed.err
    assert printed.err.count("example 1 of 3") == 1 and "All examples: " in printed.out


@pytest.mark.parametrize("suffix", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_charts(tmp_path: Path, suffix: str) -> None:
    rows = [Measured(256, (1,) * 9, 2.0 / turn, 0.5 / turn, 4, 2, 4, 1) for turn in (1, 2)]
    for name, compared in (("speeds", []), ("speedups", comparison(rows, rows[::-1]))):
        file = tmp_path / f"{name}.{suffix}"
        plot(file, "a title", {"plain": rows, "assisted": rows}, compared)
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG") if suffix == "png" else b"a title" in content
    if suffix == "svg":
        assert b"times as fast" in (tmp_path / "speedups.svg").read_bytes()
        assert b"tokens a second" in (tmp_path / "speeds.svg").read_bytes()


def test_a_chart_that_cannot_be_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"chart.gif must end in .svg or .png"):
        check_plot(Path("chart.gif"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("outrider.runner.bench.plot.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'outrider\[plot\]'"):
        check_plot(Path("chart.svg"))


@pytest.mark.parametrize(("stop", "ends"), [(False, ()), (True, None)])
def test_end_tokens_end_an_answer_only_where_that_is_asked_for(stop: bool, ends: tuple[int, ...] | None) -> None:
    asked: list[Any] = []

    class Told:
        def set_layout(self, name: str | None) -> None: ...

        def answer(self, row: Any) -> RowResult:
            asked.append(row)
            return RowResult(row.key, (1, 2), "", "stop", 1, 1, 2, 0.1)

        def peak_bytes(self) -> int:
            return 1

    ask = bench_module._Asker(BenchSpec(stop_at_end=stop), Told(), print)  # type: ignore[arg-type]
    assert ask(bench_module.Example((1,), 9), 0, "plain").new_tokens == 2
    assert asked[0].sampling.end_tokens == ends
