"""llama.cpp in the race, through its C interface: plain decoding, and the loop of its own speculative example."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from llama_gguf import convert
from protocol import Answer, Setup, candidates, serve

BATCH = 512


class Model:
    """A model and the cache of one row."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        model_settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_settings)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.length = 0

    def truncate(self, length: int) -> None:
        if length < self.length:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, length, -1)
            self.length = length

    def feed(self, tokens: Sequence[int], choose: int) -> list[int]:
        """The best token after each of the last ``choose`` tokens."""
        chosen: list[int] = []
        for start in range(0, len(tokens), BATCH):
            piece = tokens[start : start + BATCH]
            batch = self._batch
            batch.n_tokens = len(piece)
            for index, token in enumerate(piece):
                batch.token[index], batch.pos[index] = token, self.length + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = start + index >= len(tokens) - choose
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise SystemExit(f"llama.cpp: llama_decode of {len(piece)} tokens returned {status}")
            self.length += len(piece)
            chosen += [self._best(index) for index in range(len(piece)) if batch.logits[index]]
        return chosen

    def _best(self, index: int) -> int:
        scores = llama_cpp.llama_get_logits_ith(self._context, index)
        array = np.ctypeslib.as_array(ctypes.cast(scores, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))
        return int(array.argmax())


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        paths = [
            convert(Path(path), Path(setup.work) / f"{Path(path).name}-q4_0.gguf") for path in (setup.target, setup.draft)
        ]
        self._target, self._draft = (Model(path, setup.threads, setup.longest) for path in paths)
        self.modes = ["plain", *(f"k={count}" for count in setup.draft_tokens)]
        self.about = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}, Q4_0, head in Q8_0"

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer:
        target, draft, most = self._target, self._draft, candidates(mode)
        target.truncate(0)
        draft.truncate(0)
        row = prompt + target.feed(prompt, 1)
        passes, end = 1, len(prompt) + new_tokens
        while len(row) < end:
            guess: list[int] = []
            count = min(most, end - len(row) - 1)
            while len(guess) < count:
                guess += draft.feed((row + guess)[draft.length :], 1)
            chosen = target.feed(row[-1:] + guess, len(guess) + 1)
            passes += 1
            held = next((i for i, token in enumerate(guess) if token != chosen[i]), len(guess))
            row += chosen[: held + 1]
            # The last token of the row is in neither cache yet.
            target.truncate(len(row) - 1)
            draft.truncate(len(row) - 1)
        return Answer(row[len(prompt) :], passes)


if __name__ == "__main__":
    serve(LlamaCpp)
