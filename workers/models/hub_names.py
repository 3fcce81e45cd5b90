"""Short names of models, as people and older tools write them, and their hub ids."""

from __future__ import annotations

import re

# Organisations whose models are commonly named without them: a pattern for the whole name, and the id that it stands for.
KNOWN = (
    (r"(opt-(?:125m|350m|1\.3b|2\.7b|6\.7b|13b|30b|66b))", r"facebook/\1"),
    (r"llama-?2-(7b|13b|70b)(-chat)?(?:-hf)?", r"meta-llama/Llama-2-\1\2-hf"),
    (r"code-?llama(?:-2)?-(7b|13b|34b)(-python|-instruct)?(?:-hf)?", r"codellama/CodeLlama-\1\2-hf"),
    (r"(qwen1\.5-(?:0\.5b|1\.8b|4b|7b|14b|32b|72b)(?:-chat)?)", r"Qwen/\1"),
    (r"(starcoder(?:base(?:-[137]b)?|plus)?|tiny_starcoder_py|gpt_bigcode-santacoder)", r"bigcode/\1"),
    (r"(starcoder2-(?:3b|7b|15b))", r"bigcode/\1"),
    (r"gpt_?bigcode", "bigcode/starcoder"),
    (r"tiny_starcoder", "bigcode/tiny_starcoder_py"),
    (r"(llama-(?:68m|160m))", r"JackFram/\1"),
    (r"amd-llama-135m(-code)?", r"amd/AMD-Llama-135m\1"),
    (r"(qwen3-(?:0\.6b|1\.7b|4b|8b|14b|32b)(?:-base)?)", r"Qwen/\1"),
    (r"(gemma-2-(?:2b|9b|27b)(?:-it)?)", r"google/\1"),
    (r"(gemma-3-(?:270m|1b)(?:-it|-pt)?)", r"google/\1"),
    (r"(pythia-(?:14m|31m|70m|160m|410m|1b|1\.4b|2\.8b|6\.9b|12b)(?:-deduped)?|gpt-neox-20b)", r"EleutherAI/\1"),
    (r"(falcon-(?:7b|40b)(?:-instruct)?|falcon-rw-(?:1b|7b))", r"tiiuae/\1"),
    (r"(falcon-mamba-7b(?:-instruct)?)", r"tiiuae/\1"),
    (r"(mamba-(?:130m|370m|790m|1\.4b|2\.8b))(?:-hf)?", r"state-spaces/\1-hf"),
    (r"(bloomz?-(?:560m|1b1|1b7|3b|7b1)|bloomz?)", r"bigscience/\1"),
    (r"(mpt-(?:7b|30b)(?:-instruct|-chat)?)", r"mosaicml/\1"),
    (r"(gpt2(?:-medium|-large|-xl)?)", r"openai-community/\1"),
    (r"(phi-(?:1|1_5|2))", r"microsoft/\1"),
    (r"smollm2-(135m|360m|1\.7b)(-instruct)?", r"HuggingFaceTB/SmolLM2-\1\2"),
    (r"smollm3(?:-3b)?(-base)?", r"HuggingFaceTB/SmolLM3-3B\1"),
    (r"(lfm2-(?:350m|700m|1\.2b|2\.6b))", r"LiquidAI/\1"),
    (r"(granite-4\.0-(?:350m|1b|micro|h-(?:350m|1b|micro|tiny|small))(?:-base)?)", r"ibm-granite/\1"),
    (r"(falcon-h1-(?:0\.5b|1\.5b|1\.5b-deep|3b|7b|34b))(-base|-instruct)?", r"tiiuae/\1\2"),
    (r"tinyllama(?:-1\.1b)?(?:-chat)?(?:-v1\.0)?", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
)
PROPER = {"-chat": "-Chat", "-python": "-Python", "-instruct": "-Instruct", "-base": "-Base"}


def hub_id(name: str) -> str:
    """The hub id of a short name; any other name as it is."""
    for pattern, full in KNOWN:
        found = re.fullmatch(pattern, name, re.IGNORECASE)
        if found is not None:
            return _spelled(found.expand(full))
    return name


def _spelled(full: str) -> str:
    """With the hub's own capitals, whatever capitals were typed."""
    organisation, _, name = full.partition("/")
    if organisation == "HuggingFaceTB":
        size, _, kind = name.partition("-")[2].partition("-")
        return f"{organisation}/{name[:7]}-{size.upper()}{PROPER.get(f'-{kind.lower()}', '')}"
    if organisation == "Qwen" and name.lower().startswith("qwen3"):
        size, _, kind = name.partition("-")[2].partition("-")
        return f"Qwen/Qwen3-{size.upper()}{PROPER.get(f'-{kind.lower()}', '')}"
    if organisation == "Qwen":
        size = name.lower().removeprefix("qwen1.5-").removesuffix("-chat").upper()
        return f"Qwen/Qwen1.5-{size}{'-Chat' if name.lower().endswith('-chat') else ''}"
    if "falcon-h1" in name.lower():
        size, _, kind = name.lower().removeprefix("falcon-h1-").partition("b")
        return f"{organisation}/Falcon-H1-{size}B{kind.title()}"
    if organisation == "LiquidAI":
        return f"{organisation}/{name.upper()}"
    if organisation == "codellama":
        for typed, proper in PROPER.items():
            name = re.sub(typed, proper, name, flags=re.IGNORECASE)
        return f"{organisation}/{re.sub('-([0-9]+)B', lambda size: size[0].lower(), name)}"
    if organisation in ("meta-llama", "amd"):
        head = "Llama-2" if organisation == "meta-llama" else "AMD-Llama"
        return f"{organisation}/{head}{name[len(head) :].lower()}"
    return full if organisation == "TinyLlama" else f"{organisation}/{name.lower()}"
