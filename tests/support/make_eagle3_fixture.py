"""Writes tests/support/tiny_eagle3, a head in the layout of `speculators`, with that library's own model and its logits.

    python tests/support/make_eagle3_fixture.py

It needs `speculators` (0.9.0 was used) in an environment of its own: its pins clash with ours. Weights are random.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

OUT = Path(__file__).parent / "tiny_eagle3"
HIDDEN, VOCABULARY, DRAFT_VOCABULARY, STATES = 32, 61, 29, [2, 2, 1]
TOKENS = [7, 3, 41, 59, 26, 5, 35, 19, 9]


def main() -> None:
    torch.manual_seed(0)
    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=STATES,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).eval()
    known = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    taken = torch.zeros(VOCABULARY, dtype=torch.bool)
    taken[known] = True
    model.load_vocab_mappings(taken, known - torch.arange(DRAFT_VOCABULARY))
    with torch.no_grad():
        for parameter in model.parameters():
            # Some parameters start as NaN, since they are meant to be read from a target.
            around = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_((around + 0.3 * torch.randn_like(parameter)).bfloat16())
        model.lm_head.weight.mul_(4)
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, given, made: logits.append(made))
        states = torch.randn(1, len(TOKENS) - 1, 3 * HIDDEN).bfloat16()
        following = torch.tensor([TOKENS[1:]])
        model(states.float(), following, document_ids=torch.zeros_like(following), ttt_steps=2)
    model.bfloat16().save_pretrained(OUT)
    # Inference runs the second step at the last position only.
    expected = {"states": states[0], "first": logits[0][0], "second": logits[1][0, -1].clone()}
    save_file({name: value.contiguous() for name, value in expected.items()}, OUT / "expected.safetensors.bin")


if __name__ == "__main__":
    main()
