"""From checked lines to a filled journal, with a tokenizer process that needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from outrider.runner.job.admission import admit
from outrider.runner.job.input import open_input
from outrider.runner.job.journal import FAILED, Counts, Journal, StoredRow
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.row_seed import derived_seed
from outrider.runner.job.source import Source
from outrider.runner.options.job import JobSpec
from outrider.workers.errors import InputError, UsageError
from outrider.workers.messages import Sampling
from outrider.workers.models.limits import TooManyTokens
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.reasoning import ReasoningTags

MODEL_INFO = ModelInfo("tiny", "/models/tiny", "llama", 20, 100, "float32", (0,), 5, "d")
# Characters of a prompt that is not even encoded.
FAR_TOO_LONG = 1000


class FakeTokenizerProcess:
    """A token a letter; no chat template."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def reasoning_tags(self, path: str) -> ReasoningTags:
        return ReasoningTags("<think>", "</think>", (7,))

    def tool_form(self, path: str) -> None:
        return None

    def begin_to_encode(
        self, path: str, prompts: list[Any], continued: bool = False, context: int | None = None
    ) -> Callable[[], list[tuple[int, ...] | str]]:
        assert path == MODEL_INFO.path and context == (None if continued else MODEL_INFO.context)
        self.asked.append(len(prompts))

        def token(letter: str) -> int:
            """Letters that are not ASCII are none of this model's."""
            return ord(letter) % 100 if letter.isascii() else ord(letter)

        def encoded(prompt: Any) -> tuple[int, ...] | str:
            if not isinstance(prompt, str):
                return "no chats here"
            return TooManyTokens("far too long") if len(prompt) > FAR_TOO_LONG else tuple(map(token, prompt))

        return lambda: list(map(encoded, prompts))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job.db")


def admitted(journal: Journal, content: str, **options: Any) -> int:
    path = journal.path.with_name("in.jsonl")
    path.write_text(content)
    return admit(JobSpec(input=path, **options), Source(path), MODEL_INFO, FakeTokenizerProcess(), journal, identified).rows  # type: ignore[arg-type]


def identified(digest: str) -> dict[str, Any]:
    return {"identity": {"input": digest}}


def stored(journal: Journal, *numbers: int) -> list[StoredRow]:
    return journal.load(numbers)


def problems(journal: Journal, content: str) -> tuple[str, list[str]]:
    with pytest.raises(InputError) as caught:
        admitted(journal, content)
    assert not journal.filled
    return str(caught.value), [line.rsplit("/", 1)[-1] for line in caught.value.lines]


def lines(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def test_rows_are_written_with_everything_resolved(journal: Journal) -> None:
    content = lines(
        {"id": "a", "prompt": "hey"}, {"id": "b", "prompt": [1, 2], "temperature": 0.5, "seed": -1, "stop": "x"}
    )
    assert admitted(journal, content, temperature=1.0, max_tokens=7, seed=3) == 2
    first, second = stored(journal, 0, 1)
    assert (first.custom_id, first.line, first.kind, first.prompt) == ("a", 1, "completion", (4, 1, 21))
    assert first.request["seed"] == derived_seed(3, "a")
    assert (first.request["temperature"], first.request["max_tokens"]) == (1.0, 7)
    assert (second.prompt, second.request["temperature"], second.request["stop"]) == ((1, 2), 0.5, ["x"])
    assert second.request["seed"] == (1 << 64) - 1


def predicting(custom_id: str, content: str, prompt: str = "hey") -> dict[str, Any]:
    prediction = {"prediction": {"type": "content", "content": content}} if content else {}
    return {"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": prompt, **prediction}}


def test_what_an_answer_is_expected_to_be_goes_with_its_row_alone(journal: Journal) -> None:
    """And what cannot be tokens of the model, or is more than it holds, is no fault of the row."""
    contents = ("hi", "", "hi" * 20, "ü", "\x64")
    rows = [predicting(str(number), content) for number, content in enumerate(contents)]
    assert admitted(journal, lines(*rows)) == len(rows)
    samples = [samples_of(row)[0] for row in stored(journal, *range(len(rows)))]
    assert [row.predicted for row in samples] == [(4, 5), (), (4, 5) * 10, (), (0,)]
    assert {row.prompt for row in samples} == {(4, 1, 21)}


