"""Adapt a draft so that one pass proposes all its candidates (PARD): behind the text stand copies of one mask token.

    python tools/train_parallel.py --target TARGET --draft DRAFT --out OUT --minutes 60 corpus/*.txt

TARGET and DRAFT are local directories with the same tokenizer; OUT becomes a directory like DRAFT, whose config.json names
the mask token as ``pard_token``. Texts like those that the target is to write do best; its own answers do better still.

What the passes of such a draft will look like is trained on whole windows at once. Behind a window's tokens come blocks of
masks, each as if the text ended at a token of its own: its masks see the text up to there and the masks of their block
before them, at the positions at which their tokens will stand. Most blocks are short: a candidate counts only where all
before it held, so the first masks count most, and of the later ones a share is trained (PARD's conditional drop of tokens).
Real tokens are trained along, since what stands behind the last of them is the first candidate.

What is learned is the target's own distribution as well as the text. The mask token is an id that the tokenizer never
gives: the last of those that the vocabulary has beyond it, else one more.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from optimizers import Optimizers, refuse_old_torch
from option_values import at_least, make_folder, positive
from training_files import replacing, told_at_the_end
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from outrider.workers.errors import ModelError, first_line
from outrider.workers.models.config_file import quantisation_of
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import LONGEST_ROW, read_model_info
from outrider.workers.models.tokenizer import check_pair

# The masks of the longest blocks: a pass with this many masks proposes one candidate more.
MOST_MASKS = 11
# The share of blocks with at least d + 1 masks is max(KEPT_SHARE^d, LEAST_SHARE).
KEPT_SHARE, LEAST_SHARE = 0.7, 0.1
# Blocks per token of a window, and the most masks per token: passes of one size reuse memory.
BLOCKS_PER_TOKEN, MASKS_PER_TOKEN = 0.5, 1.5
# The share of real tokens that are trained as well: the token after the last real one is the first candidate.
REAL_SHARE = 0.25
# Own answers of the target to pieces of the texts: tokens of a piece, tokens of an answer, answers in a batch.
PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS_AT_ONCE = 48, 112, 48
LOSS_SLICE = 1024
# The least tokens of a window, and the least windows and tokens of all texts together.
LEAST_LENGTH, LEAST_WINDOWS, LEAST_TOKENS = 2, 40, 640
# The held-out windows, and the tokens of a window for ``tokens_a_round``; the held-out text has at least one of these.
HELD_OUT_WINDOWS, ESTIMATED_LENGTH = 4, 192
# The weight of the text's tokens in the loss; the rest is the weight of the target's distribution.
TEXT_SHARE = 0.2
# ``refuse_untrainable``: the tokens of its window, and the greatest relative difference.
TRIED_TOKENS, MOST_APART = 24, 1e-3
OTHER_KIND = (
    "blocks of masks cannot be trained side by side with this draft, which is not of attention alone, or has positions "
    "that cannot be told: take another"
)
# The endings of files with weights, which are written anew, or with their index.
OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class Layout:
    """The inputs of a pass, a window's tokens and the masks after them: their positions, the attention mask, and labels.

    ``labels[i]`` is the index in the window of the token that input i predicts.
    """

    positions: torch.Tensor
    visible: torch.Tensor
    labels: torch.Tensor
    # The block of each mask.
    blocks: torch.Tensor

    @property
    def masks(self) -> int:
        return len(self.blocks)


def lay_out(length: int, generator: np.random.Generator, most_masks: int = MOST_MASKS) -> Layout:
    anchors = generator.permutation(length - 1)[: max(1, int(length * BLOCKS_PER_TOKEN))]
    # shares[d] of the blocks have more than d masks: a block's length is the number of shares above its draw.
    shares = np.maximum(KEPT_SHARE ** np.arange(most_masks), LEAST_SHARE)
    draws = generator.random(len(anchors))
    lengths = np.minimum((draws[:, None] < shares).sum(1), length - 1 - anchors)
    most = int(length * MASKS_PER_TOKEN)
    blocks = np.repeat(np.arange(len(anchors)), lengths)[:most]
    depths = np.concatenate([np.arange(1, count + 1) for count in lengths])[:most]
    positions = np.concatenate([np.arange(length), anchors[blocks] + depths])
    size = len(positions)
    visible = np.zeros((size, size), bool)
    visible[:length, :length] = np.tri(length, dtype=bool)
    visible[length:, :length] = np.arange(length) <= anchors[blocks][:, None]
    visible[length:, length:] = (blocks[:, None] == blocks) & (depths[:, None] >= depths)
    return Layout(*map(torch.from_numpy, (positions, visible, positions + 1, blocks)))


def with_mask_token(draft: PreTrainedModel, tokens: int) -> int:
    """The id of the draft's mask token. The vocabulary is extended if the tokenizer uses all its ids.

    ``tokens`` is the first id after those of the tokenizer.
    """
    vocabulary = draft.config.vocab_size
    if vocabulary > tokens:
        return vocabulary - 1
    draft.resize_token_embeddings(vocabulary + 1, mean_resizing=False)
    with torch.no_grad():
        for matrix in {draft.get_input_embeddings().weight, draft.get_output_embeddings().weight}:
            matrix[vocabulary] = matrix[:vocabulary].mean(0)
    return vocabulary


def hidden_states(model: PreTrainedModel, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    return model.base_model(input_ids=tokens, use_cache=False, **given).last_hidden_state


def scores_of(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The model's logits from the inputs of its LM head: Granite divides them, Cohere multiplies, Gemma 2 caps."""
    config, scores = model.config.get_text_config(), model.get_output_embeddings()(hidden).float()
    scale, divisor = (getattr(config, key, None) or 1.0 for key in ("logit_scale", "logits_scaling"))
    scores = scores * scale * (divisor if config.model_type == "hyperclovax" else 1 / divisor)
    cap = getattr(config, "final_logit_softcapping", None)
    return scores if cap is None else cap * torch.tanh(scores / cap)


