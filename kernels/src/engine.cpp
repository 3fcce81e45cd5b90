// Creating an engine (every field of the program is checked here, once) and its rows.
#include "engine.h"

#include <algorithm>
#include <array>

#include "message.h"
#include "pack.h"

namespace outrider {
namespace {

bool is_vector(const outrider_weight &weight, int width) {
  return weight.table && weight.format == OUTRIDER_FP32 && weight.rows == 1 && weight.columns >= width;
}

// Whether a vector holds ids of the vocabulary, each once: threads write to where it points.
bool are_tokens(const outrider_weight &weight, int count, int vocabulary) {
  const float *ids = static_cast<const float *>(weight.data);
  std::vector<bool> seen(static_cast<size_t>(vocabulary), false);
  for (int i = 0; i < count; ++i) {
    if (!(ids[i] >= 0.0f) || ids[i] >= static_cast<float>(vocabulary)) return false;
    const int32_t id = static_cast<int32_t>(ids[i]);
    if (static_cast<float>(id) != ids[i] || seen[static_cast<size_t>(id)]) return false;
    seen[static_cast<size_t>(id)] = true;
  }
  return true;
}

// Of a tile of a matrix that is multiplied in pairs: a word for every output and block of channels.
int64_t pair_words(const outrider_weight &weight) {
  const int block = geometry(weight).block;
  return static_cast<int64_t>((weight.columns + block - 1) / block) * kTileRows;
}

}  // namespace

int32_t Engine::check_slice(const outrider_slice &slice, int width, const char *what) const {
  if (slice.buffer < 0 || slice.buffer >= static_cast<int>(widths.size()) || slice.offset < 0 || slice.width < 1 ||
      slice.offset + slice.width > widths[static_cast<size_t>(slice.buffer)])
    return fail(OUTRIDER_INVALID, "%s: columns %d..%d of buffer %d do not exist", what, slice.offset,
                slice.offset + slice.width, slice.buffer);
  if (slice.width != width) return fail(OUTRIDER_INVALID, "%s has %d columns instead of %d", what, slice.width, width);
  return OUTRIDER_OK;
}

// The matrices of all experts are alike, so that what is planned for one serves for all.
int32_t Engine::check_experts(const outrider_op &op) const {
  const int64_t count = static_cast<int64_t>(weights.size());
  if (op.weight < 0 || op.weight + int64_t{op.heads} > count || op.bias + int64_t{op.heads} > count)
    return fail(OUTRIDER_INVALID, "%d experts from weight %d and bias %d on, of %lld", op.heads, op.weight, op.bias,
                static_cast<long long>(count));
  const outrider_weight &first = weights[static_cast<size_t>(op.weight)];
  const auto shape = [](const outrider_weight &w) {
    return std::array<int32_t, 10>{w.format, w.rows,  w.columns, w.group, w.gated,
                                   w.table,  w.codes, w.scales,  w.zeros, w.ordered};
  };
  for (int32_t e = 0; e < op.heads; ++e) {
    if (shape(weights[static_cast<size_t>(op.weight + e)]) != shape(first) || first.table)
      return fail(OUTRIDER_INVALID, "experts need matrices in tiles, all of one shape and storage");
    if (op.bias >= 0 && !is_vector(weights[static_cast<size_t>(op.bias + e)], first.rows))
      return fail(OUTRIDER_INVALID, "an expert's bias is an fp32 vector, one element a row");
  }
  const int64_t in = op.integer ? op.kv_heads * round_up(first.columns, kLanes) : first.columns;
  const int64_t out = op.kv_heads * round_up(first.gated ? first.rows / 2 : first.rows, kLanes);
  int32_t status = check_slice(op.in, static_cast<int>(in), "experts' input");
  if (status == OUTRIDER_OK) status = check_slice(op.out, static_cast<int>(out), "experts' output");
  if (status == OUTRIDER_OK &&
      (op.out.offset || op.out.width != out || (op.integer && (op.in.offset || op.in.width != in))))
    status = fail(OUTRIDER_INVALID, "experts' products fill a buffer");
  return status;
}

int32_t Engine::check_convolution(const outrider_op &op) const {
  if (op.weight < 0) return fail(OUTRIDER_INVALID, "a convolution needs taps");
  const outrider_weight &weight = weights[static_cast<size_t>(op.weight)];
  if (!weight.table || weight.format != OUTRIDER_FP32 || weight.columns < 2 || weight.columns > kMostTaps)
    return fail(OUTRIDER_INVALID, "a convolution's taps are an fp32 table of 2 to %d for each column", kMostTaps);
  if (op.bias >= 0 && !is_vector(weights[static_cast<size_t>(op.bias)], weight.rows))
    return fail(OUTRIDER_INVALID, "a convolution's bias is an fp32 vector");
  for (const outrider_slice *slice : {&op.in, &op.key, &op.value, &op.out}) {
    if (slice->buffer < 0 && (slice == &op.key || slice == &op.value)) continue;
    const int32_t status = check_slice(*slice, weight.rows, "what a convolution reads or writes");
    if (status != OUTRIDER_OK) return status;
  }
  if (op.out.buffer == op.in.buffer || op.out.buffer == op.key.buffer || op.out.buffer == op.value.buffer)
    return fail(OUTRIDER_INVALID, "a convolution cannot write into what it reads");
  return OUTRIDER_OK;
}

// `selected` are the buffers that hold selected positions only, none before the first select; `selecting`: the operation before
// was a select.
int32_t Engine::check_op(const outrider_op &op, bool selecting, std::vector<bool> *selected) {
  const int weight_count = static_cast<int>(weights.size());
  const bool needs_weight = op.kind <= OUTRIDER_ROPE;
  if (!(op.cap >= 0.0f) || !(op.scale - op.scale == 0.0f))
    return fail(OUTRIDER_INVALID, "a scale or a cap that is no number");
  if (op.weight >= weight_count || op.bias >= weight_count || (needs_weight && op.weight < 0))
    return fail(OUTRIDER_INVALID, "an operation of kind %d names weight %d or bias %d of %d", op.kind, op.weight, op.bias,
                weight_count);
  const outrider_weight *weight = op.weight >= 0 ? &weights[static_cast<size_t>(op.weight)] : nullptr;
  const outrider_weight *bias = op.bias >= 0 ? &weights[static_cast<size_t>(op.bias)] : nullptr;
  int32_t status = OUTRIDER_OK;
  const auto check = [&](const outrider_slice &slice, int width, const char *what) {
    if (status == OUTRIDER_OK) status = check_slice(slice, width, what);
  };
  const auto refuse = [&](bool bad, const char *what) {
    if (status == OUTRIDER_OK && bad) status = fail(OUTRIDER_INVALID, "%s", what);
  };
  const bool behind = std::find(selected->begin(), selected->end(), true) != selected->end();
  const auto holds_selected = [&](const outrider_slice &slice) {
    return slice.buffer >= 0 && slice.buffer < static_cast<int>(selected->size()) &&
           (*selected)[static_cast<size_t>(slice.buffer)];
  };
  const bool every_token = op.kind == OUTRIDER_EMBED || op.kind == OUTRIDER_POSITION || op.kind == OUTRIDER_ROPE ||
                           op.kind == OUTRIDER_ATTENTION || op.kind == OUTRIDER_CONVOLVE || op.kind == OUTRIDER_DELTA;
  refuse(behind && every_token,
         "embeddings, rope, attention and recurrent states work on all positions, and come before select");
  refuse(behind && op.kind != OUTRIDER_SELECT &&
             (!holds_selected(op.in) || (op.residual.buffer >= 0 && !holds_selected(op.residual))),
         "behind select an operation reads positions that were not selected");
  switch (op.kind) {
    case OUTRIDER_EMBED:
      refuse(!weight->table && (!integer_format(weight->format) || weight->ordered || weight->gated),
             "an embedding needs a table, or a matrix of codes whose columns have no order of their own");
      refuse(weight->rows < vocabulary, "an embedding needs a table with a row for every token");
      check(op.out, weight->columns, "embedding output");
      break;
    case OUTRIDER_POSITION:
      refuse(!weight->table || op.integer < 0 || weight->rows < context + op.integer,
             "a position embedding needs a table with a row for every position");
      check(op.in, weight->columns, "position input");
      check(op.out, weight->columns, "position output");
      break;
    case OUTRIDER_NORM:
      refuse(op.heads < 1 || op.head_size < 1, "a norm needs heads and a head size");
      refuse(!is_vector(*weight, op.head_size) || (bias && !is_vector(*bias, op.head_size)),
             "a norm's weights are fp32 vectors");
      check(op.in, op.heads * op.head_size, "norm input");
      check(op.out, op.heads * op.head_size, "norm output");
      if (op.residual.buffer >= 0) check(op.residual, op.heads * op.head_size, "norm residual");
      break;
    case OUTRIDER_LINEAR: {
      const int width = weight->gated ? weight->rows / 2 : weight->rows;
      refuse(weight->table, "a linear layer needs a matrix in tiles");
      refuse(bias && !is_vector(*bias, weight->rows), "a linear layer's bias is an fp32 vector, one element a row");
      refuse(weight->gated && op.residual.buffer >= 0, "a gated layer has no residual");
      check(op.in, weight->columns, "linear input");
      check(op.out, width, "linear output");
      if (op.residual.buffer >= 0) check(op.residual, width, "residual");
      refuse(op.in.buffer == op.out.buffer, "a linear layer cannot write into its input's buffer");
      break;
    }
    case OUTRIDER_ROPE:
      refuse(op.heads < 1 || op.rotated < 2 || op.rotated % 2 || op.rotated > op.head_size,
             "rope needs an even number of columns of a head");
      refuse(!is_vector(*weight, op.rotated / 2), "rope's frequencies are an fp32 vector, one for two columns");
      refuse(op.longest < 0 || (op.longest > 0 && (!bias || !is_vector(*bias, op.rotated / 2))),
             "rope of long rows has frequencies of its own, as many");
      refuse(op.longest > 0 && longest > 0 && op.longest != longest, "rope changes at two lengths of a row");
      if (op.longest > 0) longest = op.longest;
      check(op.in, op.heads * op.head_size, "rope input");
      break;
    case OUTRIDER_ATTENTION:
      refuse(op.head_size < 8 || op.head_size % 8, "a head size must be a multiple of 8");
      refuse(op.kv_heads < 1 || op.heads < 1 || op.heads % op.kv_heads, "query heads must be a multiple of key heads");
      check(op.in, op.heads * op.head_size, "queries");
      check(op.key, op.kv_heads * op.head_size, "keys");
      check(op.value, op.kv_heads * op.head_size, "values");
      check(op.out, op.heads * op.head_size, "attention output");
      refuse(weight && !is_vector(*weight, op.heads), "sinks are an fp32 vector, one for each head");
      refuse(op.in.buffer == op.out.buffer, "attention cannot write into its queries' buffer");
      refuse(op.key.buffer == op.out.buffer || op.value.buffer == op.out.buffer,
             "attention cannot write over keys and values");
      break;
    case OUTRIDER_ROUTE:
      refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads || op.heads > 1 << 20,
             "a token takes some of the experts");
      check(op.in, op.heads, "scores of experts");
      check(op.out, 2 * op.kv_heads, "experts and weights");
      refuse(op.in.buffer == op.out.buffer, "route cannot write into its input's buffer");
      break;
    case OUTRIDER_EXPERTS:
      refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads, "a token takes some of the experts");
      check(op.key, 2 * op.kv_heads, "experts and weights");
      if (status == OUTRIDER_OK) status = check_experts(op);
      refuse(op.in.buffer == op.out.buffer || op.residual.buffer >= 0,
             "experts have no residual, and an output of their own");
      break;
    case OUTRIDER_MIX:
      refuse(op.kv_heads < 1, "mix needs the number of a token's experts");
      check(op.key, 2 * op.kv_heads, "experts and weights");
      check(op.in, static_cast<int>(op.kv_heads * round_up(op.out.width, kLanes)), "experts' products");
      refuse(op.in.offset || op.in.width != widths[static_cast<size_t>(op.in.buffer)], "experts' products fill a buffer");
      check(op.out, op.out.width, "mix output");
      if (op.residual.buffer >= 0) check(op.residual, op.out.width, "mix residual");
      refuse(op.in.buffer == op.out.buffer || op.residual.buffer == op.out.buffer, "mix cannot write into what it reads");
      break;
    case OUTRIDER_GATE:
      check(op.key, op.key.width == 1 ? 1 : op.out.width, "gate");
      check(op.in, op.out.width, "gate input");
      check(op.out, op.out.width, "gate output");
      if (op.residual.buffer >= 0) check(op.residual, op.out.width, "gate residual");
      break;
    case OUTRIDER_CONVOLVE:
      if (status == OUTRIDER_OK) status = check_convolution(op);
      break;
    case OUTRIDER_DELTA:
      refuse(op.heads < 1 || op.kv_heads < 1 || op.heads % op.kv_heads || op.head_size < 1,
             "the delta rule's heads must be a multiple of its key heads");
      refuse(!weight || !bias || !is_vector(*weight, op.heads) || !is_vector(*bias, op.heads),
             "the delta rule's decays are fp32 vectors, one number a head");
      if (status != OUTRIDER_OK) break;
      refuse(op.out.width % (op.heads * kLanes), "the delta rule's values have a multiple of 16 columns a head");
      check(op.in, op.kv_heads * op.head_size, "queries");
      check(op.key, op.kv_heads * op.head_size, "keys");
      check(op.value, op.out.width, "values");
      check(op.residual, 2 * op.heads, "gates");
      check(op.out, op.out.width, "the delta rule's output");
      refuse(op.out.buffer == op.in.buffer || op.out.buffer == op.key.buffer || op.out.buffer == op.value.buffer ||
                 op.out.buffer == op.residual.buffer,
             "the delta rule cannot write into what it reads");
      break;
    case OUTRIDER_HAND_OUT:
      refuse(behind, "states are handed out before select");
      refuse(op.integer < 0 || op.integer > 1 << 24, "a state's columns begin at 0");
      check(op.in, op.in.width, "state");
      break;
    case OUTRIDER_TAKE_IN:
      refuse(behind, "states are taken in before select");
      check(op.out, op.out.width, "state taken in");
      break;
    case OUTRIDER_GO_ON:
      refuse(behind, "states are taken in before select");
      check(op.in, op.out.width, "state");
      check(op.out, op.out.width, "state");
      refuse(op.in.buffer == op.out.buffer, "go on cannot write into its input's buffer");
      break;
    case OUTRIDER_LEAVE:
      refuse(!behind, "a state is left behind select");
      check(op.in, op.in.width, "state left");
      break;
    case OUTRIDER_SPREAD:
      refuse(!weight || !is_vector(*weight, op.in.width), "spread needs a vector of token ids");
      refuse(!behind, "logits are spread behind select");
      check(op.in, op.in.width, "logits");
      check(op.out, vocabulary, "logits of the whole vocabulary");
      refuse(op.in.buffer == op.out.buffer, "spread cannot write into its input's buffer");
      if (status == OUTRIDER_OK && !are_tokens(*weight, op.in.width, vocabulary))
        status = fail(OUTRIDER_INVALID, "spread needs ids of %d tokens, each once", vocabulary);
      break;
    case OUTRIDER_SELECT:
      refuse(behind && !selecting, "selects stand side by side");
      refuse(holds_selected(op.in) || holds_selected(op.out),
             "what is selected already is neither selected from nor written again");
      check(op.in, op.in.width, "select input");
      check(op.out, op.in.width, "select output");
      refuse(op.in.buffer == op.out.buffer, "select cannot write into its input's buffer");
      break;
    case OUTRIDER_CHOOSE:
      refuse(!behind, "choose needs a select before it");
      check(op.in, vocabulary, "logits");
      break;
    default:
      return fail(OUTRIDER_INVALID, "operation kind %d is unknown", op.kind);
  }
  if (status == OUTRIDER_OK && op.out.buffer >= 0 && op.kind != OUTRIDER_CHOOSE && (behind || op.kind == OUTRIDER_SELECT))
    (*selected)[static_cast<size_t>(op.out.buffer)] = true;
  return status;
}

