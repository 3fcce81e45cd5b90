"""Models made to hang, exhaust or mislead whoever opens them: each is refused in a sentence before anything starts."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_models import save_tiny

from outrider.workers.errors import ModelError
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights, native_supports

WEIGHTS, CONFIG = "model.safetensors", "config.json"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def look_at(model: Path) -> None:
    """All that a run does with a model before it starts processes."""
    model_info = read_model_info(str(model))
    if native_supports(model_info.path) is None:
        check_weights(model_info.path, "native")


def instead(make: Callable[[Path], Any], name: str = WEIGHTS) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return spoil


def config(**changes: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        file = model / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def header(**tensors: Any) -> Callable[[Path], None]:
    text = json.dumps(tensors).encode()
    return instead(lambda file: file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64)))


def tensor(start: int, stop: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw(content: bytes) -> Callable[[Path], None]:
    return instead(lambda file: file.write_bytes(content))


def index(weight_map: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        # Beside a file of that name an index is not looked at.
        (model / WEIGHTS).rename(model / SHARD)
        (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def sparse(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def pickled(content: Callable[[Path], Any]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        (model / WEIGHTS).unlink()
        content(model / "pytorch_model.bin")

    return spoil


def bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("archive/data.pkl", bytes(1 << 20))


def zipped(pickled_: bytes) -> Callable[[Path], None]:
    """Of the form that torch writes, with this in the place of its pickle."""

    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as members:
            members.writestr("archive/data.pkl", pickled_)
            members.writestr("archive/version", "3\n")
            for number in range(21):
                members.writestr(f"archive/data/{number}", bytes(100_000))

    return write


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (instead(os.mkfifo), "is a pipe, where a regular file is needed"),
    "a pipe for a configuration": (instead(os.mkfifo, CONFIG), "is a pipe"),
    "a pipe for generation settings": (instead(os.mkfifo, "generation_config.json"), "is a pipe"),
    "a pipe for a tokenizer": (instead(os.mkfifo, "tokenizer.json"), "is a pipe"),
    "a directory": (instead(Path.mkdir), "is a directory"),
    "a device": (instead(lambda file: file.symlink_to("/dev/zero")), "is a device"),
    "a link loop": (instead(lambda file: file.symlink_to(file.name)), "cannot be read: Too many levels"),
    "a dangling link": (instead(lambda file: file.symlink_to("gone")), "cannot be read: No such file"),
    "a sparse file": (instead(sparse), "of which only 0 were ever written"),
    "an endless header": (raw(struct.pack("<Q", 1 << 63) + bytes(64)), "not a whole safetensors file"),
    "a deep header": (raw(struct.pack("<Q", 200_000) + b"[" * 200_000), "nested too deeply"),
    "a list for a header": (raw(struct.pack("<Q", 2) + b"[]"), "no JSON object"),
    "doubled weights": (raw(struct.pack("<Q", 16) + b'{"a":{},"a":{}} '), "stands there twice"),
    "negative offsets": (header(a=tensor(-16, 0, [4])), "lies at -16 to 0"),
    "offsets backwards": (header(a=tensor(16, 0, [4])), "lies at 16 to 0"),
    "overlapping weights": (header(a=tensor(0, 64, [16]), b=tensor(32, 64, [8])), "overlaps another"),
    "a hole": (header(a=tensor(32, 64, [8])), "leaves 32 bytes before it to nobody"),
    "surplus bytes": (header(a=tensor(0, 32, [8])), "its header says"),
    "too few bytes": (header(a=tensor(0, 128, [32])), "is truncated"),
    "a size that wraps": (header(a=tensor(0, 64, [1 << 32, 1 << 32, 16])), "needs others"),
    "a negative shape": (header(a=tensor(0, 64, [-4, -4])), "has no shape"),
    "a shape of truths": (header(a=tensor(0, 4, [True])), "has no shape"),
    "a number for a type": (header(a=tensor(0, 64, [16], 7)), "has no type"),
    "an escape in a name": (header(**{"\x1b[31m\n": tensor(0, 4, [16])}), r"weight '\\x1b\[31m\\n' has"),
    "an index of lists": (index({"a": [SHARD]}), "must name a file for the weight 'a'"),
    "an index that is none": (index([1]), 'has no "weight_map"'),
    "an index that climbs": (index({"a": "../../etc/passwd"}), "must name a file beside it"),
    "an index to elsewhere": (index({"a": "/etc/passwd"}), "must name a file beside it"),
    "an index of what is not there": (index({"a": "b.safetensors"}), "lacks 'b.safetensors'"),
    "an index of what is elsewhere": (index({"a": SHARD}), "lacks the weight 'a', which"),
    "a garbage pickle": (pickled(lambda file: file.write_bytes(b"garbage")), "is no checkpoint of torch"),
    "a garbage pickle in a whole zip": (pickled(zipped(b"garbage")), "is damaged: its pickle cannot be read"),
    "half a pickle in a whole zip": (pickled(zipped(pickle.dumps({"a": len}, 2)[:-3])), "is damaged|truncated"),
    "a pickle with a program": (pickled(zipped(b"cos\nsystem\n(S'id'\ntR.")), "holds more than weights; --allow-pickle"),
    "a packed pickle": (pickled(bomb), "has compressed members"),
    "a billion layers": (config(num_hidden_layers=10**9), "asks for 1,000,000,000 layers, the files hold 21 weights"),
    "an endless width": (config(hidden_size=10**9), "asks for more than the files hold"),
    "an endless vocabulary": (config(vocab_size=10**12), "asks for more than the files hold"),
    "endless heads": (config(head_dim=10**9), "asks? for more"),
    "an endless context": (config(max_position_embeddings=10**18), "must be at most 2,147,483,647"),
    "more layers than there are": (config(num_hidden_layers=3), 'lacks the weight "model.layers.2'),
    "a deep configuration": (instead(lambda file: file.write_text("[" * 10**6), CONFIG), "nested too deeply"),
    "a vast configuration": (instead(lambda file: os.truncate(file.touch() or file, 1 << 30), CONFIG), "larger than 16 MB"),
    "an end that is a letter": (
        instead(lambda file: file.write_text('{"eos_token_id": "a"}'), "generation_config.json"),
        '"eos_token_id" must be a token id',
    ),
    "generation settings that are none": (
        instead(lambda file: file.write_text("garbage"), "generation_config.json"),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_model_is_refused(kind: str, model: Path) -> None:
    spoil, sentence = HOSTILE[kind]
    spoil(model)
    with pytest.raises(ModelError, match=sentence) as caught:
        look_at(model)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


NEVER: tuple[Any, ...] = (
    0,
    -1,
    1.5,
    "a",
    True,
    [],
    {},
    10**9,
    10**30,
    10**400,
    math.nan,
    math.inf,
    [[1]],
    {"rope_type": ["a"]},
)
NEVER += ({"rope_theta": "x"}, {"rope_theta": 10**400}, {"rope_type": "linear", "factor": "x"})


@pytest.mark.parametrize("one_of", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_no_value_of_a_configuration_is_more_than_a_refusal(model: Path, one_of: int) -> None:
    """Some are harmless; all others are a ModelError, or a reason against the native engine."""
    file = model / CONFIG
    settings = json.loads(file.read_text())
    for number, key in enumerate([*settings, "rope_scaling", "text_config", "quantization_config", "sliding_window"]):
        for value in NEVER[number % one_of :: one_of]:
            file.write_text(json.dumps(settings | {key: value}))
            try:
                look_at(model)
            except ModelError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": 0}, "the rope type 'linear' misstates 'factor': 0"),
        ({"rope_type": "linear", "factor": "2"}, "the rope type 'linear' misstates 'factor': '2'"),
        ({"rope_type": "linear", "factor": True}, "the rope type 'linear' misstates 'factor': True"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": math.inf}, "gives frequencies that are not finite"),
        ({"rope_theta": math.inf}, "a rope base of inf is not supported"),
        ({"rope_theta": 1e39}, "a rope base of 1e+39 is not supported"),
    ],
)
def test_a_rope_without_frequencies_is_refused(rope: dict[str, Any], said: str, model: Path) -> None:
    """They were packed, and the first actor ended by an exception without a word."""
    config(rope_parameters={"rope_theta": 1e4, **rope})(model)
    assert said in str(native_supports(str(model)))


def test_the_whole_model_is_taken(model: Path) -> None:
    look_at(model)
