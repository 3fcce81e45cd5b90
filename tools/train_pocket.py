"""Train the bundled pocket models: a tiny Llama target and its two drafts, on Python's own standard library.

    python tools/train_pocket.py --out workers/pocket --target-minutes 45 --draft-minutes 20 --parallel-minutes 10

Nothing is downloaded: the corpus is the source of the interpreter that runs this script. One module in fifty is held
out (chosen by a hash of its path) and only ever used to report the loss. Minutes are CPU minutes divided by the number
of threads, so that a busy machine makes the training slower, not worse.

Three things shape the pair for its job:

* the last third of the target's training rounds half of its forward passes to int4 (group 128), straight-through, so
  that the shipped weights survive round-to-nearest quantisation as a larger model's would;
* the last part of each runs on sequences as long as the context, so that 4,096 tokens really work;
* the draft learns from the target's own distribution as well as from the text, because what counts is how often the
  two agree.

The parallel draft begins as the draft, and is adapted as ``train_parallel.py`` adapts any other.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from optimizers import Optimizers, refuse_old_torch
from option_values import at_least, make_folder, not_negative
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_parallel import cpu_minutes, loaded, own_answers, save_parallel, train_parallel, with_mask_token
from training_files import replacing, told_at_the_end
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.workers.errors import ModelError, first_line

VOCABULARY = 4096
CONTEXT = 4096
END_OF_TEXT = "<|endoftext|>"
GROUP = 128
LOSS_SLICE = 1024
RATE = {"target": 4e-3, "draft": 6e-3, "parallel": 3e-3}
# For the parallel draft: tokens of text in a step, tokens of a window, and own answers of the target.
PARALLEL_TOKENS, PARALLEL_WINDOW, PARALLEL_ANSWERS = 2048, 256, 1200
# A chat is rendered like a Python file: messages of the user as comments, answers as code.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n\n"
    "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
    "{% endfor %}"
)

SHAPES: dict[str, dict[str, int]] = {
    "target": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2
    ),
    "draft": dict(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2
    ),
}


def read_corpus() -> tuple[list[str], list[str]]:
    """The library's modules as (training, held out), each text once, in a stable order."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: list[str] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the library's tests keep a few files in other encodings on purpose
        digest = hashlib.sha256(text.encode()).digest()
        # Generated tables (code pages, token lists) are most of a file's bytes and teach a model nothing.
        if digest in seen or not len(text) > 200 or text.count("\\x") > len(text) / 40:
            continue
        seen.add(digest)
        bucket = int.from_bytes(hashlib.sha256(str(relative).encode()).digest()[:4], "big") % 50
        (held_out if bucket == 0 else training).append(text)
    return training, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream, each introduced by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream.append(end)
        stream.extend(encoding.ids)
    return np.asarray(stream, dtype=np.int64)


def new_model(role: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        **SHAPES[role],
    )
    return LlamaForCausalLM(config)


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """The matrix rounded to nearest int4: asymmetric, in groups of 128 inputs, of which the last may be shorter."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % GROUP))
    groups = padded.view(rows, -1, GROUP)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8)
    zero = (-low / scale).round()
    quantised = ((groups / scale).round() + zero).clamp(0, 15)
    return ((quantised - zero) * scale).view(rows, -1)[:, :columns]


@contextmanager
def rounded_weights(model: LlamaForCausalLM) -> Iterator[None]:
    """Replaces every matrix by its int4 rounding within the block; gradients apply to the exact weights after it."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    exact = [parameter.data for parameter in matrices]
    for parameter in matrices:
        parameter.data = round_to_int4(parameter.data)
    try:
        yield
    finally:
        for parameter, data in zip(matrices, exact, strict=True):
            parameter.data = data


def batches(stream: np.ndarray, tokens: int, length: int, generator: np.random.Generator) -> torch.Tensor:
    starts = generator.integers(0, len(stream) - length - 1, size=max(1, tokens // length))
    return torch.from_numpy(np.stack([stream[start : start + length + 1] for start in starts]))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray, length: int) -> float:
    """Mean negative log-likelihood, in nats a token, over windows that do not overlap."""
    total = count = 0.0
    for start in range(0, len(stream) - length - 1, length):
        window = torch.from_numpy(stream[start : start + length + 1])[None]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
        count += length
    return total / count


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: np.ndarray, length: int = 1024) -> float:
    """The share of held-out positions at which both would choose the same token."""
    same = count = 0
    for start in range(0, len(stream) - length, length):
        window = torch.from_numpy(stream[start : start + length])[None]
        choices = [model(input_ids=window, use_cache=False).logits.argmax(-1) for model in (target, draft)]
        same += int((choices[0] == choices[1]).sum())
        count += length
    return same / count


