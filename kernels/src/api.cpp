// The C interface: checks arguments that need no engine, and turns exceptions into status codes.
#include <stddef.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "engine.h"
#include "memory.h"
#include "message.h"
#include "pack.h"
#include "sampler.h"
#include "suffixes.h"

struct outrider_engine {
  std::unique_ptr<outrider::Engine> engine;
  mutable std::atomic<bool> in_use{false};  // by a call
};

struct outrider_suffixes {
  outrider::Suffixes suffixes;
};

namespace {

using outrider::fail;

// Runs `body` and turns a C++ exception into a status code.
template <typename Body> int32_t as_status(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return fail(OUTRIDER_NO_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    return fail(OUTRIDER_NO_MEMORY, "%s", error.what());
  }
}

// Runs `body` on an engine, unless another call does something with it: two at once would spoil its rows without a word.
template <typename Body> int32_t with_engine(const outrider_engine *engine, Body body) {
  if (!engine) return fail(OUTRIDER_INVALID, "the engine is closed");
  if (engine->in_use.exchange(true, std::memory_order_acquire))
    return fail(OUTRIDER_INVALID, "another thread is calling this engine: only one at a time may");
  const int32_t status = as_status([&]() -> int32_t { return body(*engine->engine); });
  engine->in_use.store(false, std::memory_order_release);
  return status;
}

}  // namespace

int32_t outrider_abi_version(void) { return OUTRIDER_ABI; }

// A field's offset, against which the binding checks its own structures.
#define FIELD(structure, field) {"offset " #structure "." #field, offsetof(outrider_##structure, field)}

