"""Writes llama_cpp_tokens.json: the words into which llama.cpp splits texts, and its tokens.

    cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target llama    # in llama.cpp, of July 2026
    L=/the/path/to/llama.cpp
    g++ -std=c++17 -O1 -I$L/src -I$L/include -I$L/ggml/include llama_cpp_tokens.cpp -o /tmp/llama_cpp_tokens \\
        -L$L/build/bin -lllama -lggml -lggml-base -Wl,-rpath,$L/build/bin
    cd tests/support && PYTHONPATH=. python make_llama_cpp_tokens.py /tmp/llama_cpp_tokens

Words are kept as their lengths; null is where llama.cpp approximates a pattern (``APPROXIMATED``) and differs from ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_cpp_tokens import ANSWERS, APPROXIMATED, CASES, byte_level, texts, texts_with_special_tokens, write_tokens

from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS


def ask(program: str, file: Path, asked: list[str]) -> list[tuple[list[int], list[int]]]:
    lines = "".join(f"{text.encode().hex()}\n" for text in asked)
    found = subprocess.run([program, str(file)], input=lines, capture_output=True, text=True, check=True).stdout
    answers = []
    for line in found.splitlines():
        words, _, ids = line.partition("\t")
        answers.append(([len(bytes.fromhex(word).decode()) for word in words.split()], [int(id_) for id_ in ids.split()]))
    return answers


def main(program: str) -> None:
    folder = Path(tempfile.mkdtemp())
    words: dict[str, list[list[int] | None]] = {}
    for name, cut in PRE_TOKENIZERS.items():
        if name == "gpt2":  # llama.cpp has no pre-tokenizer of this name
            continue
        asked = ask(program, write_tokens(folder / "t.gguf", byte_level(), {"pre": name}), texts())
        theirs: list[list[int] | None] = [lengths for lengths, _ in asked]
        if name in APPROXIMATED:
            own = cut.build()
            ours = [[stop - start for _, (start, stop) in own.pre_tokenize_str(text)] for text in texts()]
            theirs = [each if each == mine else None for each, mine in zip(theirs, ours, strict=True)]
        words[name] = theirs
    ids = {
        name: [found for _, found in ask(program, write_tokens(folder / "t.gguf", *case), texts_with_special_tokens())]
        for name, case in CASES.items()
    }
    # Equal results are stored once.
    kinds = {json.dumps(found): found for found in words.values()}
    names = [[name for name, found in words.items() if json.dumps(found) == kind] for kind in kinds]
    lines = [json.dumps({"names": these, "words": found}) for these, found in zip(names, kinds.values(), strict=True)]
    text = '{"words": [\n' + ",\n".join(lines) + '\n],\n"ids": {\n'
    text += ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in ids.items()) + "\n}}\n"
    ANSWERS.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
