"""GGUF files: metadata is checked against tensors and file size, and the tokenizer in the file is the model's own."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_models
import numpy as np
import pytest
import torch
from gguf_models import mostly, write_gguf
from native_models import logits, open_native
from quantised_models import rewritten, save_small
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import read_config
from outrider.workers.models.formats.gguf.architectures import ARCHITECTURES
from outrider.workers.models.formats.gguf.architectures.others import WHAT
from outrider.workers.models.formats.gguf.blocks import TYPES, UNREAD
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.formats.gguf.config import config_of
from outrider.workers.models.formats.gguf.file import read_file
from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.workers.models.formats.gguf.tokenizer import gguf_tokenizer
from outrider.workers.models.model_info import find, read_model_info
from outrider.workers.models.opening import check_weights
from outrider.workers.models.tokenizer import Tokenizer

POCKET = find("pocket")
TEXTS = ["def f(x):\n    return x + 1\n", "Grüße, 12345 — don't\t\n\n  class A:", "<|endoftext|>x", " ", "日本 🙂"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: int = 128, counts: tuple[int, int] | None = None) -> bytes:
    found = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, *found) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no GGUF": (b"GGML" + bytes(100), "is no GGUF file"),
    "another byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "GGUF of version 50331648"),
    "an end in the middle": (file_of([key("a", 4, bytes(4))], [tensor()])[:30], "for which it has too few bytes"),
    "tensors without number": (file_of([], [], counts=(1 << 62, 0)), "names 4,611,686,018,427,387,904 tensors"),
    "keys without number": (file_of([], [], counts=(0, 1 << 40)), "keys of metadata, for which it has too few bytes"),
    "a text of gigabytes": (file_of([text("a") + struct.pack("<IQ", 8, 1 << 33)], []), "bytes, more than it has"),
    "a list of gigabytes": (file_of([text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)], []), "values in 'a', for which"),
    "a list of lists": (file_of([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "lists of the type 9"),
    "a value of no type": (file_of([key("a", 77, b"")], []), "type 77, which GGUF does not know"),
    "a key twice": (file_of([key("a", 4, bytes(4))] * 2, []), "the key 'a' twice"),
    "a key that is no text": (file_of([struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 4) + bytes(4)], []), "no UTF-8"),
    "a size that wraps": (file_of([], [tensor(shape=(1 << 40, 1 << 40))]), "it is truncated"),
    "a product of nothing": (file_of([], [tensor(shape=(0, 1 << 63))]), "the shape (9223372036854775808, 0)"),
    "an offset outside": (file_of([], [tensor(offset=1 << 50)]), "it is truncated"),
    "an offset between": (file_of([], [tensor(offset=5)]), "no multiple of 32"),
    "one over another": (file_of([], [tensor("a"), tensor("b", offset=96)]), "over another"),
    "the same twice": (file_of([], [tensor("a"), tensor("a", offset=128)], data=512), "the tensor 'a' twice"),
    "a type that is not read": (
        file_of([], [tensor(kind=15)]),
        "in GGUF's type Q8_K, which is not read; take a file in Q4",
    ),
    "an unknown type": (file_of([], [tensor(kind=77)]), "in GGUF's type 77, which is not read; take a file in Q4_K_M"),
    "half a block": (file_of([], [tensor(shape=(40,), kind=8)]), "32 values make a block"),
    "too many dimensions": (file_of([], [tensor(shape=(1,) * 9)]), "9 dimensions"),
    "an alignment of nothing": (file_of([key("general.alignment", 4, bytes(4))], []), '"general.alignment" of 0'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_cannot_be_what_it_says_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        read_file(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_no_cut_of_a_file_is_read_or_leads_elsewhere_than_to_a_sentence(tmp_path: Path) -> None:
    whole = write_gguf(save_small(tmp_path), tmp_path / "whole.gguf", mostly("Q8_0")).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [*range(0, 400, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            read_file(path)


def test_bytes_of_chance_lead_to_a_model_or_to_a_sentence(tmp_path: Path) -> None:
    whole = small(tmp_path).read_bytes()
    chosen, refused = random.Random(5), 0
    for number in range(60):
        content = bytearray(whole)
        for _ in range(chosen.randint(1, 3)):
            at = chosen.randrange(chosen.choice([64, 1500, 12000]))
            if chosen.random() < 0.6:
                content[at] = chosen.randrange(256)
            else:
                content[at : at + 8] = struct.pack("<Q", chosen.choice([0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1]))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        for read in (lambda path: config_of(read_file(path)), gguf_tokenizer):
            try:
                read(path)
            except ModelError as error:
                refused += 1
                assert "\n" not in str(error)
        path.unlink()
    assert 30 < refused < 120


def test_types_are_named_as_the_library_names_them() -> None:
    named = UNREAD | {number: kind.name for number, kind in TYPES.items()}
    assert len(named) == len(UNREAD) + len(TYPES)
    for type_ in gguf.GGMLQuantizationType:
        assert named.get(int(type_), type_.name) == type_.name


def small(path: Path, architecture: str = "llama", **more: Any) -> Path:
    save_small(path)
    return write_gguf(path, path / "model.gguf", mostly("Q8_0"), architecture, **more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"llama__expert_count": 8}, "has no 'llama.expert_used_count'"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, "has 8 experts, of which a token is to use 9"),
        ({"llama__expert_used_count": 2}, "'llama.expert_used_count': 2, which the native engine does not know"),
        ({"llama__attention__scale": 0.5}, "'llama.attention.scale'"),
        ({"llama__rope__scaling__type": "longrope"}, "lacks"),
        ({"split__count": 3}, "is one of 3 files of a model, whose names"),
    ],
)
def test_metadata_that_is_not_honoured_is_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    if said == "lacks":
        more, said = more | {"llama__rope__scaling__factor": 2.0}, "rope scaling 'longrope'"
    with pytest.raises(ModelError, match=said.replace("(", r"\(")):
        read_model_info(str(small(tmp_path, **more)))


FACTORS = "rope_freqs.weight"
SCALING = "llama__rope__scaling__"


def rope_of(path: Path, **scaling: Any) -> dict[str, Any]:
    """``scaling`` are keys of metadata under llama.rope.scaling."""
    more = {f"{SCALING}{key}": value for key, value in scaling.items()}
    found: dict[str, Any] = read_config(small(path, **more))["rope_parameters"]
    return found


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        # As llama.cpp reads them: a factor without a type is that of a linear one, and 0 says nothing.
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0, "type": "linear"}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear"}, {"rope_type": "default"}),
        ({"factor": 0.0}, {"rope_type": "default"}),
        ({"factor": 1.0, "attn_factor": 1.0}, {"rope_type": "default"}),
        ({"factor": 4.0, "type": "none"}, {"rope_type": "default"}),
        # Only yarn reads these.
        ({"original_context_length": 64, "yarn_beta_fast": 8.0}, {"rope_type": "default"}),
    ],
)
def test_the_scaling_of_rope_is_what_llama_cpp_makes_of_it(
    scaling: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = rope_of(tmp_path, **scaling)
    assert {key: value for key, value in found.items() if key != "rope_theta"} == expected


@pytest.mark.parametrize(("stated", "expected"), [({"yarn_attn_factor": 1.5}, 1.5), ({}, None)])
def test_yarn_may_state_what_attention_is_multiplied_by(
    stated: dict[str, Any], expected: float | None, tmp_path: Path
) -> None:
    found = rope_of(tmp_path, type="yarn", factor=4.0, original_context_length=64, **stated)
    assert found["attention_factor"] == expected


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"attn_factor": 0.5}, "'llama.rope.scaling.attn_factor': 0.5, which the native engine does not know"),
        ({"attn_factor": 0.5, "type": "linear", "factor": 2.0}, "'llama.rope.scaling.attn_factor': 0.5, which"),
        ({"attn_factor": 0.5, "type": "none"}, "'llama.rope.scaling.attn_factor': 0.5, which"),
        ({"factor": -2.0}, "'llama.rope.scaling.factor': -2.0, which"),
        ({"factor": math.nan, "type": "linear"}, "'llama.rope.scaling.factor': nan, which"),
        ({"factor": 0.0, "type": "yarn"}, "'llama.rope.scaling.factor': 0.0, which"),
        ({"type": "yarn"}, "has no 'llama.rope.scaling.factor'"),
    ],
)
def test_what_scales_rope_in_another_way_is_refused(scaling: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        rope_of(tmp_path, **scaling)


def test_factors_of_each_frequency_go_with_no_scaling(tmp_path: Path) -> None:
    save_small(tmp_path)
    width = read_config(tmp_path)["head_dim"] // 2
    shards = load_file(tmp_path / "model.safetensors") | {FACTORS: torch.full((width,), 2.0)}
    save_file(shards, tmp_path / "model.safetensors", {"format": "pt"})
    plain = write_gguf(tmp_path, tmp_path / "a.gguf", mostly("F32"), "llama")
    assert read_config(plain)["rope_parameters"]["factors"] == [2.0] * width
    scaled = write_gguf(tmp_path, tmp_path / "b.gguf", mostly("F32"), "llama", **{f"{SCALING}factor": 4.0})
    with pytest.raises(ModelError, match=r"has both a 'rope_freqs\.weight' and the rope scaling 'linear'"):
        read_config(scaled)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    said = r"is of the architecture 'rwkv7', which is not run from GGUF files: give the model's checkpoint in safetensors"
    with pytest.raises(ModelError, match=said):
        read_model_info(str(small(tmp_path, "rwkv7")))


def test_every_other_architecture_of_llama_cpp_is_refused_by_name(tmp_path: Path) -> None:
    others = set(gguf.MODEL_ARCH_NAMES.values()) - ARCHITECTURES.keys()
    assert len(others) > 50
    for name in sorted(others | WHAT.keys()):
        writer = gguf.GGUFWriter(str(tmp_path / f"{name}.gguf"), name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelError, match=rf"is of the architecture '{name}', which .*: (give|name) "):
            read_model_info(str(tmp_path / f"{name}.gguf"))
    assert not WHAT.keys() & ARCHITECTURES.keys()


def test_the_hf_engine_refuses_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the hf engine does not read GGUF"):
        check_weights(str(small(tmp_path)), "hf")


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        find(str(tmp_path / "nothing.gguf"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "llama-gqa-8", "llama-linear", "qwen2", "qwen3", "mistral"])
def test_a_family_computes_the_same_from_gguf(name: str, tmp_path: Path) -> None:
    """In F32, bit for bit: names, the order of rows, norms, rope and windows are those of the model."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    architecture = name.split("-")[0].replace("mistral", "llama")
    more: dict[str, Any] = {}
    if name == "llama-linear":
        more = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    if name == "mistral":
        more = {"llama__attention__sliding_window": 7}
    path = write_gguf(tmp_path, tmp_path / "model.gguf", mostly("F32"), architecture, **more)
    wanted, found = logits(open_native(tmp_path, "fp32")), logits(open_native(path, "fp32"))
    assert (wanted == found).all()