int64_t outrider_number(const char *name) {
  const struct {
    const char *name;
    int64_t value;
  } numbers[] = {
      {"tile rows", outrider::kTileRows},
      {"block channels", outrider::kBlockChannels},
      {"super channels", outrider::kSuperChannels},
      {"sizeof slice", sizeof(outrider_slice)},
      {"sizeof weight", sizeof(outrider_weight)},
      {"sizeof quantised", sizeof(outrider_quantised)},
      {"sizeof op", sizeof(outrider_op)},
      {"sizeof program", sizeof(outrider_program)},
      {"sizeof options", sizeof(outrider_options)},
      {"sizeof sampling", sizeof(outrider_sampling)},
      {"sizeof batch", sizeof(outrider_batch)},
      {"sizeof decode_batch", sizeof(outrider_decode_batch)},
      {"sizeof suffix_rows", sizeof(outrider_suffix_rows)},
      FIELD(slice, buffer),
      FIELD(slice, offset),
      FIELD(slice, width),
      FIELD(weight, data),
      FIELD(weight, format),
      FIELD(weight, rows),
      FIELD(weight, columns),
      FIELD(weight, group),
      FIELD(weight, gated),
      FIELD(weight, table),
      FIELD(weight, codes),
      FIELD(weight, scales),
      FIELD(weight, zeros),
      FIELD(weight, ordered),
      FIELD(quantised, codes),
      FIELD(quantised, scales),
      FIELD(quantised, zeros),
      FIELD(quantised, sub_scales),
      FIELD(quantised, minima),
      FIELD(quantised, sub_minima),
      FIELD(quantised, group),
      FIELD(op, kind),
      FIELD(op, in),
      FIELD(op, key),
      FIELD(op, value),
      FIELD(op, residual),
      FIELD(op, out),
      FIELD(op, weight),
      FIELD(op, bias),
      FIELD(op, activation),
      FIELD(op, integer),
      FIELD(op, heads),
      FIELD(op, kv_heads),
      FIELD(op, head_size),
      FIELD(op, rotated),
      FIELD(op, longest),
      FIELD(op, cap),
      FIELD(op, window),
      FIELD(op, epsilon),
      FIELD(op, scale),
      FIELD(program, ops),
      FIELD(program, weights),
      FIELD(program, buffers),
      FIELD(program, op_count),
      FIELD(program, weight_count),
      FIELD(program, buffer_count),
      FIELD(program, layers),
      FIELD(program, vocabulary),
      FIELD(program, context),
      FIELD(program, cache),
      FIELD(options, cores),
      FIELD(options, threads),
      FIELD(options, spin_microseconds),
      FIELD(options, cache_bytes),
      FIELD(sampling, temperature),
      FIELD(sampling, top_p),
      FIELD(sampling, min_p),
      FIELD(sampling, repetition_penalty),
      FIELD(sampling, presence_penalty),
      FIELD(sampling, frequency_penalty),
      FIELD(sampling, seed),
      FIELD(sampling, bias_tokens),
      FIELD(sampling, bias_values),
      FIELD(sampling, bias_count),
      FIELD(sampling, top_k),
      FIELD(sampling, sample),
      FIELD(sampling, min_tokens),
      FIELD(sampling, end_tokens),
      FIELD(sampling, end_count),
      FIELD(batch, feeds),
      FIELD(batch, rows),
      FIELD(batch, counts),
      FIELD(batch, tokens),
      FIELD(batch, choose),
      FIELD(batch, logits),
      FIELD(batch, branches),
      FIELD(batch, branch_after),
      FIELD(batch, branch_tokens),
      FIELD(batch, chosen),
      FIELD(batch, runners_up),
      FIELD(batch, margins),
      FIELD(batch, logits_out),
      FIELD(batch, logprobs),
      FIELD(batch, logprob_tokens),
      FIELD(batch, logprob_values),
      FIELD(batch, masks),
      FIELD(batch, mask_of),
      FIELD(batch, masks_ready),
      FIELD(batch, mask_words),
      FIELD(batch, states),
      FIELD(batch, states_out),
      FIELD(batch, given),
      FIELD(batch, states_in),
      FIELD(decode_batch, feeds),
      FIELD(decode_batch, rows),
      FIELD(decode_batch, counts),
      FIELD(decode_batch, tokens),
      FIELD(decode_batch, most),
      FIELD(decode_batch, end_counts),
      FIELD(decode_batch, ends),
      FIELD(decode_batch, reach),
      FIELD(decode_batch, miss_factor),
      FIELD(decode_batch, bounds),
      FIELD(decode_batch, usual),
      FIELD(decode_batch, least_chance),
      FIELD(decode_batch, least_reach),
      FIELD(decode_batch, least_sum),
      FIELD(decode_batch, spans),
      FIELD(decode_batch, stride),
      FIELD(decode_batch, guess_room),
      FIELD(decode_batch, made),
      FIELD(decode_batch, chosen),
      FIELD(decode_batch, runners_up),
      FIELD(decode_batch, margins),
      FIELD(decode_batch, passes),
      FIELD(decode_batch, going),
      FIELD(decode_batch, seconds),
      FIELD(decode_batch, given),
      FIELD(decode_batch, states_in),
      FIELD(suffix_rows, count),
      FIELD(suffix_rows, keys),
      FIELD(suffix_rows, prompts),
      FIELD(suffix_rows, gained),
      FIELD(suffix_rows, tokens),
      FIELD(suffix_rows, most),
      FIELD(suffix_rows, stride),
      FIELD(suffix_rows, least_reach),
      FIELD(suffix_rows, made),
      FIELD(suffix_rows, candidates),
      FIELD(suffix_rows, reaches),
      FIELD(suffix_rows, from_others),
  };
  for (const auto &number : numbers)
    if (strcmp(name, number.name) == 0) return number.value;
  return -1;
}

#undef FIELD

const char *outrider_message(void) { return outrider::last_message(); }

const char *outrider_isa(void) {
  const char *message = nullptr;
  const outrider::Kernels *kernels = outrider::choose_kernels(&message);
  if (!kernels) fail(OUTRIDER_UNSUPPORTED, "%s", message);
  return kernels ? kernels->name : nullptr;
}

const char *outrider_isa_available(void) { return outrider::available_kernels(); }

int32_t outrider_fewest_in_pairs(int32_t scales) {
  const char *message = nullptr;
  const outrider::Kernels *kernels = outrider::choose_kernels(&message);
  return kernels && kernels->paired ? outrider::fewest_in_pairs(scales) : 0;
}

const char *outrider_sources(void) { return OUTRIDER_SOURCES; }

void *outrider_memory_allocate(int64_t bytes) { return outrider::allocate_pages(bytes); }

