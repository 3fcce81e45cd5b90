"""Writes tests/support/tiny_adapter: LoRA adapters saved by PEFT, their base models' weights, and the weights PEFT merged.

    python tests/support/make_adapter_fixture.py

It needs `peft` (0.21.2 was used), which the project does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

OUT = Path(__file__).parent / "tiny_adapter"
LLAMA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_inner": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
MATRICES = ["q_proj", "v_proj", "down_proj"]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LlamaConfig(**LLAMA), {"r": 4, "lora_alpha": 8, "target_modules": MATRICES}),
    "patterns": (
        LlamaConfig(**LLAMA, dtype="bfloat16"),
        {
            "r": 4,
            "lora_alpha": 16,
            "target_modules": [*MATRICES, "embed_tokens"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 3},
            "alpha_pattern": {"v_proj": 5},
            "modules_to_save": ["lm_head"],
        },
    ),
    "turned": (
        GPT2Config(**GPT2, dtype="float16"),
        {"r": 2, "lora_alpha": 3, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
}


def main() -> None:
    for name, (config, settings) in CASES.items():
        torch.manual_seed(3)
        folder = OUT / name
        model = AutoModelForCausalLM.from_config(config)
        base = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        for key, parameter in adapted.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder)
        # PEFT merges the adapter as it reads it from the file.
        fresh = AutoModelForCausalLM.from_config(config)
        fresh.load_state_dict(base)
        merged = PeftModel.from_pretrained(fresh, folder).merge_and_unload().state_dict()
        tied = [] if name == "patterns" or not config.tie_word_embeddings else ["lm_head.weight"]
        kept = {key: tensor.contiguous() for key, tensor in base.items() if key not in tied}
        save_file(kept, folder / "base.safetensors", {"format": "pt"})
        changed = {key: merged[key].contiguous().clone() for key in kept if not torch.equal(merged[key], base[key])}
        save_file(changed, folder / "merged.safetensors")
        (folder / "base.json").write_text(json.dumps(config.to_diff_dict() | {"model_type": config.model_type}, indent=2))
        (folder / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
