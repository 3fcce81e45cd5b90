"""The forecast of the memory that a model and a replica need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from native_models import save_tiny

from outrider.kernels import library
from outrider.kernels.library import KernelsUnavailable
from outrider.kernels.packer import packed_bytes
from outrider.kernels.program import Format, Kind, Scales
from outrider.kernels.suffixes import Suffixes, bytes_of_answers
from outrider.runner.model_choice import memory_of_pair
from outrider.runner.options.job import JobSpec
from outrider.runner.planning.replica_memory import PROCESS_BYTES, ProcessMemory, ReplicaMemory
from outrider.runner.planning.replica_plan import memory_by_files
from outrider.runner.planning.topology import read_topology
from outrider.workers.messages import ModelSpec
from outrider.workers.models.cached_numbers import cached_numbers
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.memory_of_program import HUGE_PAGE, memory_of, memory_of_program
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.model_memory import MOST_RESERVED, PAIRED, ModelMemory, PairsMemory, scales_in_pairs
from outrider.workers.models.opening import open_model
from outrider.workers.precisions import PRECISIONS

ALIGNMENT = 4096
MODEL = ModelMemory(weights=1000, working=100, row=10, token=2, first_tokens=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("memory") / "llama")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8"])
def test_weights_are_counted_as_they_are_packed(
    precision: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, norms and scales included, which a number of bytes for each weight leaves out."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    spec = ModelSpec(str(model), "native", precision)
    told = memory_of(spec, 8)
    assert told is not None
    [(_, packed)] = open_model(spec).weights
    assert 0 <= packed - told.weights <= 64 * ALIGNMENT


def test_keys_and_values_are_counted_as_they_are_kept(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    spec = ModelSpec(str(model), "native", "w8a8")
    told, small = memory_of(spec, 8), memory_of(replace(spec, cache_precision="int8"), 8)
    assert told is not None and small is not None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert told.token == 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * -(-size // 16) * 16
    assert told.token / 2 < small.token < told.token
    assert told.first_tokens == min(256, config["max_position_embeddings"])


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "granite-mamba", "mamba"])
def test_a_row_has_its_recurrent_states(name: str, tmp_path: Path) -> None:
    told = memory_of(ModelSpec(str(save_tiny(name, tmp_path / name)), "native", "bf16"), 8)
    assert told is not None and told.row > 0


def test_what_is_not_known_before_a_model_is_open_is_not_guessed(model: Path) -> None:
    assert memory_of(ModelSpec(str(model), "hf", "fp32"), 8) is None


@pytest.mark.parametrize(("precision", "scales"), [("w4a8", "factors"), ("w4a8:g128", "words"), ("w8a8", ""), ("bf16", "")])
def test_what_products_in_pairs_need_is_counted_where_they_are_made(precision: str, scales: str, model: Path) -> None:
    """Of these small ones each matrix of four-bit codes takes a huge page, others none."""
    program = read_program(model, PRECISIONS[precision]).program
    matrices = {op.weight for op in program.ops if op.kind is Kind.LINEAR}
    paired = [each for each in matrices if program.weights[each].format is Format.W4A8]
    assert bool(paired) == bool(scales)
    expected = PairsMemory(**{scales: len(paired) * HUGE_PAGE}) if scales else PairsMemory()
    assert memory_of_program(program, 8).pairs == expected


@pytest.mark.parametrize(("precision", "scales"), [("w4a8", "factors"), ("w4a8:g128", "words")])
def test_experts_have_the_numbers_of_their_pairs_together(precision: str, scales: str, tmp_path: Path) -> None:
    """A huge page for all of a layer's gates, and for all that follow them; none where their groups have factors."""
    program = read_program(save_tiny("mixtral", tmp_path / "mixtral"), PRECISIONS[precision]).program
    matrices = {op.weight for op in program.ops if op.kind is Kind.LINEAR}
    if scales == "words":
        matrices |= {op.weight for op in program.ops if op.kind is Kind.EXPERTS}
    pages = sum(program.weights[each].format is Format.W4A8 for each in matrices)
    assert memory_of_program(program, 8).pairs == PairsMemory(**{scales: pages * HUGE_PAGE})