void outrider_memory_free(void *memory, int64_t bytes) { outrider::free_pages(memory, bytes); }

int64_t outrider_packed_bytes(const outrider_weight *weight) {
  const int32_t status = outrider::check_weight(*weight);
  return status == OUTRIDER_OK ? outrider::packed_bytes(*weight) : -status;
}

int32_t outrider_pack_rows(const outrider_weight *weight, int32_t first_row, int32_t count, const void *source,
                           int32_t source_type, int64_t stride) {
  return as_status([&] {
    const int32_t status = outrider::check_weight(*weight);
    return status == OUTRIDER_OK ? outrider::pack_rows(*weight, first_row, count, source, source_type, stride) : status;
  });
}

int32_t outrider_pack_codes(const outrider_weight *weight, int32_t first_row, int32_t count,
                            const outrider_quantised *source) {
  return as_status([&] {
    const int32_t status = outrider::check_weight(*weight);
    return status == OUTRIDER_OK ? outrider::pack_codes(*weight, first_row, count, *source) : status;
  });
}

int32_t outrider_pack_order(const outrider_weight *weight, const int32_t *order) {
  return as_status([&] {
    const int32_t status = outrider::check_weight(*weight);
    return status == OUTRIDER_OK ? outrider::pack_order(*weight, order) : status;
  });
}

int32_t outrider_engine_create(const outrider_program *program, const outrider_options *options, outrider_engine **engine) {
  return as_status([&]() -> int32_t {
    std::unique_ptr<outrider::Engine> created;
    const int32_t status = outrider::Engine::create(*program, *options, &created);
    if (status != OUTRIDER_OK) return status;
    auto whole = std::make_unique<outrider_engine>();
    whole->engine = std::move(created);
    *engine = whole.release();
    return OUTRIDER_OK;
  });
}

void outrider_engine_destroy(outrider_engine *engine) {
  constexpr auto kNap = std::chrono::milliseconds(1);
  while (engine && engine->in_use.exchange(true, std::memory_order_acquire)) std::this_thread::sleep_for(kNap);
  delete engine;
}

int32_t outrider_engine_threads(outrider_engine *engine, int32_t threads, const int32_t *cores) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.use_threads(threads, cores); });
}

int32_t outrider_engine_reserve(outrider_engine *engine, int32_t tokens, int32_t selected, int64_t cache_tokens) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.reserve(tokens, selected, cache_tokens); });
}

int32_t outrider_row_open(outrider_engine *engine, const outrider_sampling *sampling, int32_t prompt, int32_t *row) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.open(*sampling, prompt, row); });
}

int32_t outrider_row_fork(outrider_engine *engine, int32_t source, int32_t length, const outrider_sampling *sampling,
                          int32_t prompt, int32_t *row) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.fork(source, length, *sampling, prompt, row); });
}

int32_t outrider_row_skip(outrider_engine *engine, int32_t row, const int32_t *tokens, int32_t count) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.skip(row, tokens, count); });
}

int32_t outrider_row_truncate(outrider_engine *engine, int32_t row, int32_t length) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.truncate(row, length); });
}

int32_t outrider_row_close(outrider_engine *engine, int32_t row) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.close(row); });
}

int32_t outrider_row_length(const outrider_engine *engine, int32_t row) {
  int32_t length = 0;
  const int32_t status = with_engine(engine, [&](const outrider::Engine &own) {
    length = own.length(row);
    return length < 0 ? -length : int32_t{OUTRIDER_OK};
  });
  return status == OUTRIDER_OK ? length : -status;
}

void outrider_cache_use(const outrider_engine *engine, int64_t *bytes, int64_t *blocks_used, int32_t *block_tokens) {
  *bytes = engine->engine->cache->bytes_held();
  *blocks_used = engine->engine->cache->blocks_used();
  *block_tokens = outrider::kBlockTokens;
}

int32_t outrider_forward(outrider_engine *engine, const outrider_batch *batch) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.forward(*batch); });
}

int64_t outrider_experts_read(const outrider_engine *engine) { return engine->engine->experts_read; }

int32_t outrider_rank(outrider_engine *engine, int32_t choice, const uint32_t *mask, int32_t mask_words, int32_t count,
                      int32_t *tokens) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.rank(choice, mask, mask_words, count, tokens); });
}