def backward(model: LlamaForCausalLM, window: torch.Tensor, teacher: LlamaForCausalLM | None) -> float:
    """Computes the gradients of the loss on one batch. Logits are computed in slices that fit the processor's caches."""
    wanted = window[:, 1:].flatten()
    hidden = model.model(input_ids=window[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    leaf = hidden.detach().requires_grad_()
    if teacher is not None:
        with torch.no_grad():
            known = teacher.model(input_ids=window[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    total = 0.0
    for start in range(0, len(wanted), LOSS_SLICE):
        part = slice(start, start + LOSS_SLICE)
        scores = model.lm_head(leaf[part]).float()
        loss = F.cross_entropy(scores, wanted[part], reduction="sum") / len(wanted)
        total += loss.item()
        if teacher is not None:
            with torch.no_grad():
                likely = teacher.lm_head(known[part]).float().softmax(-1)
            loss = 0.2 * loss + 0.8 * F.cross_entropy(scores, likely, reduction="sum") / len(wanted)
        loss.backward()
    hidden.backward(leaf.grad)
    return total


def train(
    role: str, stream: np.ndarray, held_out: np.ndarray, minutes: float, teacher: LlamaForCausalLM | None, save
) -> LlamaForCausalLM:
    torch.manual_seed(7)
    generator = np.random.default_rng(7)
    model = new_model(role)
    print(f"{role}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embedding]
    optimizers = Optimizers(matrices, others, RATE[role], weight_decay=0.05)
    share_done = cpu_minutes(minutes)
    step, seen, next_report = 0, 0, 0.0
    while (progress := share_done(step)) < 1:
        warm = min(1.0, (step + 1) / 50)
        rate = warm * (1.0 if progress < 0.4 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.4) / 0.6)))
        length = 256 if progress < 0.15 else 512 if progress < 0.8 else CONTEXT if step % 2 else 512
        window = batches(stream, 8192, length, generator)
        rounded = role == "target" and progress > 0.65 and step % 4 < 2
        # The backward pass must read the weights that the forward pass saw.
        with rounded_weights(model) if rounded else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            loss = backward(model, window, teacher)
        optimizers.step(rate)
        step, seen = step + 1, seen + window.shape[0] * length
        if progress >= next_report:
            next_report += 0.05
            print(
                f"{role} {progress:4.0%} step {step} tokens {seen / 1e6:.1f}M loss {loss:.3f} "
                f"held-out {held_out_loss(model, held_out[:30_000], 1024):.3f}",
                flush=True,
            )
            save(role, model)
    save(role, model)
    return model


def tokenizer_of(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own for unreadable files
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error


def train_all(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)

    training_texts, held_out_texts = read_corpus()
    # A target that is kept keeps its tokenizer.
    kept = arguments.out / "target" / "tokenizer.json"
    tokenizer = train_tokenizer(training_texts) if arguments.target_minutes else tokenizer_of(kept)
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    print(f"corpus: {len(training):,} tokens to train on, {len(held_out):,} held out", flush=True)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE

    def save(role: str, model: LlamaForCausalLM) -> None:
        shipped = copy.deepcopy(model).to(torch.bfloat16)
        with replacing(arguments.out / role, arguments.out / f"{role}.partial") as partial:
            # Stored in bf16 to halve the size; "dtype" float32 makes full precision the default.
            shipped.save_pretrained(partial)
            config = {**json.loads((partial / "config.json").read_text()), "dtype": "float32"}
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            wrapped.save_pretrained(partial)

    if arguments.target_minutes:
        target = train("target", training, held_out, arguments.target_minutes, None, save)
    else:
        target = loaded(arguments.out / "target")
    if arguments.draft_minutes:
        train("draft", training, held_out, arguments.draft_minutes, target, save)
    if arguments.parallel_minutes:
        draft = loaded(arguments.out / "draft")
        mask_token = with_mask_token(draft, VOCABULARY)
        streams = [training, own_answers(target, training, PARALLEL_ANSWERS)]
        share_done = cpu_minutes(arguments.parallel_minutes)
        given = (mask_token, share_done, RATE["parallel"], PARALLEL_TOKENS, PARALLEL_WINDOW)
        source, out = arguments.out / "draft", arguments.out / "parallel"
        train_parallel(
            draft, target, streams, held_out, *given, lambda model: save_parallel(model, source, out, mask_token)
        )

    shipped = {role: loaded(arguments.out / role) for role in SHAPES}
    figures = {
        "held_out_tokens": len(held_out),
        "held_out_loss": {role: round(held_out_loss(model, held_out, 1024), 4) for role, model in shipped.items()},
        "held_out_loss_at_full_context": round(held_out_loss(shipped["target"], held_out, CONTEXT - 1), 4),
        "greedy_agreement": round(agreement(shipped["target"], shipped["draft"], held_out), 4),
    }
    with torch.no_grad(), rounded_weights(shipped["target"]):
        figures["held_out_loss_int4_rtn"] = round(held_out_loss(shipped["target"], held_out, 1024), 4)
    (arguments.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for role, minutes in (("target", 45), ("draft", 20), ("parallel", 10)):
        said = f"0 keeps the {role} model that is there"
        parser.add_argument(f"--{role}-minutes", type=not_negative, default=minutes, help=said)
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    arguments = parser.parse_args()
    for role in SHAPES:
        # The figures need both models, kept or newly trained.
        kept = arguments.out / role
        if not getattr(arguments, f"{role}_minutes") and not (kept / "config.json").is_file():
            parser.error(f"--{role}-minutes 0 keeps the {role} that is there, and {kept} has no config.json")
    refuse_old_torch(parser)
    make_folder(parser, "--out", arguments.out)
    with told_at_the_end(parser, arguments.out, "*/config.json"):
        train_all(arguments)


if __name__ == "__main__":
    main()
