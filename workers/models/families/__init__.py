"""The decoder families of the native engine, one short builder each: a config becomes a program over named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Format, Program
from outrider.kernels.weights import StorageChoice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families import (
    apertus,
    aria,
    bailing,
    bamba,
    beam,
    biogpt,
    bitnet,
    bloom,
    cohere,
    cohere_moe,
    corrected_mixtures,
    dbrx,
    exaone,
    exaone3,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    glm5_next,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_neox_japanese,
    gptj,
    granite,
    hrm_text,
    hy_v4,
    jamba,
    kimi_linear,
    latent,
    lfm2,
    lfm3,
    llama,
    llama4,
    longcat_flash,
    mamba,
    mimo,
    minimax_m3,
    ministral3,
    mistral_large4,
    mixtures,
    modernbert_decoder,
    mpt,
    muse,
    muse_spark,
    nanochat,
    nemotron_h,
    olmo,
    olmo_hybrid,
    opt,
    persimmon,
    phi,
    phi3,
    phimoe,
    qwen3_next,
    qwen4_exp,
    relu_squared,
    stablelm,
    starcoder2,
    step3p7,
    zamba2,
)
from outrider.workers.models.families.eagle3 import eagle3
from outrider.workers.models.families.mtp import MtpBuilder, norm_like, stored_as
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.heads import HeadConfig, is_head
from outrider.workers.models.mtp import MtpLayer

FAMILIES: dict[str, Callable[[Config, Begin], Program]] = {
    "afmoe": corrected_mixtures.afmoe,
    "apertus": apertus.apertus,
    "apertus1p5_text": apertus.apertus1p5,
    "arcee": relu_squared.arcee,
    "aria_text": aria.aria,
    "bailing_hybrid": bailing.bailing_hybrid,
    "bamba": bamba.bamba,
    "beam": beam.beam,
    "biogpt": biogpt.biogpt,
    "axk1": latent.axk1,
    "axk2": latent.axk2,
    "bitnet": bitnet.bitnet,
    "bloom": bloom.bloom,
    "codegen": gptj.codegen,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "cohere2_moe": cohere_moe.cohere2_moe,
    "cohere_compass_text": cohere.cohere_compass,
    "cwm": llama.cwm,
    "dbrx": dbrx.dbrx,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "deepseek_v32": latent.deepseek_v32,
    "dots1": corrected_mixtures.dots1,
    "ernie4_5": glm.ernie4_5,
    "ernie4_5_moe": corrected_mixtures.ernie4_5_moe,
    "ernie4_5_vl_moe_text": corrected_mixtures.ernie4_5_vl_moe,
    "exaone": exaone3.exaone,
    "exaone4": exaone.exaone4,
    "exaone_moe": corrected_mixtures.exaone_moe,
    "falcon": falcon.falcon,
    "falcon_h1": bamba.falcon_h1,
    "falcon_mamba": mamba.falcon_mamba,
    "flint": mixtures.flint,
    "flex_olmo": mixtures.flex_olmo,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma3n_text": gemma3n.gemma3n,
    "gemma4_text": gemma4.gemma4,
    "gemma4_unified_text": gemma4.gemma4_unified,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": corrected_mixtures.glm4_moe,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "glm5_next_text": glm5_next.glm5_next,
    "glm_moe_dsa": latent.glm_moe_dsa,
    "gpt2": gpt2.gpt2,
    "gpt_bigcode": gpt_bigcode.gpt_bigcode,
    "gpt_neo": gpt_neo.gpt_neo,
    "gpt_neox": gpt_neox.gpt_neox,
    "gpt_neox_japanese": gpt_neox_japanese.gpt_neox_japanese,
    "gpt_oss": mixtures.gpt_oss,
    "gptj": gptj.gptj,
    "granite": granite.granite,
    "granite_swa": granite.granite_swa,
    "granitemoe": mixtures.granitemoe,
    "granitemoe_swa": mixtures.granitemoe_swa,
    "granitemoehybrid": mixtures.granitemoehybrid,
    "granitemoeshared": mixtures.granitemoeshared,
    "helium": glm.helium,
    "hrm_text": hrm_text.hrm_text,
    "hy_v3": corrected_mixtures.hy_v3,
    "hy_v4": hy_v4.hy_v4,
    "hy_v4_vl_text": hy_v4.hy_v4_vl,
    "hunyuan_v1_dense": llama.hunyuan,
    "hyperclovax": granite.hyperclovax,
    "internlm3": llama.internlm3,
    "iquestcoder": llama.iquestcoder,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "jamba": jamba.jamba,
    "jais2": relu_squared.jais2,
    "kolibri1": corrected_mixtures.kolibri1,
    "laguna": corrected_mixtures.laguna,
    "kimi_linear": kimi_linear.kimi_linear,
    "lara_mini": qwen3_next.lara_mini,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "lfm3": lfm3.lfm3,
    "llama": llama.llama,
    "llama4_text": llama4.llama4,
    "longcat_flash": longcat_flash.longcat_flash,
    "mamba": mamba.mamba,
    "mamba2": mamba.mamba2,
    "mellum": mixtures.mellum,
    "mimo_v2_flash": mimo.mimo_v2_flash,
    "minicpm3": latent.minicpm3,
    "minimax_m2": corrected_mixtures.minimax_m2,
    "minimax_m3_vl_text": minimax_m3.minimax_m3,
    "ministral": llama.ministral,
    "ministral3": ministral3.ministral3,
    "mistral": llama.mistral,
    "mistral4": latent.mistral4,
    "mistral_large4_text": mistral_large4.mistral_large4,
    "mixtral": mixtures.mixtral,
    "mllama_text_model": llama.mllama,
    "modernbert-decoder": modernbert_decoder.modernbert_decoder,
    "mpt": mpt.mpt,
    "muse_glimmer_text": muse.muse_glimmer,
    "muse_spark_text": muse_spark.muse_spark,
    "nanochat": nanochat.nanochat,
    "nemotron": relu_squared.nemotron,
    "nemotron_h": nemotron_h.nemotron_h,
    "olmo": olmo.olmo,
    "olmo2": olmo.olmo2,
    "olmo3": olmo.olmo3,
    "olmo_hybrid": olmo_hybrid.olmo_hybrid,
    "olmoe": mixtures.olmoe,
    "openai-gpt": gpt2.openai_gpt,
    "opt": opt.opt,
    "persimmon": persimmon.persimmon,
    "phi": phi.phi,
    "phi3": phi3.phi3,
    "phimoe": phimoe.phimoe,
    "qwen2": llama.qwen2,
    "qwen2_moe": mixtures.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_5_moe_text": qwen3_next.qwen3_5_moe_text,
    "qwen3_5_text": qwen3_next.qwen3_5_text,
    "qwen3_moe": mixtures.qwen3_moe,
    "qwen3_next": qwen3_next.qwen3_next,
    "qwen4_exp_text": qwen4_exp.qwen4_exp,
    "sarvam_mla": latent.sarvam_mla,
    "sarvam_moe": corrected_mixtures.sarvam_moe,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
    "solar_open": corrected_mixtures.solar_open,
    "stablelm": stablelm.stablelm,
    "starcoder2": starcoder2.starcoder2,
    "step3p5": step3p7.step3p7,
    "vaultgemma": gemma.vaultgemma,
    "youtu": latent.youtu,
    "zamba2": zamba2.zamba2,
}


def build_program(
    values: Mapping[str, Any],
    precision: Format,
    group: int = 0,
    source: str = "config.json",
    storage_choice: StorageChoice | None = None,
    states: Sequence[int] = (),
) -> Program:
    """The program of a config.json's content; a ModelError where the native engine cannot compute that model.

    ``storage_choice`` decides how the tensors of a quantised checkpoint are stored; without it all follow ``precision``.
    Passes return the inputs of the layers ``states``.
    """

    def begin(vocabulary: int, context: int) -> Builder:
        return Builder(vocabulary, context, precision, group, storage_choice, states)

    return _laid_out(values, source, begin)


def build_mtp(
    layer: MtpLayer,
    precision: Format,
    group: int = 0,
    source: str = "config.json",
    storage_choice: StorageChoice | None = None,
) -> Program:
    """The program of a layer for multi-token prediction."""
    norm = norm_like(build_program(layer.values, precision, group, source))

    def begin(vocabulary: int, context: int) -> Builder:
        choice = stored_as(layer, storage_choice, precision)
        return MtpBuilder(vocabulary, context, precision, group, choice, layer=layer, norm_like=norm)

    return _laid_out(layer.values, source, begin)


def _laid_out(values: Mapping[str, Any], source: str, begin: Begin) -> Program:
    if is_head(values):
        raise ModelError(f"{source}: this is a head on another model's hidden states, which can only be a draft (--draft)")
    config = Config(values, source)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ModelError(f"the native engine does not know the family {values.get('model_type')!r}; the hf engine may")
    try:
        program = family(config, begin)
        config.check_all_read()
    except (ValueError, TypeError, ArithmeticError) as error:  # values of a wrong type, or impossible sizes
        raise ModelError(f"{source}: the native engine cannot lay this model out: {error}") from error
    return program


def build_head(
    head: HeadConfig, precision: Format, group: int = 0, tokens: Sequence[int] | None = None, own_embedding: bool = False
) -> Program:
    """``tokens`` are those of the target that the head may choose, None: all; without an embedding it has the target's."""

    def begin(vocabulary: int, context: int) -> Builder:
        return Builder(vocabulary, context, precision, group)

    try:
        return eagle3(head, begin, tokens, own_embedding)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{head.source}: the native engine cannot lay this head out: {error}") from error