int32_t Engine::check(const outrider_program &program) {
  if (program.op_count < 1 || program.vocabulary < 1 || program.context < 1)
    return fail(OUTRIDER_INVALID, "a program of %d operations, vocabulary %d, context %d", program.op_count,
                program.vocabulary, program.context);
  for (const outrider_weight &weight : weights) {
    const int32_t status = check_weight(weight);
    if (status != OUTRIDER_OK) return status;
    if (!weight.data || reinterpret_cast<uintptr_t>(weight.data) % 64)
      return fail(OUTRIDER_INVALID, "packed weights must lie at a multiple of 64 bytes");
  }
  std::vector<bool> selected(widths.size());
  bool selecting = false;
  for (const outrider_op &op : ops) {
    const int32_t status = check_op(op, selecting, &selected);
    if (status != OUTRIDER_OK) return status;
    selecting = op.kind == OUTRIDER_SELECT;
  }
  if (ops.back().kind != OUTRIDER_CHOOSE) return fail(OUTRIDER_INVALID, "a program ends with choose");
  return check_states_of_program();
}

// What a head takes in goes on, and what it goes on with is left: one of each, in this order.
int32_t Engine::check_states_of_program() {
  std::vector<const outrider_op *> found;
  for (const outrider_op &op : ops) {
    if (op.kind == OUTRIDER_HAND_OUT) handed_out = std::max(handed_out, op.integer + op.in.width);
    if (op.kind == OUTRIDER_TAKE_IN || op.kind == OUTRIDER_GO_ON || op.kind == OUTRIDER_LEAVE) found.push_back(&op);
  }
  if (found.empty()) return OUTRIDER_OK;
  if (found.size() != 3 || found[0]->kind != OUTRIDER_TAKE_IN || found[1]->kind != OUTRIDER_GO_ON ||
      found[2]->kind != OUTRIDER_LEAVE || found[1]->out.width != found[2]->in.width)
    return fail(OUTRIDER_INVALID, "a program takes a state in, goes on with one, and leaves one as wide, once each");
  taken_in = found[0]->out.width;
  return OUTRIDER_OK;
}