def reach_of(draft: PreTrainedModel, target: PreTrainedModel) -> int:
    """The most tokens of a window: the draft's sliding window, which our attention mask ignores, and the contexts of both
    models are limits."""
    limits = [getattr(draft.config.get_text_config(), "sliding_window", None)]
    limits += [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in (draft, target)]
    return min((limit for limit in limits if limit), default=LONGEST_ROW)


@torch.no_grad()
def refuse_untrainable(draft: PreTrainedModel, target: PreTrainedModel, mask_token: int) -> None:
    """Raises a ModelError if the draft's states at masks differ between one pass and block by block, or if ``scores_of``
    does not give a model's logits."""
    generator = np.random.default_rng(1)
    length = min(TRIED_TOKENS, reach_of(draft, target))
    layout = lay_out(length, generator)
    most = min(draft.config.get_text_config().vocab_size, target.config.get_text_config().vocab_size)
    window = torch.from_numpy(generator.integers(0, most, size=(1, length + 1)))
    for name, model in (("draft", draft), ("target", target)):
        try:
            scores = scores_of(model, hidden_states(model, window[:, :-1]))
            logits = model(window[:, :-1], use_cache=False).logits.float()
        except Exception as error:  # the layers are transformers', built from foreign files
            raise ModelError(
                f"transformers cannot run the {name}: {first_line(error)}; of one that is quantised give the checkpoint "
                "that it was made from"
            ) from error
        if not alike(scores, logits):
            raise ModelError(f"how the {name} makes scores of its last states is not known here: take another")
    try:
        together = masked_states(draft, window, layout, mask_token)[0]
    except (TypeError, ValueError, RuntimeError) as error:  # models that take no such mask, or no positions
        raise ModelError(f"{OTHER_KIND} ({first_line(error)})") from error
    for block in layout.blocks.unique():
        places = length + (layout.blocks == block).nonzero()[:, 0]
        text = window[:, : layout.positions[places[0]]]
        alone = hidden_states(draft, F.pad(text, (0, len(places)), value=mask_token))[0, -len(places) :]
        if not alike(together[places], alone):
            raise ModelError(OTHER_KIND)


