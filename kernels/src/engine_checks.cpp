// Checks every field of a program, once, when an engine is created for it.
#include "engine.h"

#include <algorithm>
#include <array>
#include <utility>

#include "message.h"
#include "pack.h"

namespace outrider {
namespace {

bool is_vector(const outrider_weight &weight, int width) {
  return weight.table && weight.format == OUTRIDER_FP32 && weight.rows == 1 && weight.columns >= width;
}

bool is_table(const outrider_weight &weight, int rows, int columns) {
  return weight.table && weight.format == OUTRIDER_FP32 && weight.rows == rows && weight.columns == columns;
}

// Whether a vector holds distinct ids of the vocabulary: SCATTER writes to these columns, by several threads.
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

}  // namespace

int32_t Engine::check_slice(const outrider_slice &slice, int64_t width, const char *what) const {
  const int64_t end = int64_t{slice.offset} + slice.width;
  if (slice.buffer < 0 || slice.buffer >= static_cast<int>(widths.size()) || slice.offset < 0 || slice.width < 1 ||
      end > widths[static_cast<size_t>(slice.buffer)])
    return fail(OUTRIDER_INVALID, "%s: columns %d..%lld of buffer %d do not exist", what, slice.offset,
                static_cast<long long>(end), slice.buffer);
  if (slice.width != width)
    return fail(OUTRIDER_INVALID, "%s has %d columns instead of %lld", what, slice.width, static_cast<long long>(width));
  return OUTRIDER_OK;
}

bool Engine::are_alike(int32_t weight, int32_t count) const {
  const auto shape = [&](int32_t number) {
    const outrider_weight &w = weights[static_cast<size_t>(number)];
    return std::array<int32_t, 10>{w.format, w.rows,  w.columns, w.group, w.gated,
                                   w.table,  w.codes, w.scales,  w.zeros, w.ordered};
  };
  for (int32_t number = weight; number < weight + count; ++number)
    if (shape(number) != shape(weight) || weights[static_cast<size_t>(weight)].table) return false;
  return true;
}

// A head's input begins with the columns that are not multiplied, which are copied to its output.
int32_t Engine::check_heads(const outrider_op &op) const {
  const int64_t count = static_cast<int64_t>(weights.size());
  if (op.weight < 0 || op.heads < 1 || op.weight + int64_t{op.heads} > count)
    return fail(OUTRIDER_INVALID, "%d heads from weight %d on, of %lld", op.heads, op.weight,
                static_cast<long long>(count));
  const outrider_weight &first = weights[static_cast<size_t>(op.weight)];
  if (!are_alike(op.weight, op.heads) || first.gated)
    return fail(OUTRIDER_INVALID, "heads need matrices in tiles, all of one shape and storage, none of them gated");
  int32_t status = check_slice(op.in, op.in.width, "what heads multiply");
  if (status == OUTRIDER_OK) status = check_slice(op.out, op.out.width, "products of heads");
  if (status != OUTRIDER_OK) return status;
  const int kept = op.in.width / op.heads - first.columns;
  if (op.in.width % op.heads || op.out.width % op.heads || kept < 0 || op.out.width / op.heads != kept + first.rows)
    return fail(OUTRIDER_INVALID, "%d heads cannot make %d columns of %d by matrices of %d by %d", op.heads, op.out.width,
                op.in.width, first.rows, first.columns);
  if (op.in.buffer == op.out.buffer)
    return fail(OUTRIDER_INVALID, "products of heads cannot be written into their input's buffer");
  return OUTRIDER_OK;
}

// The matrices of all experts must have the same shape and storage, so that what is planned for one is right for all.
int32_t Engine::check_experts(const outrider_op &op) const {
  const int64_t count = static_cast<int64_t>(weights.size());
  if (op.weight < 0 || op.weight + int64_t{op.heads} > count || op.bias + int64_t{op.heads} > count)
    return fail(OUTRIDER_INVALID, "%d experts from weight %d and bias %d on, of %lld", op.heads, op.weight, op.bias,
                static_cast<long long>(count));
  const outrider_weight &first = weights[static_cast<size_t>(op.weight)];
  if (!are_alike(op.weight, op.heads))
    return fail(OUTRIDER_INVALID, "experts need matrices in tiles, all of one shape and storage");
  for (int32_t e = 0; e < op.heads; ++e) {
    if (op.bias >= 0 && !is_vector(weights[static_cast<size_t>(op.bias + e)], first.rows))
      return fail(OUTRIDER_INVALID, "an expert's bias is an fp32 vector, one element a row");
  }
  const int64_t in = op.integer ? op.kv_heads * round_up(first.columns, kLanes) : first.columns;
  const int64_t out = op.kv_heads * round_up(first.gated ? first.rows / 2 : first.rows, kLanes);
  int32_t status = check_slice(op.in, in, "experts' input");
  if (status == OUTRIDER_OK) status = check_slice(op.out, out, "experts' output");
  if (status == OUTRIDER_OK &&
      (op.out.offset || op.out.width != out || (op.integer && (op.in.offset || op.in.width != in))))
    status = fail(OUTRIDER_INVALID, "experts' products fill a buffer");
  return status;
}

int32_t Engine::check_choice(const outrider_op &op) const {
  if (op.heads > kMostRouted) return fail(OUTRIDER_INVALID, "these weights are for up to %d experts", kMostRouted);
  if (op.integer == OUTRIDER_SPARSE_MIXER)
    return op.kv_heads == 2 && op.weight < 0 && op.head_size == 0
               ? OUTRIDER_OK
               : fail(OUTRIDER_INVALID, "a sparse mixer takes two experts, without corrections or groups");
  if (op.weight >= 0 && !is_vector(weights[static_cast<size_t>(op.weight)], op.heads))
    return fail(OUTRIDER_INVALID, "corrections are an fp32 vector, one for each expert");
  if (op.head_size != 0 && op.integer > OUTRIDER_SOFTMAX_GROUPS)
    return fail(OUTRIDER_INVALID, "experts that are chosen by score have no groups");
  if (op.head_size == 0) return OUTRIDER_OK;
  const int64_t groups = op.head_size > 1 && op.heads % op.head_size == 0 ? op.heads / op.head_size : 0;
  if (op.window < 1 || op.window > groups || op.kv_heads > int64_t{op.window} * op.head_size)
    return fail(OUTRIDER_INVALID, "experts are chosen from some groups of two or more, which have enough of them");
  return OUTRIDER_OK;
}

// BLEND and MATCH_RMS, whose input holds `heads` vectors side by side.
int32_t Engine::check_vectors(const outrider_op &op) const {
  const bool blends = op.kind == OUTRIDER_BLEND;
  if (op.heads < 1 || op.in.width < op.heads || op.in.width % op.heads || !(op.epsilon >= 0.0f))
    return fail(OUTRIDER_INVALID, "vectors side by side are of one width");
  const int64_t width = op.in.width / op.heads, written = op.out.width / width;
  const int64_t of_key = blends ? written * op.heads : width;
  if (of_key != op.key.width || op.out.width % width || (!blends && op.out.width != op.in.width))
    return fail(OUTRIDER_INVALID, "%s",
                blends ? "a blend needs a coefficient for each vector of its input and its output"
                       : "vectors are matched with one of their width");
  for (const outrider_slice *slice : {&op.in, &op.key, &op.out, &op.residual}) {
    if (slice->buffer < 0 && slice == &op.residual) continue;
    const int width_of_slice = slice == &op.residual ? op.out.width : slice->width;
    const int32_t status = check_slice(*slice, width_of_slice, "vectors side by side");
    if (status != OUTRIDER_OK) return status;
  }
  // A thread may write one vector while another still reads for the next one.
  const auto meets_output = [&](const outrider_slice &slice) {
    return slice.buffer == op.out.buffer && slice.offset < op.out.offset + op.out.width &&
           op.out.offset < slice.offset + slice.width;
  };
  if (meets_output(op.key) || (blends && meets_output(op.in)))
    return fail(OUTRIDER_INVALID, "what makes several vectors cannot write over it");
  return OUTRIDER_OK;
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

// selected [buffers]: whether a buffer holds only selected tokens, as none does before the first SELECT. selecting: whether the previous
// operation is a SELECT.
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
  const auto check = [&](const outrider_slice &slice, int64_t width, const char *what) {
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
  // Whether an earlier operation has filled the cache that this ATTENTION reads.
  const auto reads_only = [&] {
    return std::any_of(std::as_const(ops).data(), &op, [&](const outrider_op &other) {
      return other.kind == OUTRIDER_ATTENTION && other.integer == op.integer;
    });
  };
  const bool every_token = op.kind == OUTRIDER_EMBED || op.kind == OUTRIDER_POSITION || op.kind == OUTRIDER_CONVOLVE ||
                           op.kind == OUTRIDER_DELTA || op.kind == OUTRIDER_SCAN ||
                           (op.kind == OUTRIDER_ATTENTION && !reads_only());
  refuse(behind && every_token,
         "embeddings, attention that fills a cache and recurrent states work on all positions, and come before select");
  refuse(behind && op.kind == OUTRIDER_ATTENTION && (holds_selected(op.key) || holds_selected(op.value)),
         "behind select attention has the keys and values of all positions");
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
      refuse(!weight->table || op.integer < 0 || weight->rows < int64_t{context} + op.integer,
             "a position embedding needs a table with a row for every position");
      check(op.in, weight->columns, "position input");
      check(op.out, weight->columns, "position output");
      break;
    case OUTRIDER_NORM:
      refuse(op.heads < 1 || op.head_size < 1, "a norm needs heads and a head size");
      refuse(!is_vector(*weight, op.head_size) || (bias && !is_vector(*bias, op.head_size)),
             "a norm's weights are fp32 vectors");
      check(op.in, int64_t{op.heads} * op.head_size, "norm input");
      check(op.out, int64_t{op.heads} * op.head_size, "norm output");
      if (op.residual.buffer >= 0) check(op.residual, int64_t{op.heads} * op.head_size, "norm residual");
      break;
    case OUTRIDER_LINEAR: {
      const int width = weight->gated ? weight->rows / 2 : weight->rows;
      refuse(weight->table, "a linear layer needs a matrix in tiles");
      refuse(bias && !is_vector(*bias, weight->rows), "a linear layer's bias is an fp32 vector, one element a row");
      refuse(weight->gated && op.residual.buffer >= 0, "a gated layer has no residual");
      refuse(op.activation == OUTRIDER_CLIP && (weight->gated || !(op.cap > 0.0f)),
             "what is clipped has a bound, and is no gated layer");
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
      check(op.in, int64_t{op.heads} * op.head_size, "rope input");
      break;
    case OUTRIDER_ATTENTION:
      refuse(op.head_size < 8 || op.head_size % 8, "a head size must be a multiple of 8");
      refuse(op.kv_heads < 1 || op.heads < 1 || op.heads % op.kv_heads, "query heads must be a multiple of key heads");
      if (status != OUTRIDER_OK) break;
      refuse(op.window == INT32_MIN, "a chunk of more tokens than a row has");
      refuse(op.value.width < 1 || op.value.width % (8 * int64_t{op.kv_heads}), "a value's size must be a multiple of 8");
      check(op.in, int64_t{op.heads} * op.head_size, "queries");
      check(op.key, int64_t{op.kv_heads} * op.head_size, "keys");
      check(op.value, op.value.width, "values");
      check(op.out, int64_t{op.heads} * value_size(op), "attention output");
      refuse(weight && !is_vector(*weight, op.heads), "sinks are an fp32 vector, one for each head");
      refuse(bias && !is_vector(*bias, op.heads), "slopes are an fp32 vector, one for each head");
      refuse(bias && op.cap > 0.0f, "attention with slopes has no cap of scores");
      refuse(op.in.buffer == op.out.buffer, "attention cannot write into its queries' buffer");
      refuse(op.key.buffer == op.out.buffer || op.value.buffer == op.out.buffer,
             "attention cannot write over keys and values");
      break;
    case OUTRIDER_HEADS:
      if (status == OUTRIDER_OK) status = check_heads(op);
      break;
    case OUTRIDER_ROUTE:
      refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads || op.heads > 1 << 20,
             "a token takes some of the experts");
      refuse(op.integer < OUTRIDER_SOFTMAX || op.integer > OUTRIDER_SIGMOID_SHARE_BY_SCORE,
             "a token's experts are weighed in another way");
      if (status == OUTRIDER_OK && op.integer > OUTRIDER_SOFTMAX_CHOSEN) status = check_choice(op);
      refuse(bias && !is_vector(*bias, op.heads), "factors of experts are an fp32 vector, one for each expert");
      check(op.in, op.heads, "scores of experts");
      check(op.out, int64_t{2} * op.kv_heads, "experts and weights");
      refuse(op.in.buffer == op.out.buffer, "route cannot write into its input's buffer");
      break;
    case OUTRIDER_EXPERTS:
      refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads, "a token takes some of the experts");
      check(op.key, int64_t{2} * op.kv_heads, "experts and weights");
      if (status == OUTRIDER_OK) status = check_experts(op);
      refuse(op.in.buffer == op.out.buffer || op.residual.buffer >= 0,
             "experts have no residual, and an output of their own");
      break;
    case OUTRIDER_MIX:
      refuse(op.kv_heads < 1, "mix needs the number of a token's experts");
      refuse(op.integer < 0 || op.integer > 1, "mix weighs products, or does not");
      check(op.key, int64_t{2} * op.kv_heads, "experts and weights");
      check(op.in, op.kv_heads * round_up(op.out.width, kLanes), "experts' products");
      if (status == OUTRIDER_OK)
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
    case OUTRIDER_SCALE:
      refuse(op.integer < 0 || (op.window == 0 && op.integer > 1), "scale takes one factor, or one for each column");
      refuse(op.integer > INT32_MAX - context, "factors of positions that no row has");
      refuse(!weight || !is_vector(*weight, op.window == 0 && op.integer == 1 ? op.out.width : 1),
             "scale needs a vector of factors");
      refuse(op.window < 0 || (op.window > 0 && behind), "factors by position come before select");
      check(op.in, op.out.width, "what is scaled");
      check(op.out, op.out.width, "scale's output");
      if (op.residual.buffer >= 0) check(op.residual, op.out.width, "scale's residual");
      break;
    case OUTRIDER_XIELU:
      refuse(!weight || !is_vector(*weight, 4), "xIELU needs a vector of four numbers");
      check(op.in, op.out.width, "what xIELU reads");
      check(op.out, op.out.width, "what xIELU writes");
      break;
    case OUTRIDER_GAUSSIAN_TOP_K:
      check(op.in, op.out.width, "input of the top-k");
      check(op.out, op.out.width, "what is left of it");
      break;
    case OUTRIDER_BLEND:
    case OUTRIDER_MATCH_RMS:
      if (status == OUTRIDER_OK) status = check_vectors(op);
      refuse(behind && !holds_selected(op.key), "behind select an operation reads positions that were not selected");
      break;
    case OUTRIDER_CONVOLVE:
      if (status == OUTRIDER_OK) status = check_convolution(op);
      break;
    case OUTRIDER_DELTA:
    case OUTRIDER_SCAN: {
      const int numbers = op.kind == OUTRIDER_SCAN ? 2 : 1;  // for each head: A_log, and for a scan D
      const int decays = op.heads * (decays_by_row(op) ? op.head_size : 1);
      refuse(op.heads < 1 || op.kv_heads < 1 || op.heads % op.kv_heads || op.head_size < 1,
             "heads with a state must be a multiple of the key heads");
      refuse(op.window && (op.kind == OUTRIDER_SCAN || op.window != 1 || !(op.cap > 0.0f)),
             "only the decays of a delta rule have a bound, which is greater than 0");
      if (scans_by_column(op))
        refuse(!weight || !bias || !is_table(*weight, op.out.width, op.head_size) || !is_vector(*bias, 2 * op.out.width),
               "rates are an fp32 table, with a row for each column; biases and factors an fp32 vector");
      else
        refuse(!weight || !bias || !is_vector(*weight, numbers * op.heads) || !is_vector(*bias, decays),
               "decays are fp32 vectors, one number a head");
      if (status != OUTRIDER_OK) break;
      refuse(op.out.width % (op.heads * int64_t{kLanes}), "heads with a state have values of a multiple of 16 columns");
      check(op.in, int64_t{op.kv_heads} * op.head_size, "queries");
      check(op.key, int64_t{op.kv_heads} * op.head_size, "keys");
      check(op.value, op.out.width, "values");
      check(op.residual,
            scans_by_column(op)        ? op.out.width
            : op.kind == OUTRIDER_SCAN ? op.heads
                                       : op.heads + decays,
            "gates");
      check(op.out, op.out.width, "what is read of a state");
      refuse(op.out.buffer == op.in.buffer || op.out.buffer == op.key.buffer || op.out.buffer == op.value.buffer ||
                 op.out.buffer == op.residual.buffer,
             "an operation with a state cannot write into what it reads");
      break;
    }
    case OUTRIDER_HIDDEN_OUT:
      refuse(behind, "states are returned before select");
      refuse(op.integer < 0 || op.integer > 1 << 24, "a state's columns begin at 0");
      check(op.in, op.in.width, "state");
      break;
    case OUTRIDER_HIDDEN_IN:
      refuse(behind, "states are given before select");
      check(op.out, op.out.width, "given state");
      break;
    case OUTRIDER_LOAD_HIDDEN:
      refuse(behind, "states are given before select");
      check(op.in, op.out.width, "state");
      check(op.out, op.out.width, "state");
      refuse(op.in.buffer == op.out.buffer, "load hidden cannot write into its input's buffer");
      break;
    case OUTRIDER_STORE_HIDDEN:
      refuse(!behind, "a state is stored behind select");
      check(op.in, op.in.width, "state to store");
      break;
    case OUTRIDER_SCATTER:
      refuse(!weight || !is_vector(*weight, op.in.width), "scatter needs a vector of token ids");
      refuse(!behind, "logits are scattered behind select");
      check(op.in, op.in.width, "logits");
      check(op.out, vocabulary, "logits of the whole vocabulary");
      refuse(op.in.buffer == op.out.buffer, "scatter cannot write into its input's buffer");
      if (status == OUTRIDER_OK && !are_tokens(*weight, op.in.width, vocabulary))
        status = fail(OUTRIDER_INVALID, "scatter needs ids of %d tokens, each once", vocabulary);
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
    if (!selecting && std::find(selected.begin(), selected.end(), true) == selected.end()) ++first_select;
  }
  if (ops.back().kind != OUTRIDER_CHOOSE) return fail(OUTRIDER_INVALID, "a program ends with choose");
  return check_states_of_program();
}

// The program of a head has exactly one HIDDEN_IN, one LOAD_HIDDEN and one STORE_HIDDEN, in this order; other programs have none of them.
int32_t Engine::check_states_of_program() {
  std::vector<const outrider_op *> found;
  for (const outrider_op &op : ops) {
    if (op.kind == OUTRIDER_HIDDEN_OUT) hidden_out = std::max(hidden_out, op.integer + op.in.width);
    if (op.kind == OUTRIDER_HIDDEN_IN || op.kind == OUTRIDER_LOAD_HIDDEN || op.kind == OUTRIDER_STORE_HIDDEN)
      found.push_back(&op);
  }
  if (found.empty()) return OUTRIDER_OK;
  if (found.size() != 3 || found[0]->kind != OUTRIDER_HIDDEN_IN || found[1]->kind != OUTRIDER_LOAD_HIDDEN ||
      found[2]->kind != OUTRIDER_STORE_HIDDEN || found[1]->out.width != found[2]->in.width)
    return fail(OUTRIDER_INVALID, "a program is given a state, loads one, and stores one as wide, once each");
  hidden_in = found[0]->out.width;
  return OUTRIDER_OK;
}

}  // namespace outrider