# Of the architecture llama.cpp has for them; all layers have experts, and weights of the chosen are normalised, or not.
MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("llama", {}, {"llama__attention__sliding_window": 9}),
    "qwen2-moe": ("qwen2moe", {"mlp_only_layers": []}, {}),
    "qwen3-moe": ("qwen3moe", {"decoder_sparse_step": 1, "num_hidden_layers": 2}, {}),
    "olmoe": ("olmoe", {"bos_token_id": 0, "eos_token_id": 0}, {}),
    "gpt-oss": (
        "gpt-oss",
        {},
        {
            "gpt-oss__attention__sliding_window": 7,
            "gpt-oss__rope__scaling__type": "yarn",
            "gpt-oss__rope__scaling__factor": 32.0,
            "gpt-oss__rope__scaling__original_context_length": 4096,
            "gpt-oss__rope__scaling__yarn_beta_fast": 32.0,
            "gpt-oss__rope__scaling__yarn_beta_slow": 1.0,
        },
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_computes_the_same_from_gguf(name: str, tmp_path: Path) -> None:
    architecture, changes, more = MIXTURES[name]
    tiny_model(name, **changes).save_pretrained(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", mostly("F32"), architecture, **more)
    wanted, found = logits(open_native(tmp_path, "fp32")), logits(open_native(path, "fp32"))
    assert (wanted == found).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("type_", ["MXFP4", "NVFP4", "Q4_0", "Q8_0"])
def test_each_expert_is_what_the_library_makes_of_its_blocks(type_: str, tmp_path: Path) -> None:
    architecture, _, more = MIXTURES["gpt-oss"]
    width = 128 if type_ == "NVFP4" else 96
    tiny_model("gpt-oss", intermediate_size=64, hidden_size=width).save_pretrained(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", mostly(type_), architecture, **more)
    packed = {each.name: each for each in gguf.GGUFReader(path).tensors}
    checkpoint = GgufCheckpoint(path)
    for kind, shape in (("gate", (64, width)), ("up", (64, width)), ("down", (width, 64))):
        joined = packed[f"blk.1.ffn_{kind}_exps.weight"]
        wanted = gguf.dequantize(joined.data, joined.tensor_type)
        if type_ == "NVFP4":
            wanted = wanted * packed[f"blk.1.ffn_{kind}_exps.scale"].data[:, None, None]
        for expert in range(6):
            found = checkpoint.rows(Tensor(f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight", shape), 5, shape[0])
            # The number of a matrix multiplies its scales here, and the library's numbers above.
            np.testing.assert_allclose(found, wanted[expert, 5:], rtol=2e-7 if type_ == "NVFP4" else 0, atol=0)
    checkpoint.close()
    assert np.isfinite(logits(open_native(path, "w4a8"))).all()


def test_groups_of_zeros_in_mxfp4_are_read(tmp_path: Path) -> None:
    """llama.cpp writes them with the scale 2^-127; such a file was refused in every precision."""

    def with_zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.0.mlp.down_proj.weight"][:, 32:64] = 0
        return tensors

    source = rewritten(save_small(tmp_path / "plain"), with_zeros)
    path = write_gguf(source, tmp_path / "model.gguf", mostly("MXFP4"))
    packed = {each.name: each for each in gguf.GGUFReader(path).tensors}["blk.0.ffn_down.weight"]
    assert (packed.data.reshape(len(packed.data), -1, 17)[:, 1, 0] == 0).all()
    for precision in ("bf16", "w4a8"):
        assert np.isfinite(logits(open_native(path, precision))).all()


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(POCKET, tmp_path_factory.mktemp("pocket") / "pocket.gguf", mostly("Q4_0"))


def test_the_tokenizer_inside_is_the_models_own(pocket: Path) -> None:
    wanted, found = Tokenizer(POCKET), Tokenizer(pocket)
    for sample in TEXTS:
        assert found.encode(sample) == wanted.encode(sample)
        assert found.decode(found.encode(sample)) == wanted.decode(wanted.encode(sample))
    conversation = [{"role": "user", "content": "hello"}]
    assert found.encode_rendered(found.render(conversation)) == wanted.encode_rendered(wanted.render(conversation))
    assert found.meanings() == wanted.meanings()
    assert [found.token_bytes.bytes_of(token) for token in range(300)] == [
        wanted.token_bytes.bytes_of(token) for token in range(300)
    ]
    assert read_model_info(str(pocket)).end_tokens == read_model_info(str(POCKET)).end_tokens


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ("<|eot_id|> <|end_of_text|> <|eom_id|> <|endoftext|>", (0, 1, 2, 3, 4)),
        ("<|end|> <|fim_pad|>", (0, 1)),
        ("<|end|> <|return|>", (0, 1, 2)),
        ("<|end|> <|return|> <|call|>", (0, 2, 3)),
        ("<|im_end|>! t1! <|eot_id|>", (0, 1, 3)),
        ("<turn|> </s>! <|tool_response>", (0, 1, 3)),
    ],
)
def test_a_text_ends_with_each_token_that_llama_cpp_ends_one_with(
    texts: str, ends: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control tokens by their texts, the user's own, too, beside the one that the metadata names; an ordinary token of such
    a text is text."""
    tokens = ["t0", *texts.replace("!", "").split(), "</s>" if "</s>" not in texts else "t9"]
    users = [False, *(token.endswith("!") for token in texts.split())]

    def fill(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
        others = [f"t{number}" for number in range(len(tokens), config["vocab_size"])]
        writer.add_token_list(tokens + others)
        control = [gguf.TokenType.USER_DEFINED if own else gguf.TokenType.CONTROL for own in users]
        writer.add_token_types(control + [gguf.TokenType.NORMAL] * (1 + len(others)))
        writer.add_eos_token_id(0)

    monkeypatch.setattr(gguf_models, "add_tokenizer", fill)
    assert read_model_info(str(small(tmp_path))).end_tokens == ends


def test_it_is_told_what_a_file_would_have_of_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_model_info(str(small(tmp_path)))
    assert plain.unfollowed == plain.sampling == ()
    usual = gguf_models.add_tokenizer

    def fill(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
        usual(writer, source, config)
        writer.add_array("tokenizer.ggml.suppress_tokens", [3, 4])

    monkeypatch.setattr(gguf_models, "add_tokenizer", fill)
    more: dict[str, Any] = {"temp": 0.5, "top_k": 20, "penalty_repeat": 1.25}
    keys = {f"general__sampling__{name}": value for name, value in more.items()}
    found = read_model_info(str(small(tmp_path, "llama", **keys)))
    assert set(found.unfollowed) == {"repetition_penalty", "suppress_tokens"}
    assert dict(found.sampling) == {"temperature": 0.5, "top_k": 20}


def tokenizer_file(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


PIECES = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
WORDS = ["▁", "a", "b", "c", "ab", "▁a", "bc", "▁ab", "abc"]


def test_sentence_pieces_are_joined_by_their_scores(tmp_path: Path) -> None:
    pieces = [*PIECES, *((word, -float(rank)) for rank, word in enumerate(WORDS))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece for piece, _ in pieces])
        writer.add_token_scores([score for _, score in pieces])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    found = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
    # What transformers makes of such a sentencepiece model: unions in the order of their scores.
    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "a"), ("b", "c"), ("▁a", "b"), ("▁", "ab"), ("ab", "c"), ("a", "bc")]
    wanted = Fast(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    wanted.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    wanted.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for sample in ("abc", "ab bc", "a ä b", "cab"):
        ids = found(sample)["input_ids"]
        assert ids == [1, *wanted.encode(sample).ids]
        assert found.decode(ids, skip_special_tokens=True) == sample


def test_pieces_whose_scores_are_one_number_are_joined_in_the_order_of_their_ids(tmp_path: Path) -> None:
    """So llama.cpp's converter writes models that have a tokenizer.json only (``gguf.LlamaHfVocab``)."""
    own = Fast(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = [piece for piece, _ in PIECES]
    own.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=first, show_progress=False))
    own.pre_tokenizer = None
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(folder)
    tokens, scores, kinds = zip(*gguf.LlamaHfVocab(folder).all_tokens(), strict=True)
    assert set(scores) == {-1000.0}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)

    found = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
    # (The trainer makes bytes special tokens, which they are not.)
    samples = [line for line in lines if line and "<0x" not in line]
    assert [found(line)["input_ids"] for line in samples] == [[1, *own.encode(line).ids] for line in samples]


def test_pieces_whose_scores_are_chances_are_those_of_a_unigram_model(tmp_path: Path) -> None:
    """llama.cpp's converter writes these like byte pairs; transformers loads such a sentencepiece model as what it is."""
    own = Fast(models.Unigram())
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    own.train_from_iterator(lines, trainers.UnigramTrainer(vocab_size=600, show_progress=False))
    others, more = {piece for piece, _ in PIECES}, ["<mask>", "[PAD1]"]
    trained = [each for each in json.loads(own.to_str())["model"]["vocab"] if each[0] not in (*others, *more)]
    scores = [float(np.float32(score)) for _, score in (*PIECES, *trained)]
    tokens = [token for token, _ in (*PIECES, *trained)]
    wanted = Fast(models.Unigram(list(zip(tokens, scores, strict=True)), 0, byte_fallback=True))
    wanted.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*tokens, *more])
        writer.add_token_scores([*scores, -1000.0, -1000.0])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(trained), 4, 5])

    found = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
    samples = [line for line in lines if line and "<" not in line]
    assert len(samples) > 400
    assert [found(line)["input_ids"] for line in samples] == [[1, *wanted.encode(line).ids] for line in samples]
    assert found.decode(found("é a")["input_ids"], skip_special_tokens=True) == "é a"
    assert len(tokens) in found(f"a{more[0]}")["input_ids"]
    scores[-1] = math.nan
    with pytest.raises(ModelError, match="has a score that is not a finite number"):
        gguf_tokenizer(tokenizer_file(tmp_path / "other.gguf", fill))