def test_a_host_that_multiplies_in_pairs_has_their_numbers_beside_the_rest() -> None:
    """Whichever machine plans: each host says for itself how it multiplies."""
    target = ProcessMemory(replace(MODEL, pairs=PairsMemory(words=5000, factors=70)), "native", True)
    draft = ProcessMemory(replace(MODEL, pairs=PairsMemory(factors=300)), "native", True)
    sizes = ReplicaMemory(target, draft).sizes(4)
    assert sizes.on(frozenset()) == sizes
    for in_pairs, more in (({Scales.WORDS}, (5000, 0)), ({Scales.FACTORS}, (70, 300)), (set(PAIRED), (5070, 300))):
        there = sizes.on(frozenset(in_pairs))
        assert (there.of_target - sizes.of_target, there.of_draft - sizes.of_draft) == more


@pytest.mark.parametrize("name", ["avx512pairs", "avx2", "avx1024"])
def test_this_machines_instruction_set_says_whether_products_are_made_in_pairs(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that is named does all that it can; one that this machine lacks multiplies nothing."""
    monkeypatch.setenv("OUTRIDER_ISA", name)
    all_of_them = name == "avx512pairs" and name in library.available_instruction_sets()
    assert scales_in_pairs() == read_topology().in_pairs == (set(PAIRED) if all_of_them else set())


def test_a_library_that_is_missing_multiplies_nothing_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise KernelsUnavailable("no library")

    monkeypatch.setattr(library, "load", load)
    assert scales_in_pairs() == set()


@pytest.mark.parametrize("precision", ["w8a8", "w4a8", "bf16"])
def test_a_shortlist_is_counted_beside_the_whole_head(precision: str, model: Path) -> None:
    """Its rows of the packed head, and for each token of the vocabulary where it stands."""
    spec = ModelSpec(str(model), "native", precision)
    program = read_program(model, PRECISIONS[precision]).program
    head = next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    told, short = memory_of(spec, 8), memory_of(spec, 8, program.vocabulary // 4)
    assert told is not None and short is not None
    copied = packed_bytes(replace(program.weights[head.weight], rows=program.vocabulary // 4))
    assert short.weights - told.weights == copied
    assert short.working - told.working >= 4 * program.vocabulary
    assert (short.pairs.factors > told.pairs.factors) == (precision == "w4a8")
    assert memory_of(spec, 8, program.vocabulary) == told, "a list of all tokens is none"
    assert memory_of(spec, 8, None) == told, "none pays with so few tokens"


def test_of_a_large_vocabulary_a_quarter_is_counted_unasked(model: Path) -> None:
    program = read_program(model, PRECISIONS["w8a8"]).program
    head = next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    every = 1 << 16
    large = replace(program.weights[head.weight], rows=every)
    ops = tuple(replace(op, output=replace(op.output, width=every)) if op is head else op for op in program.ops)
    weights = tuple(large if at == head.weight else each for at, each in enumerate(program.weights))
    buffers = tuple(every if at == head.output.buffer else each for at, each in enumerate(program.buffers))
    program = replace(program, ops=ops, weights=weights, buffers=buffers, vocabulary=every)
    counted = memory_of_program(program, 8, None).weights - memory_of_program(program, 8).weights
    assert counted == packed_bytes(replace(large, rows=every // 4))


@pytest.mark.parametrize(("asked", "shortlist"), [("auto", None), (0, 0), (700, 700)])
def test_a_drafts_shortlist_is_planned_with_and_a_target_has_none(model: Path, asked: Any, shortlist: int | None) -> None:
    info, spec, helper = read_model_info(str(model)), ModelSpec(str(model), "native", "bf16"), Asked()
    options = JobSpec(input=Path("in.jsonl"), draft_shortlist=asked)
    memory_of_pair((info, spec), (info, spec), options, "small", helper)  # type: ignore[arg-type]
    assert helper.shortlists == [0, shortlist]


def test_inputs_of_wide_matrices_are_counted(model: Path) -> None:
    """As they are multiplied: of 512 tokens 11,008 channels are 28 MB in fp32, a quarter more than that included."""
    program = read_program(model, PRECISIONS["fp32"]).program
    linear = next(op for op in program.ops if op.kind is Kind.LINEAR)
    wide = replace(program.weights[linear.weight], columns=11008)
    weights = tuple(wide if at == linear.weight else each for at, each in enumerate(program.weights))
    usual, more = (memory_of_program(each, 8).working for each in (program, replace(program, weights=weights)))
    assert 24_000_000 < more - usual <= 30_000_000


@pytest.mark.parametrize("most", [0, 31, 32, 1000, 1 << 14, 100_000])
def test_answers_are_counted_as_the_kernels_count_them(most: int) -> None:
    assert bytes_of_answers(most, most) == Suffixes(most).bytes


def test_few_answers_take_less_than_there_is_room_for() -> None:
    assert 0 < bytes_of_answers(100_000, 10) < bytes_of_answers(100_000, 100_000)


class Asked:
    """A helper that knows of every model what ``MODEL`` takes."""

    def __init__(self) -> None:
        self.shortlists: list[int | None] = []

    def memory_of(self, model: ModelSpec, rows: int, shortlist: int | None) -> ModelMemory:
        self.shortlists.append(shortlist)
        return MODEL


def test_a_target_has_a_tokenizer_and_answers_where_they_are_searched(model: Path) -> None:
    info, spec = read_model_info(str(model)), ModelSpec(str(model), "native", "bf16")
    asked = JobSpec(input=Path("in.jsonl"), answer_tokens=1 << 16)
    for name, answers in (("suffix", 1 << 16), ("small+suffix", 1 << 16), ("small", 0), ("none", 0)):
        pair = (info, spec) if "small" in name else (None, None)
        found = memory_of_pair((info, spec), pair, asked, name, Asked())  # type: ignore[arg-type]
        assert found.target.tokens == info.vocabulary
        assert found.draft is None or not found.draft.tokens, "a draft loads one only for rows with constraints"
        assert found.answer_tokens == answers


def test_a_tokenizer_is_counted_by_its_tokens() -> None:
    """One of 128,000 tokens takes a quarter of a gigabyte."""
    without = ProcessMemory(MODEL, "native", True)
    assert 250_000_000 < replace(without, tokens=128_000).room - without.room < 350_000_000


def test_answers_are_counted_with_the_target() -> None:
    target = ProcessMemory(MODEL, "native", True)
    sizes, alone = (ReplicaMemory(target, None, tokens).sizes(4) for tokens in (1 << 21, 0))
    assert sizes.of_target - alone.of_target == sizes.answers == bytes_of_answers(1 << 21, 1 << 21) > 60_000_000
    assert ReplicaMemory(target, None, 1 << 21).sizes(4, written=500).answers < 10_000_000


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 65536),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "hidden_size": 64}, 512),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768),
        ({"n_layer": 2, "n_head": 4, "n_embd": 64, "multi_query": True}, 2 * 2 * 16),
        ({"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": None, "hidden_size": 64}, 512),
        (
            {
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention", "full_attention", "sliding_attention", "conv"],
                "num_attention_heads": 4,
                "hidden_size": 64,
            },
            2 * 2 * 64,
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            2 * 8 * 40,
        ),
        ({"num_attention_heads": 4, "hidden_size": 64}, None),
        ({"num_hidden_layers": 4, "num_attention_heads": [4, 2], "hidden_size": 64}, None),
        ({"num_hidden_layers": True, "num_attention_heads": 4, "hidden_size": 64}, None),
    ],
)
def test_keys_and_values_by_a_configuration(config: dict[str, Any], numbers: int | None) -> None:
    assert cached_numbers(config) == numbers


def test_a_model_of_which_nothing_is_known_but_its_files_has_the_keys_and_values_of_its_configuration(model: Path) -> None:
    info = read_model_info(str(model))
    native = memory_of(ModelSpec(str(model), "native", "bf16"), 8)
    assert native is not None
    assert memory_by_files(info, "fp16").token == native.token
    assert memory_by_files(info, "fp32").token == 2 * native.token
    assert memory_by_files(replace(info, cached_numbers=None), "fp32").token == 0


def test_a_replica_takes_weights_processes_and_the_tokens_of_its_rows() -> None:
    target, draft = ProcessMemory(MODEL, "native", True), ProcessMemory(ModelMemory(500), "hf", False)
    sizes = ReplicaMemory(target, draft).sizes(4)
    assert (sizes.target, sizes.target_kv) == (1000, 4 * 256 * 2 + 4 * 10)
    assert sizes.target_room == PROCESS_BYTES["native"] + 100
    assert (sizes.draft, sizes.draft_kv, sizes.draft_room) == (500, 0, PROCESS_BYTES["hf"])
    assert ReplicaMemory(target, None).sizes(4, tokens=5000).target_kv == 5000 * 2 + 4 * 10
    assert ReplicaMemory(target, None).sizes(4, tokens=5).target_kv == sizes.target_kv
    assert ReplicaMemory(target, None).sizes(4).draft is None
    assert replace(MODEL, token=1 << 30).of_rows(4, 1) == MOST_RESERVED + 40, "more is taken when rows need it"