int32_t Engine::plan_cache(int layers, int64_t limit) {
  if (cache_format < OUTRIDER_CACHE_BF16 || cache_format > OUTRIDER_CACHE_INT8)
    return fail(OUTRIDER_INVALID, "cache format %d is unknown", cache_format);
  const int64_t scales = scale_bytes(cache_format), element = element_bytes(cache_format);
  std::vector<CacheLayer> plan(static_cast<size_t>(layers));
  int64_t block_bytes = 0;
  int found = 0;
  for (const outrider_op &op : ops) {
    if (op.kind != OUTRIDER_ATTENTION) continue;
    if (op.integer < 0 || op.integer >= layers || plan[static_cast<size_t>(op.integer)].key_bytes)
      return fail(OUTRIDER_INVALID, "attention layer %d of %d, or twice", op.integer, layers);
    CacheLayer &layer = plan[static_cast<size_t>(op.integer)];
    layer.key_bytes = kBlockTokens * static_cast<int64_t>(op.head_size) * element + 2 * scales;
    layer.value_bytes = kBlockTokens * round_up(op.head_size, kLanes) * element;
    layer.keys = block_bytes;
    layer.values = layer.keys + layer.key_bytes * op.kv_heads;
    block_bytes = layer.values + layer.value_bytes * op.kv_heads;
    most_attention = std::max(most_attention, attention_scratch(op.head_size));
    ++found;
  }
  if (found != layers) return fail(OUTRIDER_INVALID, "%d attention layers instead of %d", found, layers);
  cache = std::make_unique<Cache>(std::move(plan), std::max<int64_t>(round_up(block_bytes, 64), 64), limit);
  return OUTRIDER_OK;
}

