"""Train an EAGLE-3 head for the bundled pocket target, on Python's own standard library.

    python tools/train_pocket_head.py --out workers/pocket/head --minutes 40

Nothing is downloaded. The corpus, its held-out part and the tokenizer are those of tools/train_pocket.py; minutes are CPU
minutes divided by the number of threads. With ``--answers`` every second step is on text that the target itself wrote,
which is what the head will have to foresee.

The head begins as what the target does itself: ``fc`` hands on the last of the three states, the layer is the target's last
one, and the head's rows are the target's embedding's. It learns the target's own distribution, several steps deep: step 0
reads the target's states, later ones what the step before put out, as when it proposes (EAGLE-3 calls that training-time
test).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from optimizers import Optimizers, refuse_old_torch
from option_values import at_least, make_folder, positive, share
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_parallel import cpu_minutes, loaded, own_answers
from train_pocket import CONTEXT, END_OF_TEXT, SHAPES, VOCABULARY, batches, encode, read_corpus, tokenizer_of
from training_files import replacing, told_at_the_end
from transformers import LlamaForCausalLM

from outrider.workers.errors import ModelError, first_line
from outrider.workers.models.files import read_json

STEPS = 4
STEP_WEIGHT = 0.8
RATE = 5e-3
# The share of the training with one step only: each further step costs as much as the first.
SHALLOW = 0.6
# The head's vocabulary is that many of the target's most frequent tokens, so that the head takes less than 4 MB.
DRAFT_VOCABULARY = 3072
LENGTH, BATCH_TOKENS = 512, 4096
MIDLAYER = "midlayer."


class Norm(nn.Module):
    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class Head(nn.Module):
    """EAGLE-3: one layer whose attention reads [embedding of a token, state]."""

    def __init__(self, target: LlamaForCausalLM, chosen: Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        config = target.config
        self.heads, self.kv_heads, self.head_size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.embedding = target.model.embed_tokens.weight.detach()
        last = target.model.layers[-1]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.input_layernorm = Norm(torch.ones(hidden), epsilon)
        self.hidden_norm = Norm(last.input_layernorm.weight, epsilon)
        self.post_attention_layernorm = Norm(last.post_attention_layernorm.weight, epsilon)
        self.norm = Norm(target.model.norm.weight, epsilon)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * hidden, rows * self.head_size, bias=False) for rows in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.o_proj = nn.Linear(self.heads * self.head_size, hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, config.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, len(chosen), bias=False)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, 2 * hidden :] += torch.eye(hidden)
            for ours, theirs in ((self.q_proj, last.self_attn.q_proj), (self.k_proj, last.self_attn.k_proj)):
                ours.weight[:, hidden:] = theirs.weight
                ours.weight[:, :hidden].mul_(0.1)
            self.v_proj.weight[:, hidden:] = last.self_attn.v_proj.weight
            self.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(self, name).weight.copy_(getattr(last.mlp, name).weight)
            self.lm_head.weight.copy_(self.embedding[chosen])
        inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, self.head_size, 2) / self.head_size)
        angles = torch.outer(torch.arange(CONTEXT).float(), inverse)
        self.angles = angles.cos(), angles.sin()

    def rotated(self, x: Tensor, first: int) -> Tensor:
        """``x`` is [rows, heads, positions, size], its first position ``first``."""
        cosine, sine = (table[first : first + x.shape[2]] for table in self.angles)
        left, right = x.float().chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_size).transpose(1, 2)

    def unrolled(self, states: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """The inputs of ``lm_head`` in each step; those of step j begin at position j.

        ``states`` are [rows, positions, 3 hidden]; each is read with the embedding of the next token, ``tokens``. In step j
        a position p attends to step 0's keys up to position p - j, and to one key of each later step after these.
        """
        group = self.heads // self.kv_heads
        length = tokens.shape[1]
        hidden = self.fc(states)
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of each step
        found = []
        for step in range(steps):
            # Positions step .. length - 1. The state of each is the output of the step before at the position before.
            embedded = self.input_layernorm(F.embedding(tokens[:, step:], self.embedding))
            both = torch.cat([embedded, self.hidden_norm(hidden)], -1)
            query = self.rotated(self.split(self.q_proj(both), self.heads), step)
            key = self.rotated(self.split(self.k_proj(both), self.kv_heads), step).repeat_interleave(group, 1)
            value = self.split(self.v_proj(both), self.kv_heads).float().repeat_interleave(group, 1)
            count = length - step
            own.append((key, value))
            (first_keys, first_values), later = own[0], own[1:]
            scores = query @ first_keys[:, :, :count].transpose(-1, -2) + torch.full((count, count), -torch.inf).triu(1)
            behind = [(query * keys[:, :, :count]).sum(-1, keepdim=True) for keys, _ in later]
            weights = torch.cat([scores, *behind], -1).mul(self.head_size**-0.5).softmax(-1)
            mixed = weights[..., :count] @ first_values[:, :, :count]
            for index, (_, values) in enumerate(later):
                mixed = mixed + weights[..., count + index, None] * values[:, :, :count]
            hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
            h = self.post_attention_layernorm(hidden)
            hidden = hidden + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
            found.append(self.norm(hidden))
            hidden = hidden[:, :-1]
        return found

    @staticmethod
    def published(name: str) -> str:
        """A parameter's name in the published layout."""
        inside = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn.")
        inside |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp.")
        inside |= dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), "")
        layer = name.split(".")[0]
        return f"{MIDLAYER}{inside[layer]}{name}" if layer in inside else name

    def tensors(self) -> dict[str, Tensor]:
        return {self.published(name): value.detach().bfloat16().contiguous() for name, value in self.named_parameters()}