def test_gpt_4os_cut_is_the_published_pattern() -> None:
    published = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert PRE_TOKENIZERS["gpt-4o"].steps == (published,)


# Bytes are letters here: a space is Ġ.
PIECES_OF = {
    "glm4": ["It", "'s", "Ġ", "123", "4", "Ġ(", "ok", ")"],
    "dbrx": ["It", "'s", "Ġ", "123", "4", "Ġ(", "ok", ")"],
    "stablelm2": ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ(", "ok", ")"],
    "olmo": ["It", "'s", "Ġ1234", "Ġ(", "ok", ")"],
    "exaone": ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ(", "ok", ")"],
    "exaone4": ["It", "'s", "Ġ1234", "Ġ(", "ok", ")"],
    "hunyuan-dense": ["It", "'s", "Ġ", "123", "4", "Ġ(", "ok", ")"],
    "falcon": ["It", "'", "s", "Ġ", "123", "4", "Ġ", "(", "ok", ")"],
    "seed-coder": ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġ(", "ok", ")"],
}


@pytest.mark.parametrize("cut", PIECES_OF)
def test_a_text_is_cut_as_the_models_own_tokenizer_cuts_it(cut: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(["a"])
        writer.add_token_merges([])

    cutting = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill)).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cutting.pre_tokenize_str("It's 1234 (ok)")] == PIECES_OF[cut]