def test_every_problem_is_named_and_nothing_is_written(journal: Journal) -> None:
    content = lines(
        {"id": "a", "prompt": "x" * 20}, {"id": "b", "prompt": "fine"}, {"id": "c", "prompt": "x", "max_tokens": 20}
    )
    content += "{\n"
    summary, found = problems(journal, content)
    assert summary == "3 rows are wrong and nothing was started; mend them, or run the others with --skip-bad"
    assert found == [
        "in.jsonl:1: the prompt has 20 tokens, and tiny holds 20 with the answer; shorten it",
        'in.jsonl:3: the prompt has 1 token and "max_tokens" is 20, together more than the 20 that tiny holds; '
        "ask for at most 19",
        "in.jsonl:4: not valid JSON: Expecting property name enclosed in double quotes at column 2; "
        "each row must be one line: jq -c . writes objects so",
    ]


def test_a_token_that_stands_for_a_picture_is_named(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision and audio parts, which would embed such a token, are not loaded."""
    monkeypatch.setitem(globals(), "MODEL_INFO", replace(MODEL_INFO, texts_below=90))
    _, found = problems(journal, lines({"id": "a", "prompt": [3, 89]}, {"id": "b", "prompt": [3, 90, 1]}))
    assert found == [
        "in.jsonl:2: the prompt has the token id 90, which stands for an image or a sound in tiny: prompts are texts; "
        "leave it out"
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"prompt": "a\N{SNOWMAN}"},
            "in.jsonl:1: the tokenizer of tiny gives the prompt the token id 9731, and the model's vocabulary has "
            "100 tokens; mend its tokenizer.json, or leave that text out",
        ),
        ({"prompt": [5, 100]}, 'in.jsonl:1: "prompt": 100 is not a token id of tiny, which has 100'),
        (
            {"prompt": "a", "logit_bias": {"100": 1}},
            'in.jsonl:1: "logit_bias": "100" is not a token id of tiny, which has 100',
        ),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 'in.jsonl:1: "logit_bias": "x" is not a token id of tiny, which has 100'),
        (
            {"prompt": "a", "logit_bias": {"-1": 1}},
            'in.jsonl:1: "logit_bias": "-1" is not a token id of tiny, which has 100',
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "in.jsonl:1: no chats here"),
        (
            {"prompt": "a", "stop_token_ids": [3, 100]},
            'in.jsonl:1: "stop_token_ids": 100 is not a token id of tiny, which has 100',
        ),
        (
            {"prompt": "a", "min_tokens": 5, "max_tokens": 4},
            'in.jsonl:1: "min_tokens" is 5, and "max_tokens" allows 4; ask for fewer or allow more',
        ),
        (
            {"prompt": "a" * 15, "min_tokens": 6},
            'in.jsonl:1: "min_tokens" is 6, and "max_tokens" allows 5; ask for fewer or allow more',
        ),
    ],
)
def test_problems_that_only_the_model_knows(journal: Journal, entry: dict[str, Any], message: str) -> None:
    assert problems(journal, lines(entry))[1] == [message]


def test_many_problems_are_counted_not_listed(journal: Journal) -> None:
    summary, found = problems(journal, "{\n" * 80)
    assert summary.startswith("80 rows are wrong")
    assert len(found) == 51
    assert found[-1] == "... and 30 more"


def test_skip_bad_makes_error_records_in_place(journal: Journal) -> None:
    content = lines({"id": "a", "prompt": "x"}) + "{\n" + lines({"id": "c", "prompt": ""}, {"id": "d", "prompt": "y"})
    assert admitted(journal, content, skip_bad=True) == 4
    assert journal.counts() == Counts(rows=4, done=0, failed=2)
    assert journal.pending(-1, 9) == [(0, 0), (3, 0)]
    errors = [json.loads(record) for record in journal.records(FAILED)]
    assert [error["custom_id"] for error in errors] == ["2", "c"]
    assert errors[1]["error"]["message"].endswith('in.jsonl:3: "prompt" is empty')


@pytest.mark.parametrize("characters", [20, FAR_TOO_LONG + 1])
def test_a_prompt_that_is_too_long_has_the_code_of_one_whether_it_was_encoded_or_not(
    journal: Journal, characters: int
) -> None:
    assert admitted(journal, lines({"prompt": "a" * characters}, {"prompt": "a"}), skip_bad=True) == 2
    [error] = [json.loads(record)["error"] for record in journal.records(FAILED)]
    assert error["code"] == "context_length_exceeded"


def test_an_id_that_repeats_is_named_with_both_lines(journal: Journal) -> None:
    content = lines({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"prompt": "z"})
    summary, found = problems(journal, content)
    assert summary.startswith("one row is wrong")
    assert found == ['in.jsonl:3: the id "a" stands in line 1 already; ids must differ']


def test_of_a_long_id_that_repeats_the_beginning_is_shown(journal: Journal) -> None:
    content = lines(*2 * [{"id": "a" * 10**6, "prompt": "x"}])
    assert problems(journal, content)[1] == [
        f'in.jsonl:2: the id "{"a" * 57}..." stands in line 1 already; ids must differ'
    ]


def test_problems_come_in_the_order_of_the_lines(journal: Journal) -> None:
    content = lines({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "b", "prompt": ""})
    assert [line.split(":")[1] for line in problems(journal, content)[1]] == ["2", "3"]


def test_no_id_stands_in_results_and_errors(journal: Journal) -> None:
    """A refused row goes by the id that it claimed where no other has it, by its line's number where that is no other's id,
    and else by "line N".
    """
    content = lines(
        {"id": "a", "prompt": ""},  # bad, and the first with its id
        {"id": "a", "prompt": "x"},  # so this goes by its line, which the last but one has for an id
        {"id": "b", "prompt": "x"},
        {"id": "b", "prompt": ""},  # "4"
        {"id": "2", "prompt": "x"},
        {"id": "line 2", "prompt": "x"},
    )
    admitted(journal, content, skip_bad=True)
    errors = [json.loads(record) for record in journal.records(FAILED)]
    assert [error["custom_id"] for error in errors] == ["a", "line 2 (2)", "4"]
    assert [error["error"]["message"].rsplit("in.jsonl:", 1)[1] for error in errors] == [
        '1: "prompt" is empty',
        '2: the id "a" stands in line 1 already; ids must differ',
        '4: "prompt" is empty; the id "b" stands in line 3 already; ids must differ',
    ]
    assert len({error["id"] for error in errors}) == 3
    assert [row.custom_id for row in stored(journal, 0, 1, 2, 3, 4, 5)] == ["a", "line 2 (2)", "b", "4", "2", "line 2"]
    assert journal.pending(-1, 9) == [(2, 0), (4, 0), (5, 0)]


@pytest.mark.parametrize("bad", ["{", '{"prompt": "x"}', '{"id": "200", "prompt": "x"}'])
def test_a_row_without_an_id_of_its_own_takes_none_from_others(journal: Journal, bad: str) -> None:
    """Ids count from 1 in lines that count from 2, or from 0: a name for one row must not push all others to the next."""
    rows = [json.dumps({"id": str(number), "prompt": "x"}) for number in range(300)]
    rows[100] = bad
    admitted(journal, "\n".join(rows) + "\n", skip_bad=True)
    assert journal.counts() == Counts(rows=300, done=0, failed=1)


def test_an_input_of_blank_lines_is_refused(journal: Journal) -> None:
    with pytest.raises(UsageError, match="holds no prompts, only blank lines"):
        admitted(journal, "\n  \n\n")
    assert not journal.filled


@pytest.mark.parametrize("name", ["in.csv", "in.parquet"])
def test_a_table_without_rows_is_refused_as_one(journal: Journal, name: str) -> None:
    path = journal.path.with_name(name)
    if name == "in.csv":
        path.write_text("id,prompt\n")
    else:
        parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), path)
    source = open_input(path, path.parent, print)
    with pytest.raises(UsageError, match=f"{name} has no rows; give a table that has some"):
        admit(JobSpec(input=path), source, MODEL_INFO, FakeTokenizerProcess(), journal, identified)  # type: ignore[arg-type]
    assert not journal.filled


def test_max_tokens_of_the_job_is_cut_to_what_fits_and_a_rows_own_is_not(journal: Journal) -> None:
    admitted(journal, lines({"prompt": "x" * 15}), max_tokens=128)
    assert stored(journal, 0)[0].request["max_tokens"] == 5


def test_a_temperature_that_would_overflow_is_greedy(journal: Journal) -> None:
    admitted(journal, lines({"prompt": "x", "temperature": 1e-300}, {"prompt": "x", "temperature": 0.01}))
    assert [row.request["temperature"] for row in stored(journal, 0, 1)] == [0.0, 0.01]


def test_a_derived_seed_depends_on_the_job_and_the_id_only() -> None:
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(seed, name) for seed in range(3) for name in ("a", "b", "ab")}) == 9
    # Written down, because results of old jobs depend on it.
    assert derived_seed(0, "a") == 0xE5DE3EF9EA52E1BD


def test_large_files_are_encoded_in_pieces(journal: Journal) -> None:
    path = journal.path.with_name("many.txt")
    path.write_text("prompt\n" * 2500)
    tokenizer_process = FakeTokenizerProcess()
    assert admit(JobSpec(input=path), Source(path), MODEL_INFO, tokenizer_process, journal, identified).rows == 2500  # type: ignore[arg-type]
    assert tokenizer_process.asked == [1000, 1000, 500]


def test_samples_of_a_row_have_keys_of_their_own(journal: Journal) -> None:
    entry = {
        "prompt": "ab",
        "n": 3,
        "temperature": 1,
        "seed": 9,
        "logit_bias": {"7": 2, "3": -1},
        "stop": ["s"],
        "top_k": -1,
    }
    admitted(journal, lines({"prompt": "x"}, entry))
    samples = samples_of(stored(journal, 1)[0])
    assert [divmod(sample.key, MOST_SAMPLES) for sample in samples] == [(1, 0), (1, 1), (1, 2)]
    assert samples[2].sampling == Sampling(
        temperature=1.0, seed=9, sample=2, logit_bias=((3, -1.0), (7, 2.0)), end_tokens=MODEL_INFO.end_tokens
    )
    assert samples[2].stop == ("s",)


def test_every_way_to_sample_reaches_the_worker(journal: Journal) -> None:
    """What a row asks for, and where it does not, what the job does."""
    asked = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 9, "min_tokens": 2,
        "repetition_penalty": 1.5, "presence_penalty": 0.75, "frequency_penalty": -0.5,
    }  # fmt: skip
    usual = {"temperature": 0.25, "top_p": 0.5, "top_k": 4, "min_p": 0.0625, "min_tokens": 1}
    content = lines({"id": "own", "prompt": "x", "logit_bias": {"7": 2}, **asked}, {"id": "usual", "prompt": "x"})
    admitted(journal, content, seed=5, **usual)
    first, second = (samples_of(row)[0].sampling for row in stored(journal, 0, 1))
    assert first == Sampling(**asked, logit_bias=((7, 2.0),), end_tokens=(0,))  # type: ignore[arg-type]
    assert second == Sampling(**usual, seed=derived_seed(5, "usual"), end_tokens=(0,))  # type: ignore[arg-type]


@pytest.mark.parametrize(("usual", "own"), [(-1, None), (7, -1), (7, 0)])
def test_a_top_k_of_none_is_off_in_a_row_and_for_the_job(journal: Journal, usual: int, own: int | None) -> None:
    admitted(journal, lines({"prompt": "x"} if own is None else {"prompt": "x", "top_k": own}), top_k=usual)
    assert samples_of(stored(journal, 0)[0])[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("entry", "ends"),
    [
        ({}, (0,)),
        ({"stop_token_ids": [9, 4]}, (0, 4, 9)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [0]}, (0,)),
    ],
)
def test_what_ends_a_row_is_resolved(journal: Journal, entry: dict[str, Any], ends: tuple[int, ...]) -> None:
    admitted(journal, lines({"prompt": "x", "min_tokens": 2, "logprobs": 3, **entry}))
    row = samples_of(stored(journal, 0)[0])[0]
    assert (row.sampling.end_tokens, row.sampling.min_tokens, row.logprobs) == (ends, 2, 3)


def test_the_jobs_own_ways_to_end(journal: Journal) -> None:
    content = lines({"prompt": "x"}, {"prompt": "x", "min_tokens": 0, "ignore_eos": False})
    admitted(journal, content, min_tokens=4, ignore_eos=True)
    first, second = (samples_of(row)[0].sampling for row in stored(journal, 0, 1))
    assert (first.min_tokens, first.end_tokens) == (4, ())
    assert (second.min_tokens, second.end_tokens) == (0, (0,))