int32_t outrider_decode(outrider_engine *engine, const outrider_decode_batch *wanted) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.decode(*wanted); });
}

int32_t outrider_correct(outrider_engine *engine, int32_t tokens) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.correct(tokens); });
}

int32_t outrider_shorten(outrider_engine *engine, int32_t tokens) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.shorten(tokens); });
}

int32_t outrider_learn(outrider_engine *engine, int32_t row, int32_t first, const int32_t *tokens, int32_t count,
                       int32_t *better, int32_t *worse) {
  return with_engine(engine, [&](outrider::Engine &own) { return own.learn(row, first, tokens, count, better, worse); });
}

int32_t outrider_choose(const float *logits, int32_t vocabulary, const outrider_sampling *sampling, const int32_t *history,
                        int32_t length, int32_t prompt, const uint32_t *mask, int32_t *chosen, int32_t *runner_up,
                        double *margin, double *scores) {
  return as_status([&]() -> int32_t {
    const char *message = nullptr;
    const outrider::Kernels *kernels = outrider::choose_kernels(&message);
    if (!kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
    outrider::Sampling copy;
    const int32_t status = outrider::copy_sampling(*sampling, vocabulary, &copy);
    if (status != OUTRIDER_OK) return status;
    for (int32_t i = 0; i < length; ++i)
      if (history[i] < 0 || history[i] >= vocabulary) return fail(OUTRIDER_INVALID, "token %d in the history", history[i]);
    outrider::SamplerScratch scratch;
    const outrider::Choice choice =
        outrider::choose_token(*kernels, logits, vocabulary, copy, history, length, std::min(prompt, length), &scratch,
                               mask, scores, runner_up != nullptr);
    *chosen = choice.token;
    if (runner_up) *runner_up = choice.runner_up;
    if (margin) *margin = choice.margin;
    return choice.finite ? OUTRIDER_OK : fail(OUTRIDER_NOT_FINITE, "a logit is not a finite number");
  });
}

int32_t outrider_log_probabilities(const float *logits, int32_t vocabulary, int32_t chosen, int32_t count, int32_t *tokens,
                                   double *values) {
  return as_status([&]() -> int32_t {
    const char *message = nullptr;
    const outrider::Kernels *kernels = outrider::choose_kernels(&message);
    if (!kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
    if (chosen < 0 || chosen >= vocabulary || count < 0 || count > vocabulary)
      return fail(OUTRIDER_INVALID, "token %d and %d others of a vocabulary of %d", chosen, count, vocabulary);
    outrider::SamplerScratch scratch;
    outrider::log_probabilities(*kernels, logits, vocabulary, chosen, count, &scratch, tokens, values);
    return OUTRIDER_OK;
  });
}

int32_t outrider_suffixes_create(int64_t tokens, outrider_suffixes **suffixes) {
  return as_status([&]() -> int32_t {
    constexpr int64_t kMost = int64_t{1} << 30;
    if (tokens < 0 || tokens > kMost)
      return fail(OUTRIDER_INVALID, "%lld tokens of answers", static_cast<long long>(tokens));
    *suffixes = new outrider_suffixes{outrider::Suffixes(tokens)};
    return OUTRIDER_OK;
  });
}

void outrider_suffixes_destroy(outrider_suffixes *suffixes) { delete suffixes; }

int64_t outrider_suffixes_bytes(const outrider_suffixes *suffixes) { return suffixes->suffixes.bytes(); }

int32_t outrider_suffixes_advance(outrider_suffixes *suffixes, const outrider_suffix_rows *rows) {
  return as_status([&] { return suffixes->suffixes.advance(*rows); });
}

int32_t outrider_suffixes_end(outrider_suffixes *suffixes, int64_t key, const int32_t *tokens, int32_t count) {
  return as_status([&]() -> int32_t {
    suffixes->suffixes.end(key, tokens, count);
    return OUTRIDER_OK;
  });
}

int32_t outrider_suffixes_learn(outrider_suffixes *suffixes, const int32_t *tokens, int32_t count) {
  return as_status([&]() -> int32_t {
    suffixes->suffixes.learn(tokens, count);
    return OUTRIDER_OK;
  });
}