def layers_of(target: LlamaForCausalLM) -> tuple[int, int, int]:
    layers = target.config.num_hidden_layers
    return 2, layers // 2, layers - 3


@torch.no_grad()
def asked(target: LlamaForCausalLM, window: Tensor) -> tuple[Tensor, Tensor]:
    """(the three states of each position side by side, the last hidden state)."""
    output = target.model(input_ids=window, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer] for layer in layers_of(target)], -1), output.last_hidden_state


def losses(head: Head, target: LlamaForCausalLM, window: Tensor, chosen: Tensor, steps: int) -> tuple[Tensor, list[float]]:
    """(loss, for each step the share of positions where the head's choice is the target's)."""
    states, last = asked(target, window)
    total, agreed = torch.zeros(()), []
    with torch.no_grad():
        scores = target.lm_head(last[:, 1:]).float()
        best, likely = scores.argmax(-1), scores[..., chosen].softmax(-1)
    for step, hidden in enumerate(head.unrolled(states[:, :-1], window[:, 1:], steps)):
        made = head.lm_head(hidden).float()
        total = total + STEP_WEIGHT**step * F.cross_entropy(made.flatten(0, 1), likely[:, step:].flatten(0, 1))
        agreed.append((chosen[made.argmax(-1)] == best[:, step:]).float().mean().item())
    return total, agreed