// What matrices that are multiplied in pairs of channels need beside their codes: a word for every 128 or fewer of them.
int32_t Engine::plan_pairs() {
  if (!kernels->paired) return OUTRIDER_OK;
  pair_constants.resize(weights.size());
  for (const outrider_op &op : ops) {
    if (op.kind != OUTRIDER_LINEAR || !kernels->paired(weights[static_cast<size_t>(op.weight)], INT32_MAX)) continue;
    const outrider_weight &weight = weights[static_cast<size_t>(op.weight)];
    std::unique_ptr<Scratch> &constants = pair_constants[static_cast<size_t>(op.weight)];
    if (constants) continue;
    constants = std::make_unique<Scratch>();
    if (!constants->reserve(tile_count(weight) * pair_words(weight) * 4))
      return fail(OUTRIDER_NO_MEMORY, "no memory for what products in pairs need of a matrix of %d rows", weight.rows);
    for (int tile = 0; tile < tile_count(weight); ++tile) plan_pairs_of(op.weight, tile);
  }
  return OUTRIDER_OK;
}

void Engine::plan_pairs_of(int weight, int tile) {
  const outrider_weight &matrix = weights[static_cast<size_t>(weight)];
  int32_t *const constants = pair_constants[static_cast<size_t>(weight)]->as<int32_t>();
  kernels->pair_constants(matrix, tile, constants + tile * pair_words(matrix));
}