@pytest.mark.parametrize(
    ("cut", "tokens"), [("glm4", [3]), ("smaug-bpe", [3]), ("chatglm-bpe", [0, 1, 2]), ("olmo", [0, 1, 2])]
)
def test_a_word_that_is_a_token_need_not_be_joined(cut: str, tokens: list[int], tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(["a", "b", "c", "abc"])
        writer.add_token_merges([])

    assert gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))("abc")["input_ids"] == tokens


def test_gemma_4s_pieces_are_joined_as_its_file_lists(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["<unk>", "<bos>", "▁", "a", "b", "▁a", "▁▁", "<0xC3>", "<0xA4>"])
        writer.add_token_types([2, 3, 1, 1, 1, 1, 1, 6, 6])
        writer.add_token_merges(["▁ ▁", "▁ a"])
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)

    found = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
    text = "b a  aä"
    assert found(text)["input_ids"] == [1, 4, 5, 6, 3, 7, 8]
    assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text


def test_runs_of_spaces_that_a_gemma_file_lists_are_tokens(tmp_path: Path) -> None:
    """llama.cpp's converter writes them with spaces, as tokens of the user's, and no space stands before a text."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<bos>", "  ", "   ", "\n\n", "a", "▁a", "▁"])
        writer.add_token_scores([-1000.0] * 5 + [-5.0, -6.0, -7.0])
        writer.add_token_types([2, 3, 4, 4, 4, 1, 1, 1])
        writer.add_bos_token_id(1)
        writer.add_add_space_prefix(False)

    found = gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
    text = "a   a  \n\n a"
    assert found(text)["input_ids"] == [1, 5, 3, 5, 2, 4, 6]
    assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(("cut", "first"), [("llama-bpe", [1]), ("tekken", [1]), ("gpt-2", []), ("qwen2", [])])
def test_where_a_file_does_not_say_a_text_begins_as_in_llama_cpp(cut: str, first: list[int], tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(["a", "<s>"])
        writer.add_token_types([gguf.TokenType.NORMAL, gguf.TokenType.CONTROL])
        writer.add_token_merges([])
        writer.add_bos_token_id(1)

    assert gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))("a")["input_ids"] == [*first, 0]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        # Falcon H1's own is another than llama.cpp's of this name.
        ("falcon-h1", "cuts text in the way 'falcon-h1', which is not known here; run the model from its own files"),
        ("default", 'does not say how it cuts text ("tokenizer.ggml.pre"): convert the model anew, or take a newer file'),
        (None, "does not say how it cuts text"),
    ],
)
def test_a_way_of_cutting_text_that_is_not_known_is_refused(cut: str | None, said: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if cut is not None:
            writer.add_tokenizer_pre(cut)
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])

    with pytest.raises(ModelError, match=re.escape(said)):
        gguf_tokenizer(tokenizer_file(tmp_path / "t.gguf", fill))