def save(head: Head, target: LlamaForCausalLM, chosen: Tensor, folder: Path) -> None:
    config = target.config
    taken = torch.zeros(config.vocab_size, dtype=torch.bool)
    taken[chosen] = True
    tensors = head.tensors() | {"d2t": chosen - torch.arange(len(chosen)), "t2d": taken}
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(chosen),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    with replacing(folder, folder / "head.partial") as partial:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def not_a_pocket_target(path: Path) -> str | None:
    """The reason why the model is no pocket target; None if it is one, whoever trained it."""
    config = read_json(path / "config.json")
    if (family := config.get("model_type")) != "llama":
        return f"it is of the family {family}"
    for name, value in {**SHAPES["target"], "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}.items():
        if config.get(name) != value:
            return f'its "{name}" is {config.get(name)}, not {value}'
    file = path / "tokenizer.json"
    if not file.is_file() or tokenizer_of(file).token_to_id(END_OF_TEXT) is None:
        return f"it has no tokenizer.json that knows {END_OF_TEXT}"
    return None


def begun(target: LlamaForCausalLM, folder: Path) -> Head:
    """The saved head with its own vocabulary: the most frequent tokens differ between versions of Python."""
    file = folder / "model.safetensors"
    try:
        saved = load_file(file)
        chosen = saved["d2t"] + torch.arange(len(saved["d2t"]))
        head = Head(target, chosen)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(saved[Head.published(name)])
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{file} is no head that this tool wrote for such a target: {first_line(error)}") from error
    return head


def train(arguments: argparse.Namespace, target: LlamaForCausalLM, head: Head | None) -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    generator = np.random.default_rng(arguments.seed)
    tokenizer = tokenizer_of(arguments.target / "tokenizer.json")
    training_texts, held_out_texts = read_corpus()
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    counts = np.bincount(training, minlength=target.config.vocab_size)
    if head is None:
        frequent = np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCABULARY])
        head = Head(target, torch.from_numpy(frequent))
    chosen = head.chosen
    known = counts[chosen.numpy()].sum() / counts.sum()
    print(f"corpus: {len(training):,} tokens; the head has {known:.4f} of them", flush=True)
    parameters = list(head.parameters())
    print(f"{sum(p.numel() for p in parameters):,} parameters", flush=True)
    streams = [training, own_answers(target, training, arguments.answers)] if arguments.answers else [training]
    matrices, others = ([p for p in parameters if (p.dim() == 2) is of_two] for of_two in (True, False))
    optimizers = Optimizers(matrices, others, RATE, weight_decay=0.01)
    check = batches(held_out, 16384, LENGTH, np.random.default_rng(1))
    share_done = cpu_minutes(arguments.minutes)
    step, next_report = 0, 0.0
    while (progress := share_done(step)) < 1:
        rate = min(1.0, (step + 1) / 50) * (
            1.0 if progress < 0.3 else 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - 0.3) / 0.7))
        )
        if progress >= next_report:
            next_report += 0.05
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                found = [losses(head, target, part, chosen, STEPS)[1] for part in check.split(8)]
            agreed = " ".join(f"{value:.3f}" for value in np.mean(found, 0))
            print(f"{progress:4.0%} step {step} agreement by step {agreed}", flush=True)
            save(head, target, chosen, arguments.out)
        with torch.autocast("cpu", torch.bfloat16):
            window = batches(streams[step % len(streams)], BATCH_TOKENS, LENGTH, generator)
            loss, _ = losses(head, target, window, chosen, 1 if progress < arguments.shallow else STEPS)
        loss.backward()
        optimizers.step(rate)
        step += 1
    save(head, target, chosen, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path(__file__).parents[1] / "workers" / "pocket" / "target")
    parser.add_argument("--minutes", type=positive, default=40)
    parser.add_argument("--shallow", type=share, default=SHALLOW, help="the share of them that trains a single step")
    parser.add_argument("--begin", type=Path, help="a head that an earlier training wrote, to go on with")
    parser.add_argument("--answers", type=at_least(0), default=0, help="of the target's own, for every second step")
    parser.add_argument("--seed", type=at_least(0), default=7, help="of the windows: another one to go on with a head")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    arguments = parser.parse_args()
    if not (arguments.target / "config.json").is_file():
        parser.error(f"--target: {arguments.target} has no config.json")
    if arguments.begin is not None and not (arguments.begin / "model.safetensors").is_file():
        parser.error(f"--begin: {arguments.begin} has no model.safetensors")
    try:
        reason = not_a_pocket_target(arguments.target)
    except ModelError as error:
        parser.error(f"--target: {error}")
    if reason is not None:
        parser.error(f"--target: {arguments.target} is no pocket target, which alone this trains a head for: {reason}")
    if arguments.out.resolve() == arguments.target.resolve():
        parser.error(f"--out: {arguments.out} is the target's own directory; name another")
    refuse_old_torch(parser)
    with told_at_the_end(parser, arguments.out):
        target = loaded(arguments.target).requires_grad_(False)
        try:
            head = None if arguments.begin is None else begun(target, arguments.begin)
        except ModelError as error:
            parser.error(f"--begin: {error}")
        make_folder(parser, "--out", arguments.out)
        train(arguments, target, head)


if __name__ == "__main__":
    main()