void Engine::plan_linear() {
  next_linear.assign(ops.size(), -1);
  for (size_t i = ops.size() - 1; i > 0; --i)
    next_linear[i - 1] = ops[i].kind == OUTRIDER_LINEAR ? static_cast<int32_t>(i) : next_linear[i];
}

int32_t Engine::create(const outrider_program &program, const outrider_options &options, std::unique_ptr<Engine> *result) {
  auto engine = std::make_unique<Engine>();
  const char *message = nullptr;
  engine->kernels = choose_kernels(&message);
  if (!engine->kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
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
  for (outrider_op &op : engine->ops) {
    if (op.kind == OUTRIDER_LINEAR || op.kind == OUTRIDER_EXPERTS) {
      const int64_t rows = op.kind == OUTRIDER_EXPERTS ? op.kv_heads + 1 : 1;  // of a token, itself and for its experts
      const outrider_weight &weight = engine->weights[static_cast<size_t>(op.weight)];
      const int64_t digits = digits_of(weight.format);
      engine->most_words = std::max(engine->most_words, rows * digits * words_in_row(weight));
      engine->most_expanded = std::max(engine->most_expanded, expanded_bytes(weight));
      if (weight.group) {
        // FACTORS have offsets for whole blocks, more than there are groups in a matrix of one narrow block.
        const int64_t blocks = (weight.columns + geometry(weight).block - 1) / geometry(weight).block;
        const int64_t groups = (weight.columns + weight.group - 1) / weight.group;
        engine->most_groups =
            std::max(engine->most_groups, rows * digits * std::max(groups, blocks * offsets_in_block(weight)));
      }
    }
    if (op.kind != OUTRIDER_ROPE) continue;
    size_t index = 0;
    const int32_t long_weight = op.longest ? op.bias : -1;
    const auto same = [&](const Rotation &one) {
      return one.weight == op.weight && one.long_weight == long_weight && one.factor == op.scale &&
             one.half == op.rotated / 2;
    };
    while (index < engine->rotations.size() && !same(*engine->rotations[index])) ++index;
    if (index == engine->rotations.size()) {
      auto rotation = std::make_unique<Rotation>();
      rotation->weight = op.weight;
      rotation->long_weight = long_weight;
      rotation->factor = op.scale;
      rotation->half = op.rotated / 2;
      engine->rotations.push_back(std::move(rotation));
    }
    op.integer = static_cast<int32_t>(index);
  }
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
  samplers.resize(static_cast<size_t>(threads));
  claims.resize(ops.size(), threads);
  pool = std::move(made);
  return OUTRIDER_OK;
}

int32_t Engine::reserve(int tokens, int selected, int64_t cache_tokens) {
  if (tokens < 1 || selected < 0 || selected > tokens || cache_tokens < 0)
    return fail(OUTRIDER_INVALID, "memory for passes of %d tokens, %d choices and %lld tokens of cache", tokens, selected,
                static_cast<long long>(cache_tokens));
  int32_t status = reserve_scratch(tokens, selected);
  std::vector<Pages> of_cache;
  if (status == OUTRIDER_OK) status = cache->reserve((cache_tokens + kBlockTokens - 1) / kBlockTokens, &of_cache);
  if (status != OUTRIDER_OK) return status;
  // Slab by slab: a gigabyte can take a thread seconds.
  pool->run([&](int thread) {
    for (size_t i = static_cast<size_t>(thread); i < of_cache.size(); i += static_cast<size_t>(pool->threads()))
      touch_pages(of_cache[i].memory, of_cache[i].bytes);
  });
  for (const Scratch *scratch : {&words, &scales, &offsets, &starts, &less, &attention, &expanded}) scratch->touch();
  for (const auto &buffer : buffers) buffer->touch();
  for (const auto &rotation : rotations) rotation->tables.touch();
  return OUTRIDER_OK;
}

int32_t Engine::check_row(int row) const {
  if (row < 0 || row >= static_cast<int>(rows.size()) || !rows[static_cast<size_t>(row)].open)
    return fail(OUTRIDER_NO_ROW, "row %d is not open", row);
  return OUTRIDER_OK;
}

int32_t Engine::open(const outrider_sampling &sampling, int prompt, int32_t *row) {
  Sampling copy;
  const int32_t status = copy_sampling(sampling, vocabulary, &copy);
  if (status != OUTRIDER_OK) return status;
  size_t index = 0;
  while (index < rows.size() && rows[index].open) ++index;
  if (index == rows.size()) rows.emplace_back();
  RowState &state = rows[index];
  state.open = true;
  state.prompt = std::max(prompt, 0);
  state.sampling = std::move(copy);
  *row = static_cast<int32_t>(index);
  return OUTRIDER_OK;
}

int32_t Engine::fork(int source, int length, const outrider_sampling &sampling, int prompt, int32_t *row) {
  int32_t status = check_row(source);
  if (status != OUTRIDER_OK) return status;
  const int held = static_cast<int>(rows[static_cast<size_t>(source)].history.size());
  if (length < 0 || length > held) return fail(OUTRIDER_INVALID, "a fork of %d tokens from a row of %d", length, held);
  status = open(sampling, prompt, row);
  if (status != OUTRIDER_OK) return status;
  const RowState &from = rows[static_cast<size_t>(source)];
  RowState &to = rows[static_cast<size_t>(*row)];
  to.history.assign(from.history.begin(), from.history.begin() + length);
  to.rope = from.rope;
  to.begin = std::min(from.begin, length);
  if (!recurrence.empty()) to.recurrence = from.recurrence.forked(length, recurrence);
  if (longest > 0 && (from.rope == RowRope::kNone || (from.rope == RowRope::kUsual && length > longest))) {
    to.rope = RowRope::kNone;  // of what has no keys there is nothing to share
    return OUTRIDER_OK;
  }
  to.blocks.assign(from.blocks.begin(), from.blocks.begin() + (cached(to) + kBlockTokens - 1) / kBlockTokens);
  for (const int block : to.blocks) cache->retain(block);
  return OUTRIDER_OK;
}

int32_t Engine::truncate(int row, int length) {
  const int32_t status = check_row(row);
  if (status != OUTRIDER_OK) return status;
  RowState &state = rows[static_cast<size_t>(row)];
  if (length < 0 || length > static_cast<int>(state.history.size()))
    return fail(OUTRIDER_INVALID, "row %d has %d tokens and cannot be truncated to %d", row,
                static_cast<int>(state.history.size()), length);
  state.history.resize(static_cast<size_t>(length));
  state.begin = std::min(state.begin, length);
  if (static_cast<size_t>(length) < state.left_at) state.left.clear();
  if (!recurrence.empty()) state.recurrence.truncate(length);
  for (const size_t kept = static_cast<size_t>((cached(state) + kBlockTokens - 1) / kBlockTokens);
       state.blocks.size() > kept;) {
    cache->release(state.blocks.back());
    state.blocks.pop_back();
  }
  return OUTRIDER_OK;
}

int32_t Engine::skip(int row, const int32_t *tokens, int count) {
  int32_t status = check_row(row);
  if (status != OUTRIDER_OK) return status;
  RowState &state = rows[static_cast<size_t>(row)];
  const int64_t length = static_cast<int64_t>(state.history.size()) + count;
  if (count < 1 || longest > 0 || !recurrence.empty())
    return fail(OUTRIDER_INVALID, "row %d cannot skip %d tokens", row, count);
  if (length > context)
    return fail(OUTRIDER_CONTEXT, "row %d would hold %lld tokens, the model's context is %d", row,
                static_cast<long long>(length), context);
  for (int t = 0; t < count; ++t)
    if (tokens[t] < 0 || tokens[t] >= vocabulary)
      return fail(OUTRIDER_INVALID, "row %d: token %d is not in the vocabulary of %d", row, tokens[t], vocabulary);
  const int32_t id = row, counts = count;
  outrider_batch batch{};
  batch.feeds = 1;
  batch.rows = &id;
  batch.counts = &counts;
  status = reserve_blocks(batch);
  if (status != OUTRIDER_OK) return status;
  state.history.insert(state.history.end(), tokens, tokens + count);
  meet(tokens, count);
  state.begin = static_cast<int32_t>(length);
  state.left.clear();
  return OUTRIDER_OK;
}

int32_t Engine::close(int row) {
  const int32_t status = truncate(row, 0);
  if (status != OUTRIDER_OK) return status;
  rows[static_cast<size_t>(row)] = RowState();
  return OUTRIDER_OK;
}

outrider_op *Engine::head() {
  int32_t scores = ops.back().in.buffer;
  for (size_t i = ops.size() - 1; i-- > 0;) {
    if (ops[i].out.buffer != scores) continue;
    if (ops[i].kind == OUTRIDER_LINEAR) return &ops[i];
    if (ops[i].kind != OUTRIDER_SPREAD) return nullptr;
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
  outrider_op *const op = head();
  if (!op || op->out.width != vocabulary || op->residual.buffer >= 0)
    return fail(OUTRIDER_INVALID, "a shortlist needs a matrix that makes the scores of all tokens");
  auto made = std::make_unique<Shortlist>();
  const int32_t status = made->create(weights[static_cast<size_t>(op->weight)],
                                      op->bias >= 0 ? &weights[static_cast<size_t>(op->bias)] : nullptr, tokens);
  if (status != OUTRIDER_OK) return status;
  const auto number_of = [this](const outrider_weight &weight) {
    weights.push_back(weight);
    return static_cast<int32_t>(weights.size() - 1);
  };
  whole_head = *op;
  outrider_op spread{};
  spread.kind = OUTRIDER_SPREAD;
  spread.weight = number_of(made->ids());
  spread.bias = spread.residual.buffer = spread.key.buffer = spread.value.buffer = -1;
  spread.in = {static_cast<int32_t>(widths.size()), 0, tokens};
  spread.out = op->out;
  widths.push_back(tokens);
  buffers.push_back(std::make_unique<Scratch>());
  op->weight = number_of(made->matrix());
  if (op->bias >= 0) op->bias = number_of(made->bias());
  op->out = spread.in;
  ops.insert(ops.begin() + (op - ops.data()) + 1, spread);
  shortlist = std::move(made);
  plan_linear();
  claims.resize(ops.size(), pool->threads());
  return plan_pairs();
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
  claims.resize(ops.size(), pool->threads());
}

void Engine::meet(const int32_t *tokens, int count) {
  if (!shortlist) return;
  const std::vector<int32_t> changed = shortlist->meet(tokens, count);
  const int32_t matrix = head()->weight;
  if (pair_constants.empty() || !pair_constants[static_cast<size_t>(matrix)]) return;
  for (const int32_t tile : changed) plan_pairs_of(matrix, tile);
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

int32_t Engine::length(int row) const {
  const int32_t status = check_row(row);
  return status == OUTRIDER_OK ? static_cast<int32_t>(rows[static_cast<size_t>(row)].history.size()) : -status;
}

}  // namespace outrider