def alike(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((made - wanted).abs().max() <= MOST_APART * wanted.abs().max())


def masked_states(draft: PreTrainedModel, window: torch.Tensor, layout: Layout, mask_token: int) -> torch.Tensor:
    """The draft's hidden states at a window's tokens and at the masks after them."""
    masks = torch.full((len(window), layout.masks), mask_token)
    visible = layout.visible[None, None]
    if draft.config._attn_implementation != "sdpa":
        # Other implementations of attention add the mask to scores.
        visible = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    given = {"attention_mask": visible, "position_ids": layout.positions[None]}
    return hidden_states(draft, torch.cat([window[:, :-1], masks], 1), **given)


def backward(
    draft: PreTrainedModel, target: PreTrainedModel, window: torch.Tensor, layout: Layout, mask_token: int
) -> float:
    """Computes the gradients of the loss on one batch. Logits are computed in slices that fit the processor's caches."""
    length = window.shape[1] - 1
    real = torch.randperm(length)[: max(1, int(length * REAL_SHARE))]
    scored = torch.cat([real, torch.arange(length, len(layout.positions))])
    hidden = masked_states(draft, window, layout, mask_token)[:, scored].flatten(0, 1)
    with torch.no_grad():
        known = hidden_states(target, window[:, :-1])
    labels = layout.labels[scored]
    wanted = window[:, labels].flatten()
    # The target predicts a token from its state at the token before.
    known = known[:, labels - 1].flatten(0, 1)
    leaf = hidden.detach().requires_grad_()
    total = 0.0
    for start in range(0, len(wanted), LOSS_SLICE):
        part = slice(start, start + LOSS_SLICE)
        scores = scores_of(draft, leaf[part])
        with torch.no_grad():
            likely = scores_of(target, known[part])[:, : scores.shape[1]].softmax(-1)
            likely = F.pad(likely, (0, scores.shape[1] - likely.shape[1])).mul_(1.0 - TEXT_SHARE)
            likely[torch.arange(len(likely)), wanted[part]] += TEXT_SHARE
        loss = F.cross_entropy(scores, likely, reduction="sum") / len(wanted)
        loss.backward()
        total += loss.item()
    hidden.backward(leaf.grad)
    return total


@torch.no_grad()
def tokens_a_round(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    stream: np.ndarray,
    mask_token: int,
    count: int = 6,
    length: int = ESTIMATED_LENGTH,
) -> float:
    """An estimate of the tokens that a greedy round with ``count`` candidates commits, on texts that the target did not
    write."""
    total, rounds, length = 0, 0, min(length, reach_of(draft, target), len(stream) - 1)
    generator = np.random.default_rng(1)
    for start in range(0, min(len(stream) - length, 40 * length), length):
        window = torch.from_numpy(stream[start : start + length + 1])[None]
        layout = lay_out(length, generator, count - 1)
        with torch.autocast("cpu", torch.bfloat16):
            says = draft.get_output_embeddings()(masked_states(draft, window, layout, mask_token))[0].argmax(-1)
            known = target.get_output_embeddings()(hidden_states(target, window[:, :-1]))[0].argmax(-1)
        agrees = (says == known[layout.labels - 1]).numpy()
        for block in range(int(layout.blocks[-1]) + 1):
            masks = length + np.flatnonzero(layout.blocks.numpy() == block)
            if len(masks) == count - 1:
                # The choice at the last real token is the first candidate.
                anchor = int(layout.positions[masks[0]]) - 1
                held = [bool(agrees[anchor]), *map(bool, agrees[masks])]
                total += 1 + (held.index(False) if False in held else count)
                rounds += 1
    return total / max(1, rounds)


def cpu_minutes(minutes: float) -> Callable[[int], float]:
    """A function from the step to the share of the time that is over (the step is ignored).

    Minutes are CPU minutes divided by the number of threads, so that a busy machine makes the training slower, not worse.
    """
    budget = minutes * 60 * torch.get_num_threads()
    started = time.process_time()
    return lambda step: (time.process_time() - started) / budget


def train_parallel(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    streams: Sequence[np.ndarray],
    held_out: np.ndarray,
    mask_token: int,
    share_done: Callable[[int], float],
    rate: float,
    tokens: int,
    length: int,
    save: Callable[[PreTrainedModel], None],
) -> None:
    """Trains until ``share_done(step)`` is 1; steps take their windows from the streams in turn."""
    torch.manual_seed(7)
    generator = np.random.default_rng(7)
    target.requires_grad_(False)
    embedding = draft.get_input_embeddings().weight
    matrices = [p for p in draft.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in draft.parameters() if p.dim() != 2 or p is embedding]
    optimizers = Optimizers(matrices, others, rate, weight_decay=0.05)
    step, next_report, reach = 0, 0.0, reach_of(draft, target)
    while (progress := share_done(step)) < 1:
        warm = min(1.0, (step + 1) / 50)
        # Some windows are longer, so that the draft does not forget how to use distant tokens.
        stream = streams[step % len(streams)]
        one = min(4 * length, len(stream) // 2, reach) if step % 8 == 6 else min(length, len(stream) - 2)
        starts = generator.integers(0, len(stream) - one - 1, size=max(1, tokens // one))
        window = torch.from_numpy(np.stack([stream[start : start + one + 1] for start in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            loss = backward(draft, target, window, lay_out(one, generator), mask_token)
        optimizers.step(warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))))
        step += 1
        if progress >= next_report:
            next_report += 0.05
            about = tokens_a_round(draft, target, held_out, mask_token)
            print(f"parallel {progress:4.0%} step {step} loss {loss:.3f} tokens a round {about:.2f}", flush=True)
            save(draft)
    save(draft)


def save_parallel(draft: PreTrainedModel, source: Path, out: Path, mask_token: int) -> None:
    """Saves the new weights with all other files of the draft's directory; config.json names the mask token."""
    with replacing(out, out.with_name(out.name + ".partial")) as partial:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(OF_WEIGHTS) and file.name != "config.json":
                shutil.copyfile(file, partial / file.name)
        before = json.loads((source / "config.json").read_text())
        dtype = before.get("dtype") or before.get("torch_dtype") or "float32"
        copy.deepcopy(draft).to(torch.bfloat16).save_pretrained(partial)
        config = {**json.loads((partial / "config.json").read_text()), "dtype": dtype, "pard_token": mask_token}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_stream(tokenizer: Any, files: Sequence[Path]) -> np.ndarray:
    """All texts as one stream of tokens, each after an end-of-text token if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ModelError(f"texts: {file}:{line}: this is not UTF-8; convert the file to UTF-8") from None
        except OSError as error:
            raise ModelError(f"texts: {file} cannot be read: {error.strerror}") from None
        stream.extend([*end, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
    return np.asarray(stream, dtype=np.int64)


@torch.no_grad()
def own_answers(target: PreTrainedModel, stream: np.ndarray, count: int) -> np.ndarray:
    """Pieces of the texts, each with the target's own continuation, as one stream; two of three batches are greedy."""
    generator = np.random.default_rng(3)
    torch.manual_seed(3)
    found = []
    for batch in range(-(-count // ANSWERS_AT_ONCE)):
        starts = generator.integers(0, len(stream) - PROMPT_TOKENS, size=ANSWERS_AT_ONCE)
        prompts = torch.from_numpy(np.stack([stream[start : start + PROMPT_TOKENS] for start in starts]))
        how = {"do_sample": True, "temperature": 0.8, "top_k": 0} if batch % 3 == 2 else {"do_sample": False}
        answers = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            **how,
        )
        found.append(answers.flatten().numpy())
    return np.concatenate(found)


def loaded(path: Path) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # foreign files may fail in any way
        raise ModelError(f"{path} cannot be loaded by transformers: {first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a training needs: both models, tokens to learn from, and tokens that only tell what was learned."""

    target: PreTrainedModel
    draft: PreTrainedModel
    mask_token: int
    stream: np.ndarray
    held_out: np.ndarray


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("texts", type=Path, nargs="+", help="UTF-8; the end of the last is held out")
    parser.add_argument("--answers", type=at_least(0), default=0, help="of the target's own, for every second step")
    parser.add_argument("--minutes", type=positive, default=60)
    parser.add_argument("--rate", type=positive, default=3e-5, help="the highest learning rate; small models bear 3e-3")
    parser.add_argument("--tokens", type=at_least(1), default=2048, help="of text in one step; a window at least")
    parser.add_argument("--length", type=at_least(LEAST_LENGTH), default=256, help="tokens of a window")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    asked = parser.parse_args()
    for name, path in (("--target", asked.target), ("--draft", asked.draft)):
        if not (path / "config.json").is_file():
            parser.error(f"{name}: {path} has no config.json")
    if missing := [str(path) for path in asked.texts if not path.is_file()]:
        parser.error(f"texts: no file is {', '.join(missing)}")
    if asked.out.exists() or asked.out.is_symlink():
        parser.error(f"--out: {asked.out} is there already; name a directory that is not, or remove it")
    return asked


def prepare(asked: argparse.Namespace) -> Prepared:
    """Everything is read and tried before the training begins; a ModelError where something is wrong."""
    check_pair(*(read_model_info(str(path), by_headers=True) for path in (asked.target, asked.draft)))
    known_mask = mask_token_of(asked.draft)
    if quantisation_of(asked.draft) is not None:
        raise ModelError(f"--draft: {asked.draft} is quantised already; give the checkpoint that it was made from")
    tokenizer = AutoTokenizer.from_pretrained(str(asked.draft))
    stream = read_stream(tokenizer, asked.texts)
    if len(stream) < (least := max(LEAST_TOKENS, LEAST_WINDOWS * asked.length)):
        raise ModelError(
            f"the texts come to {len(stream):,} tokens: too few to learn from; give {least:,}, or a shorter --length"
        )
    held_out = stream[-max(HELD_OUT_WINDOWS * asked.length, ESTIMATED_LENGTH + 1, len(stream) // 50) :]
    target, draft = (loaded(path) for path in (asked.target, asked.draft))
    if asked.length > (reach := reach_of(draft, target)):
        raise ModelError(f"--length: a layer, or a model, sees {reach:,} tokens at most: ask for no more")
    # A parallel draft that is trained further keeps its mask token. Ids may have gaps, so their largest counts.
    mask_token = with_mask_token(draft, 1 + max(tokenizer.get_vocab().values())) if known_mask is None else known_mask
    refuse_untrainable(draft, target, mask_token)
    return Prepared(target, draft, mask_token, stream[: -len(held_out)], held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parsed(parser)
    refuse_old_torch(parser)
    logging.disable_progress_bar()  # transformers shows a bar for each file
    torch.set_num_threads(asked.threads)
    try:
        prepared = prepare(asked)
    except ModelError as error:
        parser.error(str(error))
    make_folder(parser, "--out", asked.out.parent)

    def save(model: PreTrainedModel) -> None:
        save_parallel(model, asked.draft, asked.out, prepared.mask_token)

    with told_at_the_end(parser, asked.out):
        streams = [prepared.stream]
        if asked.answers:
            streams.append(own_answers(prepared.target, prepared.stream, asked.answers))
        train_parallel(
            prepared.draft,
            prepared.target,
            streams,
            prepared.held_out,
            prepared.mask_token,
            cpu_minutes(asked.minutes),
            asked.rate,
            asked.tokens,
            asked.length,
            save,
        )


if __name__ == "__main__":
    main()
