// Creation of an engine: plans and reserves what a program needs. Also its LM head: the shortlist and the corrections.
#include "engine.h"

#include <algorithm>

#include "message.h"
#include "pack.h"

namespace outrider {
namespace {

// Constants of a tile that is multiplied in pairs: a word for every output and block of channels.
int64_t pair_words(const outrider_weight &weight) {
  const int block = geometry(weight).block;
  return static_cast<int64_t>((weight.columns + block - 1) / block) * kTileRows;
}

// Whether two ATTENTION operations store the same keys and values, so that they can share a layer's cache.
bool same_cache(const outrider_op &one, const outrider_op &other) {
  const auto same = [](const outrider_slice &a, const outrider_slice &b) {
    return a.buffer == b.buffer && a.offset == b.offset && a.width == b.width;
  };
  return same(one.key, other.key) && same(one.value, other.value) && one.kv_heads == other.kv_heads &&
         one.head_size == other.head_size;
}

}  // namespace

int32_t Engine::plan_cache(int layers, int64_t limit) {
  if (cache_format < OUTRIDER_CACHE_BF16 || cache_format > OUTRIDER_CACHE_INT8)
    return fail(OUTRIDER_INVALID, "cache format %d is unknown", cache_format);
  const int64_t scales = scale_bytes(cache_format), element = element_bytes(cache_format);
  std::vector<CacheLayer> plan(static_cast<size_t>(layers));
  std::vector<const outrider_op *> first_of(static_cast<size_t>(layers));
  int64_t block_bytes = 0;
  int found = 0;
  for (const outrider_op &op : ops) {
    if (op.kind != OUTRIDER_ATTENTION) continue;
    if (op.integer < 0 || op.integer >= layers)
      return fail(OUTRIDER_INVALID, "attention layer %d of %d", op.integer, layers);
    CacheLayer &layer = plan[static_cast<size_t>(op.integer)];
    const outrider_op *&first = first_of[static_cast<size_t>(op.integer)];
    if (first) {
      if (!same_cache(*first, op))
        return fail(OUTRIDER_INVALID, "attention layer %d is shared by operations of other keys and values", op.integer);
      continue;
    }
    first = &op;
    layer.key_bytes = kBlockTokens * static_cast<int64_t>(op.head_size) * element + 2 * scales;
    layer.value_bytes = scales && value_in_key(op) ? 0 : kBlockTokens * round_up(value_size(op), kLanes) * element;
    layer.keys = block_bytes;
    layer.values = layer.keys + layer.key_bytes * op.kv_heads;
    block_bytes = layer.values + layer.value_bytes * op.kv_heads;
    most_attention = std::max(most_attention, attention_scratch(op.head_size, value_size(op)));
    ++found;
  }
  if (found != layers) return fail(OUTRIDER_INVALID, "%d attention layers instead of %d", found, layers);
  cache = std::make_unique<Cache>(std::move(plan), std::max<int64_t>(round_up(block_bytes, 64), 64), limit);
  return OUTRIDER_OK;
}

// Computes the constants of matrices that are multiplied in pairs of channels.
int32_t Engine::plan_pairs() {
  if (!pair_constants.empty()) pair_constants.resize(weights.size());
  for (const outrider_op &op : ops) {
    if (op.kind != OUTRIDER_LINEAR && op.kind != OUTRIDER_EXPERTS) continue;
    const outrider_weight &weight = weights[static_cast<size_t>(op.weight)];
    // For experts with FACTORS, products in pairs are not faster.
    if (!in_pairs(weight) || (op.kind == OUTRIDER_EXPERTS && weight.scales != OUTRIDER_WORDS)) continue;
    any_in_pairs = true;
    if (!has_pair_constants(weight)) continue;
    pair_constants.resize(weights.size());
    std::unique_ptr<Scratch> &constants = pair_constants[static_cast<size_t>(op.weight)];
    if (constants) continue;
    auto made = std::make_unique<Scratch>();
    const int tiles = tile_count(weight), experts = op.kind == OUTRIDER_EXPERTS ? op.heads : 1;
    if (!made->reserve(int64_t{experts} * tiles * pair_words(weight) * 4))
      return fail(OUTRIDER_NO_MEMORY, "no memory for what products in pairs need of a matrix of %d rows", weight.rows);
    // Only constants with memory: a matrix without any is multiplied one channel after the other.
    constants = std::move(made);
    for (int expert = 0; expert < experts; ++expert)
      for (int tile = 0; tile < tiles; ++tile) plan_pairs_of(op.weight, expert, tile);
  }
  return OUTRIDER_OK;
}

const int32_t *Engine::pair_constants_of(int weight, int expert) const {
  if (pair_constants.empty() || !pair_constants[static_cast<size_t>(weight)]) return nullptr;
  const outrider_weight &matrix = weights[static_cast<size_t>(weight)];
  return pair_constants[static_cast<size_t>(weight)]->as<int32_t>() + expert * tile_count(matrix) * pair_words(matrix);
}

bool Engine::in_pairs(const outrider_weight &weight) const {
  return kernels->paired && kernels->paired(weight) && fewest_in_pairs_of(weight) > 0;
}

void Engine::plan_pairs_of(int weight, int expert, int tile) {
  const outrider_weight &matrix = weights[static_cast<size_t>(weight + expert)];
  int32_t *const constants = pair_constants[static_cast<size_t>(weight)]->as<int32_t>();
  const int64_t place = int64_t{expert} * tile_count(matrix) + tile;
  kernels->pair_constants(matrix, tile, constants + place * pair_words(matrix));
}

void Engine::plan_linear() {
  next_linear.assign(ops.size(), -1);
  for (size_t i = ops.size() - 1; i > 0; --i)
    next_linear[i - 1] = ops[i].kind == OUTRIDER_LINEAR ? static_cast<int32_t>(i) : next_linear[i];
  bytes_multiplied = 0;
  for (const outrider_op &op : ops)
    if (op.kind == OUTRIDER_LINEAR || op.kind == OUTRIDER_HEADS)
      bytes_multiplied +=
          packed_bytes(weights[static_cast<size_t>(op.weight)]) * (op.kind == OUTRIDER_HEADS ? op.heads : 1);
}

// The scratch memory that a row of a pass needs for converted inputs, and a thread for expanded codes.
void Engine::plan_scratch() {
  for (const outrider_op &op : ops) {
    if (op.kind != OUTRIDER_LINEAR && op.kind != OUTRIDER_EXPERTS && op.kind != OUTRIDER_HEADS) continue;
    // Input rows for each token: one for the token itself and one for each of its experts; or one for each head.
    const int64_t rows = op.kind == OUTRIDER_EXPERTS ? op.kv_heads + 1 : op.kind == OUTRIDER_HEADS ? op.heads : 1;
    const outrider_weight &weight = weights[static_cast<size_t>(op.weight)];
    const int64_t digits = digits_of(weight.format);
    most_words = std::max(most_words, rows * digits * words_in_row(weight));
    most_expanded = std::max(most_expanded, expanded_bytes(weight));
    if (!weight.group) continue;
    // FACTORS has offsets for whole blocks: more than there are groups, in a matrix of one narrow block.
    const int64_t blocks = (weight.columns + geometry(weight).block - 1) / geometry(weight).block;
    const int64_t groups = (weight.columns + weight.group - 1) / weight.group;
    most_groups = std::max(most_groups, rows * digits * std::max(groups, blocks * offsets_in_block(weight)));
  }
}

// Gives each ROPE the index of its rotation (op.integer); those with the same frequencies share one.
void Engine::plan_rotations() {
  for (outrider_op &op : ops) {
    if (op.kind != OUTRIDER_ROPE) continue;
    const int32_t long_weight = op.longest ? op.bias : -1;
    const auto same = [&](const std::unique_ptr<Rotation> &one) {
      return one->weight == op.weight && one->long_weight == long_weight && one->factor == op.scale &&
             one->half == op.rotated / 2;
    };
    const auto found = std::find_if(rotations.begin(), rotations.end(), same);
    op.integer = static_cast<int32_t>(found - rotations.begin());
    if (found != rotations.end()) continue;
    auto rotation = std::make_unique<Rotation>();
    rotation->weight = op.weight;
    rotation->long_weight = long_weight;
    rotation->factor = op.scale;
    rotation->half = op.rotated / 2;
    rotations.push_back(std::move(rotation));
  }
}

int32_t Engine::create(const outrider_program &program, const outrider_options &options, std::unique_ptr<Engine> *result) {
  auto engine = std::make_unique<Engine>();
  const char *message = nullptr;
  engine->kernels = choose_kernels(&message);
  if (!engine->kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
  engine->fewest_of_words_in_pairs = fewest_in_pairs(OUTRIDER_WORDS);
  engine->fewest_of_factors_in_pairs = fewest_in_pairs(OUTRIDER_FACTORS);
  engine->fewest_of_groups_in_pairs = fewest_in_pairs(OUTRIDER_SCALE_F16);
  if (engine->halves.no_choice())
    return fail(OUTRIDER_UNSUPPORTED, "OUTRIDER_HALVES is 0 (passes stay whole), 1 (passes in halves) or not set");
  engine->ops.assign(program.ops, program.ops + program.op_count);
  engine->weights.assign(program.weights, program.weights + program.weight_count);
  engine->widths.assign(program.buffers, program.buffers + program.buffer_count);
  engine->vocabulary = program.vocabulary;
  engine->context = program.context;
  engine->cache_format = program.cache;
  int32_t status = engine->check(program);
  if (status == OUTRIDER_OK) status = engine->plan_cache(program.layers, options.cache_bytes);
  if (status == OUTRIDER_OK) status = engine->plan_recurrence();
  if (status != OUTRIDER_OK) return status;
  for (size_t i = 0; i < engine->widths.size(); ++i) engine->buffers.push_back(std::make_unique<Scratch>());
  engine->plan_scratch();
  engine->plan_rotations();
  status = engine->plan_pairs();
  if (status != OUTRIDER_OK) return status;
  engine->plan_linear();
  engine->spin_microseconds = options.spin_microseconds;
  const int32_t threads = engine->use_threads(options.threads, options.cores);
  if (threads != OUTRIDER_OK) return threads;
  *result = std::move(engine);
  return OUTRIDER_OK;
}

int32_t Engine::use_threads(int threads, const int32_t *cores) {
  if (threads < 1 || threads > 1024) return fail(OUTRIDER_INVALID, "%d threads", threads);
  auto made = std::make_unique<Pool>(threads, cores, spin_microseconds);
  // Also for the operation that a shortlist adds.
  Claims of_threads(kMostParts * (ops.size() + 1), threads);
  samplers.resize(static_cast<size_t>(threads));
  claims = std::move(of_threads);
  pool = std::move(made);
  return OUTRIDER_OK;
}

int32_t Engine::check_threads() const {
  return pool->lost_threads() ? fail(OUTRIDER_INVALID, "this process was forked from the one that has the engine's threads")
                              : OUTRIDER_OK;
}

int32_t Engine::reserve(int tokens, int selected, int64_t cache_tokens) {
  if (tokens < 1 || selected < 0 || selected > tokens || cache_tokens < 0)
    return fail(OUTRIDER_INVALID, "memory for passes of %d tokens, %d choices and %lld tokens of cache", tokens, selected,
                static_cast<long long>(cache_tokens));
  int32_t status = check_threads();
  if (status == OUTRIDER_OK) status = reserve_scratch(tokens, selected);
  std::vector<Pages> of_cache;
  if (status == OUTRIDER_OK) status = cache->reserve((cache_tokens + kBlockTokens - 1) / kBlockTokens, &of_cache);
  if (status != OUTRIDER_OK) return status;
  // All threads touch slabs: one alone may need seconds for a gigabyte.
  pool->run([&](int thread) {
    for (size_t i = static_cast<size_t>(thread); i < of_cache.size(); i += static_cast<size_t>(pool->threads()))
      touch_pages(of_cache[i].memory, of_cache[i].bytes);
  });
  for (const Scratch *scratch : {&words, &scales, &offsets, &starts, &less, &attention, &expanded}) scratch->touch();
  for (const auto &buffer : buffers) buffer->touch();
  for (const auto &rotation : rotations) rotation->tables.touch();
  return OUTRIDER_OK;
}

outrider_op *Engine::head() {
  int32_t scores = ops.back().in.buffer;
  for (size_t i = ops.size() - 1; i-- > 0;) {
    if (ops[i].out.buffer != scores) continue;
    if (ops[i].kind == OUTRIDER_LINEAR) return &ops[i];
    if (ops[i].kind != OUTRIDER_SCATTER) return nullptr;
    scores = ops[i].in.buffer;
  }
  return nullptr;
}

int32_t Engine::correct(int tokens) {
  if (tokens < 1) return fail(OUTRIDER_INVALID, "the scores of %d tokens cannot be corrected", tokens);
  const outrider_op *const op = head();
  if (!op) return fail(OUTRIDER_INVALID, "corrections need a matrix that makes the scores");
  states_of_choices = op->in;
  corrections = std::make_unique<Corrections>(states_of_choices.width, tokens);
  return OUTRIDER_OK;
}

int32_t Engine::shorten(int tokens) {
  score_all();
  if (tokens == 0) return OUTRIDER_OK;
  // Room first: if memory runs out, all tokens are scored.
  ops.reserve(ops.size() + 1);
  next_linear.reserve(ops.size() + 1);
  weights.reserve(weights.size() + 3);
  widths.reserve(widths.size() + 1);
  buffers.reserve(buffers.size() + 1);
  outrider_op *const op = head();
  if (!op || op->out.width != vocabulary || op->residual.buffer >= 0)
    return fail(OUTRIDER_INVALID, "a shortlist needs a matrix that makes the scores of all tokens");
  auto made = std::make_unique<Shortlist>();
  const int32_t status = made->create(weights[static_cast<size_t>(op->weight)],
                                      op->bias >= 0 ? &weights[static_cast<size_t>(op->bias)] : nullptr, tokens);
  if (status != OUTRIDER_OK) return status;
  auto scores = std::make_unique<Scratch>();
  const auto number_of = [this](const outrider_weight &weight) {
    weights.push_back(weight);
    return static_cast<int32_t>(weights.size() - 1);
  };
  whole_head = *op;
  outrider_op spread{};
  spread.kind = OUTRIDER_SCATTER;
  spread.weight = number_of(made->ids());
  spread.bias = spread.residual.buffer = spread.key.buffer = spread.value.buffer = -1;
  spread.in = {static_cast<int32_t>(widths.size()), 0, tokens};
  spread.out = op->out;
  widths.push_back(tokens);
  buffers.push_back(std::move(scores));
  op->weight = number_of(made->matrix());
  if (op->bias >= 0) op->bias = number_of(made->bias());
  op->out = spread.in;
  ops.insert(ops.begin() + (op - ops.data()) + 1, spread);
  shortlist = std::move(made);
  plan_linear();
  int32_t planned = OUTRIDER_OK;
  try {
    planned = plan_pairs();
  } catch (...) {
    score_all();
    throw;
  }
  if (planned != OUTRIDER_OK) score_all();
  return planned;
}

void Engine::score_all() {
  if (!shortlist) return;
  outrider_op *const op = head();
  weights.resize(weights.size() - (op->bias >= 0 ? 3 : 2));
  if (!pair_constants.empty()) pair_constants.resize(weights.size());
  widths.pop_back();
  buffers.pop_back();
  *op = whole_head;
  ops.erase(ops.begin() + (op - ops.data()) + 1);
  shortlist.reset();
  plan_linear();
}

void Engine::meet(const int32_t *tokens, int count) {
  if (!shortlist) return;
  const std::vector<int32_t> changed = shortlist->meet(tokens, count);
  const int32_t matrix = head()->weight;
  if (!pair_constants_of(matrix)) return;
  for (const int32_t tile : changed) plan_pairs_of(matrix, 0, tile);
}

int32_t Engine::learn(int row, int first, const int32_t *tokens, int count, int32_t *better, int32_t *worse) {
  *better = *worse = 0;
  const int32_t status = check_row(row);
  if (status != OUTRIDER_OK) return status;
  if (!corrections || first < 0 || count < 0) return fail(OUTRIDER_INVALID, "nothing to correct behind token %d", first);
  const RowState &state = rows[static_cast<size_t>(row)];
  for (int i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocabulary)
      return fail(OUTRIDER_INVALID, "row %d: token %d is not in the vocabulary of %d", row, tokens[i], vocabulary);
    const size_t slot = static_cast<size_t>((first + i) % kKeptChoices);
    if (state.kept.empty() || state.kept[slot].length != first + i) continue;
    const float *from = state.kept_states.data() + static_cast<int64_t>(slot) * corrections->width();
    const int good = corrections->learn(*kernels, state.kept[slot], from, tokens[i]);
    *better += good > 0;
    *worse += good < 0;
  }
  return OUTRIDER_OK;
}

}  // namespace outrider
