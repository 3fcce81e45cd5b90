"""One GGUF file, read by llama.cpp and by outrider in turn: of a mixture of experts by shape, in random weights, or any.

    python benchmarks/sparse_race.py --shape qwen3-30b-a3b --layers 6 --llama-bench PATH/TO/llama-bench [--rounds 3]
    python benchmarks/sparse_race.py --shape gpt-oss-20b --layers 4 --llama-bench PATH/TO/llama-bench
    python benchmarks/sparse_race.py --file MODEL.gguf --llama-bench PATH/TO/llama-bench

Experts are Q4_0 or MXFP4, all other matrices Q8_0, as files of these models are. Both decode one row behind a short context
and read a prompt of 512 tokens, on the same number of threads; the best of each counts. The shapes are those of the
configurations in benchmarks/shapes/configs; `--layers` and `--vocabulary` make less of them. A `--file` that is there
already, of whatever model, is read as it is. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
from gguf_models import add_tokenizer  # noqa: E402

# (file of the configuration, GGUF's architecture, type of the experts).
SHAPES = {
    "qwen3-30b-a3b": ("Qwen--Qwen3-30B-A3B.json", "qwen3moe", Type.Q4_0),
    "gpt-oss-20b": ("openai--gpt-oss-20b.json", "gpt-oss", Type.MXFP4),
}
PROMPT, ANSWER = 512, 64


class Writer:
    """Writes random blocks directly, without quantising floats."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.file = gguf.GGUFWriter(str(path), architecture)
        self._random = np.random.default_rng(1)

    def vector(self, name: str, *shape: int, value: float = 1.0) -> None:
        self.file.add_tensor(name, np.full(shape, value, np.float32))

    def plain(self, name: str, *shape: int) -> None:
        values = self._random.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        self.file.add_tensor(name, values.astype(np.float32))

    def matrix(self, name: str, type_: Type, *shape: int) -> None:
        values, size = gguf.GGML_QUANT_SIZES[type_]
        count = int(np.prod(shape)) // values
        blocks = self._random.integers(0, 256, (count, size), np.uint8)
        if type_ == Type.MXFP4:
            # A scale of 2^-8: codes stand for up to 6, and rows have some thousand columns.
            blocks[:, 0] = 127 - 8
        else:
            step = shape[-1] ** -0.5 / (4.6 if type_ == Type.Q4_0 else 74.0)
            blocks[:, :2] = np.frombuffer(np.float16(step).tobytes(), np.uint8)
        self.file.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=type_)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write(path: Path, shape: str, layers: int, vocabulary: int) -> None:
    name, architecture, experts = SHAPES[shape]
    config: dict[str, Any] = json.loads((HERE / "shapes" / "configs" / name).read_text())
    oss = architecture == "gpt-oss"
    hidden, ffn = config["hidden_size"], config["intermediate_size" if oss else "moe_intermediate_size"]
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count = config.get("num_experts", config.get("num_local_experts"))
    out = Writer(path, architecture)
    file = out.file
    file.add_context_length(8192)
    file.add_embedding_length(hidden)
    file.add_block_count(layers)
    file.add_feed_forward_length(ffn)
    file.add_expert_count(count)
    file.add_expert_used_count(config["num_experts_per_tok"])
    file.add_expert_feed_forward_length(ffn)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_rope_dimension_count(head)
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_freq_base(config["rope_theta"])
    if oss:
        file.add_sliding_window(config["sliding_window"])
        file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        file.add_rope_scaling_factor(config["rope_scaling"]["factor"])
        file.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])
    with tempfile.TemporaryDirectory() as nothing:
        add_tokenizer(file, Path(nothing), {"vocab_size": vocabulary, "eos_token_id": 0, "bos_token_id": 0})
    out.matrix("token_embd.weight", Type.Q8_0, vocabulary, hidden)
    out.matrix("output.weight", Type.Q8_0, vocabulary, hidden)
    out.vector("output_norm.weight", hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        out.vector(f"{block}.attn_norm.weight", hidden)
        out.vector(f"{block}.{'post_attention_norm' if oss else 'ffn_norm'}.weight", hidden)
        for part, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            out.matrix(f"{block}.attn_{part}.weight", Type.Q8_0, rows, hidden)
            if oss:
                out.vector(f"{block}.attn_{part}.bias", rows, value=0.0)
        out.matrix(f"{block}.attn_output.weight", Type.Q8_0, hidden, heads * head)
        out.plain(f"{block}.ffn_gate_inp.weight", count, hidden)
        for part, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            out.matrix(f"{block}.ffn_{part}_exps.weight", experts, count, rows, columns)
            if oss:
                out.vector(f"{block}.ffn_{part}_exps.bias", count, rows, value=0.0)
        if oss:
            out.vector(f"{block}.attn_output.bias", hidden, value=0.0)
            out.vector(f"{block}.attn_sinks.weight", heads, value=0.0)
            out.vector(f"{block}.ffn_gate_inp.bias", count, value=0.0)
        else:
            out.vector(f"{block}.attn_q_norm.weight", head)
            out.vector(f"{block}.attn_k_norm.weight", head)
    out.close()


def time_llama(program: Path, path: Path, threads: int) -> dict[str, float]:
    command = [
        str(program),
        "-m",
        str(path),
        "-t",
        str(threads),
        "-p",
        str(PROMPT),
        "-n",
        str(ANSWER),
        "-r",
        "2",
        "-o",
        "json",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {("prompt" if each["n_prompt"] else "decoding"): float(each["avg_ts"]) for each in json.loads(said)}
    return {name: found[name] for name in ("prompt", "decoding")}


def time_ours(path: Path, precision: str, threads: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "forward.py"), "--model", str(path), "--precision", precision]
    command += ["--threads", str(threads), "--rounds", "4"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    figures = json.loads(said)
    return {
        "prompt": figures["prefill_tokens_per_second"],
        "decoding": 1e3 / figures["ms"]["1"],
        "share of stream": figures["share_of_stream"],
        "prefill's share of the peak": figures["prefill_share_of_peak"],
        "seven tokens against one": figures["ratio_m7"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--precision", default="w4a8", help="ours; llama.cpp rounds activations to 8 bits as well")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file", type=Path, help="a model, or where the shape's is to lie")
    args = parser.parse_args()
    if shutil.which(args.llama_bench) is None:
        parser.error(f"--llama-bench: {args.llama_bench} is no program")
    name = f"{args.shape}-{args.layers}-layers-{args.vocabulary}-tokens.gguf"
    path = args.file or Path(tempfile.gettempdir()) / name
    given = args.file is not None and path.exists()
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        write(partial, args.shape, args.layers, args.vocabulary)
        partial.replace(path)
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB", flush=True)
    theirs, ours = [], []
    for _ in range(args.rounds):
        theirs.append(time_llama(args.llama_bench, path, args.threads))
        ours.append(time_ours(path, args.precision, args.threads))
        print(theirs[-1], ours[-1], flush=True)
    best = {name: max(each[name] for each in ours) for name in ours[0]}
    peer = {name: max(each[name] for each in theirs) for name in theirs[0]}
    ratios = {f"{name}, times": round(best[name] / peer[name], 2) for name in peer}
    of = {"file": str(path)} if given else {"shape": args.shape, "layers": args.layers}
    print(json.dumps(of | {"outrider": best, "llama.cpp": peer} | ratios))


if __name__ == "__main__":
    main()
