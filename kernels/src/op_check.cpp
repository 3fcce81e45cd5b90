// One function for each kind of operation, or for a few that are alike. outrider_kernels.h says what they compute.
#include "op_check.h"

#include <algorithm>
#include <array>
#include <utility>

#include "message.h"

namespace outrider {
namespace {

constexpr const char *kBoundsNothing = "what is bounded behind its activation is a gated layer, with a bound";

bool is_vector(const outrider_weight &weight, int64_t width) {
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

// The first thing that is wrong is reported; what is checked after it is passed over.
class OpCheck {
 public:
  OpCheck(Engine &checked, const outrider_op &operation, bool after_select, const std::vector<bool> &selected_buffers)
      : engine(checked), op(operation), selecting(after_select), selected(selected_buffers) {}
  int32_t run();
  // Whether the operation's output holds selected tokens only.
  bool selects() const;

 private:
  bool weights_exist();
  void order();
  void kind();
  void embed();
  void position();
  void norm();
  void linear();
  void rope();
  void attention();
  void route();
  int32_t choice_of_experts() const;
  void experts();
  int32_t products_of_experts() const;
  bool bounds_nothing(bool gated) const { return op.activation == OUTRIDER_BOUNDED_SILU && (!gated || !(op.cap > 0.0f)); }
  int32_t products_of_heads() const;
  void mix();
  void gate();
  void scale();
  void xielu();
  int32_t vectors_side_by_side() const;
  void connections();
  int32_t taps() const;
  void recurrence();
  void hidden_state();
  void scatter();
  void select();

  void refuse(bool bad, const char *what) {
    if (status == OUTRIDER_OK && bad) status = fail(OUTRIDER_INVALID, "%s", what);
  }
  // The slice must exist and have this many columns.
  int32_t has_columns(const outrider_slice &slice, int64_t width, const char *what) const;
  void columns(const outrider_slice &slice, int64_t width, const char *what) {
    if (status == OUTRIDER_OK) status = has_columns(slice, width, what);
  }
  bool holds_selected(const outrider_slice &slice) const {
    return slice.buffer >= 0 && slice.buffer < static_cast<int>(selected.size()) &&
           selected[static_cast<size_t>(slice.buffer)];
  }
  bool fills_a_cache() const;
  // Whether `count` weights from `weight` on are matrices in tiles with the same shape and storage.
  bool are_alike(int32_t weight, int32_t count) const;

  Engine &engine;
  const outrider_op &op;
  const bool selecting;
  const std::vector<bool> &selected;
  const bool behind_select = std::find(selected.begin(), selected.end(), true) != selected.end();
  const outrider_weight *weight = nullptr, *bias = nullptr;
  int32_t status = OUTRIDER_OK;
};

int32_t OpCheck::run() {
  if (weights_exist()) {
    order();
    kind();
  }
  return status;
}

// Whether the weights that the operation names exist; else nothing more can be checked.
bool OpCheck::weights_exist() {
  refuse(!(op.cap >= 0.0f) || !(op.scale - op.scale == 0.0f), "a scale or a cap that is no number");
  const int count = static_cast<int>(engine.weights.size());
  const bool needs_weight = op.kind <= OUTRIDER_ROPE;
  if (status == OUTRIDER_OK && (op.weight >= count || op.bias >= count || (needs_weight && op.weight < 0)))
    status = fail(OUTRIDER_INVALID, "an operation of kind %d names weight %d or bias %d of %d", op.kind, op.weight, op.bias,
                  count);
  if (status != OUTRIDER_OK) return false;
  if (op.weight >= 0) weight = &engine.weights[static_cast<size_t>(op.weight)];
  if (op.bias >= 0) bias = &engine.weights[static_cast<size_t>(op.bias)];
  return true;
}

// An ATTENTION reads the cache of an earlier one with the same number, and fills its own.
bool OpCheck::fills_a_cache() const {
  return op.kind == OUTRIDER_ATTENTION &&
         std::none_of(std::as_const(engine.ops).data(), &op, [&](const outrider_op &other) {
           return other.kind == OUTRIDER_ATTENTION && other.integer == op.integer;
         });
}

void OpCheck::order() {
  const bool every_token = op.kind == OUTRIDER_EMBED || op.kind == OUTRIDER_POSITION || op.kind == OUTRIDER_CONVOLVE ||
                           op.kind == OUTRIDER_DELTA || op.kind == OUTRIDER_SCAN || fills_a_cache();
  refuse(behind_select && every_token,
         "embeddings, attention that fills a cache and recurrent states work on all positions, and come before select");
  refuse(behind_select && op.kind == OUTRIDER_ATTENTION && (holds_selected(op.key) || holds_selected(op.value)),
         "behind select attention has the keys and values of all positions");
  refuse(behind_select && op.kind != OUTRIDER_SELECT &&
             (!holds_selected(op.in) || (op.residual.buffer >= 0 && !holds_selected(op.residual))),
         "behind select an operation reads positions that were not selected");
}

bool OpCheck::selects() const {
  return op.out.buffer >= 0 && op.kind != OUTRIDER_CHOOSE && (behind_select || op.kind == OUTRIDER_SELECT);
}

void OpCheck::kind() {
  switch (op.kind) {
    case OUTRIDER_EMBED:
      return embed();
    case OUTRIDER_POSITION:
      return position();
    case OUTRIDER_NORM:
      return norm();
    case OUTRIDER_LINEAR:
      return linear();
    case OUTRIDER_ROPE:
      return rope();
    case OUTRIDER_ATTENTION:
      return attention();
    case OUTRIDER_HEADS:
      if (status == OUTRIDER_OK) status = products_of_heads();
      return;
    case OUTRIDER_ROUTE:
      return route();
    case OUTRIDER_EXPERTS:
      return experts();
    case OUTRIDER_MIX:
      return mix();
    case OUTRIDER_GATE:
      return gate();
    case OUTRIDER_SCALE:
      return scale();
    case OUTRIDER_XIELU:
      return xielu();
    case OUTRIDER_GAUSSIAN_TOP_K:
      columns(op.in, op.out.width, "input of the top-k");
      columns(op.out, op.out.width, "what is left of it");
      return;
    case OUTRIDER_BLEND:
    case OUTRIDER_MATCH_RMS:
      if (status == OUTRIDER_OK) status = vectors_side_by_side();
      refuse(behind_select && !holds_selected(op.key), "behind select an operation reads positions that were not selected");
      return;
    case OUTRIDER_CONNECT:
      return connections();
    case OUTRIDER_CONVOLVE:
      if (status == OUTRIDER_OK) status = taps();
      return;
    case OUTRIDER_DELTA:
    case OUTRIDER_SCAN:
      return recurrence();
    case OUTRIDER_HIDDEN_OUT:
    case OUTRIDER_HIDDEN_IN:
    case OUTRIDER_LOAD_HIDDEN:
    case OUTRIDER_STORE_HIDDEN:
      return hidden_state();
    case OUTRIDER_SCATTER:
      return scatter();
    case OUTRIDER_SELECT:
      return select();
    case OUTRIDER_CHOOSE:
      refuse(!behind_select, "choose needs a select before it");
      columns(op.in, engine.vocabulary, "logits");
      return;
    default:
      status = fail(OUTRIDER_INVALID, "operation kind %d is unknown", op.kind);
  }
}

int32_t OpCheck::has_columns(const outrider_slice &slice, int64_t width, const char *what) const {
  const int64_t end = int64_t{slice.offset} + slice.width;
  if (slice.buffer < 0 || slice.buffer >= static_cast<int>(engine.widths.size()) || slice.offset < 0 || slice.width < 1 ||
      end > engine.widths[static_cast<size_t>(slice.buffer)])
    return fail(OUTRIDER_INVALID, "%s: columns %d..%lld of buffer %d do not exist", what, slice.offset,
                static_cast<long long>(end), slice.buffer);
  if (slice.width != width)
    return fail(OUTRIDER_INVALID, "%s has %d columns instead of %lld", what, slice.width, static_cast<long long>(width));
  return OUTRIDER_OK;
}

bool OpCheck::are_alike(int32_t weight, int32_t count) const {
  const auto shape = [&](int32_t number) {
    const outrider_weight &w = engine.weights[static_cast<size_t>(number)];
    return std::array<int32_t, 10>{w.format, w.rows,  w.columns, w.group, w.gated,
                                   w.table,  w.codes, w.scales,  w.zeros, w.ordered};
  };
  for (int32_t number = weight; number < weight + count; ++number)
    if (shape(number) != shape(weight) || engine.weights[static_cast<size_t>(weight)].table) return false;
  return true;
}

void OpCheck::embed() {
  refuse(!weight->table && (!integer_format(weight->format) || weight->ordered || weight->gated),
         "an embedding needs a table, or a matrix of codes whose columns have no order of their own");
  refuse(weight->rows < engine.vocabulary, "an embedding needs a table with a row for every token");
  columns(op.out, weight->columns, "embedding output");
}

void OpCheck::position() {
  refuse(!weight->table || op.integer < 0 || weight->rows < int64_t{engine.context} + op.integer,
         "a position embedding needs a table with a row for every position");
  columns(op.in, weight->columns, "position input");
  columns(op.out, weight->columns, "position output");
}

void OpCheck::norm() {
  refuse(op.heads < 1 || op.head_size < 1, "a norm needs heads and a head size");
  refuse(!is_vector(*weight, op.head_size) || (bias && !is_vector(*bias, op.head_size)),
         "a norm's weights are fp32 vectors");
  columns(op.in, int64_t{op.heads} * op.head_size, "norm input");
  columns(op.out, int64_t{op.heads} * op.head_size, "norm output");
  if (op.residual.buffer >= 0) columns(op.residual, int64_t{op.heads} * op.head_size, "norm residual");
}

void OpCheck::linear() {
  const int width = weight->gated ? weight->rows / 2 : weight->rows;
  refuse(weight->table, "a linear layer needs a matrix in tiles");
  refuse(bias && !is_vector(*bias, weight->rows), "a linear layer's bias is an fp32 vector, one element a row");
  refuse(weight->gated && op.residual.buffer >= 0, "a gated layer has no residual");
  refuse(op.activation == OUTRIDER_CLIP && (weight->gated || !(op.cap > 0.0f)),
         "what is clipped has a bound, and is no gated layer");
  refuse(bounds_nothing(weight->gated), kBoundsNothing);
  columns(op.in, weight->columns, "linear input");
  columns(op.out, width, "linear output");
  if (op.residual.buffer >= 0) columns(op.residual, width, "residual");
  refuse(op.in.buffer == op.out.buffer, "a linear layer cannot write into its input's buffer");
}

void OpCheck::rope() {
  refuse(op.heads < 1 || op.rotated < 2 || op.rotated % 2 || op.rotated > op.head_size,
         "rope needs an even number of columns of a head");
  refuse(!is_vector(*weight, op.rotated / 2), "rope's frequencies are an fp32 vector, one for two columns");
  refuse(op.longest < 0 || (op.longest > 0 && (!bias || !is_vector(*bias, op.rotated / 2))),
         "rope of long rows has frequencies of its own, as many");
  refuse(op.longest > 0 && engine.longest > 0 && op.longest != engine.longest, "rope changes at two lengths of a row");
  if (op.longest > 0) engine.longest = op.longest;
  columns(op.in, int64_t{op.heads} * op.head_size, "rope input");
}

void OpCheck::attention() {
  refuse(op.head_size < 8 || op.head_size % 8, "a head size must be a multiple of 8");
  refuse(op.kv_heads < 1 || op.heads < 1 || op.heads % op.kv_heads, "query heads must be a multiple of key heads");
  if (status != OUTRIDER_OK) return;
  refuse(op.window == INT32_MIN, "a chunk of more tokens than a row has");
  refuse(op.value.width < 1 || op.value.width % (8 * int64_t{op.kv_heads}), "a value's size must be a multiple of 8");
  columns(op.in, int64_t{op.heads} * op.head_size, "queries");
  columns(op.key, int64_t{op.kv_heads} * op.head_size, "keys");
  columns(op.value, op.value.width, "values");
  columns(op.out, int64_t{op.heads} * value_size(op), "attention output");
  refuse(weight && !is_vector(*weight, op.heads), "sinks are an fp32 vector, one for each head");
  refuse(bias && !is_vector(*bias, op.heads), "slopes are an fp32 vector, one for each head");
  refuse(bias && op.cap > 0.0f, "attention with slopes has no cap of scores");
  refuse(op.in.buffer == op.out.buffer, "attention cannot write into its queries' buffer");
  refuse(op.key.buffer == op.out.buffer || op.value.buffer == op.out.buffer, "attention cannot write over keys and values");
}

// A head's input begins with the columns that are not multiplied, which are copied to its output.
int32_t OpCheck::products_of_heads() const {
  const int64_t count = static_cast<int64_t>(engine.weights.size());
  if (op.weight < 0 || op.heads < 1 || op.weight + int64_t{op.heads} > count)
    return fail(OUTRIDER_INVALID, "%d heads from weight %d on, of %lld", op.heads, op.weight,
                static_cast<long long>(count));
  const outrider_weight &first = engine.weights[static_cast<size_t>(op.weight)];
  if (!are_alike(op.weight, op.heads) || first.gated)
    return fail(OUTRIDER_INVALID, "heads need matrices in tiles, all of one shape and storage, none of them gated");
  int32_t status = has_columns(op.in, op.in.width, "what heads multiply");
  if (status == OUTRIDER_OK) status = has_columns(op.out, op.out.width, "products of heads");
  if (status != OUTRIDER_OK) return status;
  const int kept = op.in.width / op.heads - first.columns;
  if (op.in.width % op.heads || op.out.width % op.heads || kept < 0 || op.out.width / op.heads != kept + first.rows)
    return fail(OUTRIDER_INVALID, "%d heads cannot make %d columns of %d by matrices of %d by %d", op.heads, op.out.width,
                op.in.width, first.rows, first.columns);
  if (op.in.buffer == op.out.buffer)
    return fail(OUTRIDER_INVALID, "products of heads cannot be written into their input's buffer");
  return OUTRIDER_OK;
}

void OpCheck::route() {
  refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads || op.heads > 1 << 20,
         "a token takes some of the experts");
  refuse(op.integer < OUTRIDER_SOFTMAX || op.integer > OUTRIDER_SIGMOID_SHARE_BY_SCORE,
         "a token's experts are weighed in another way");
  if (status == OUTRIDER_OK && op.integer > OUTRIDER_SOFTMAX_CHOSEN) status = choice_of_experts();
  refuse(bias && !is_vector(*bias, op.heads), "factors of experts are an fp32 vector, one for each expert");
  columns(op.in, op.heads, "scores of experts");
  columns(op.out, int64_t{2} * op.kv_heads, "experts and weights");
  refuse(op.in.buffer == op.out.buffer, "route cannot write into its input's buffer");
}

int32_t OpCheck::choice_of_experts() const {
  if (op.heads > kMostRouted) return fail(OUTRIDER_INVALID, "these weights are for up to %d experts", kMostRouted);
  if (op.integer == OUTRIDER_SPARSE_MIXER)
    return op.kv_heads == 2 && op.weight < 0 && op.head_size == 0
               ? OUTRIDER_OK
               : fail(OUTRIDER_INVALID, "a sparse mixer takes two experts, without corrections or groups");
  if (op.weight >= 0 && !is_vector(engine.weights[static_cast<size_t>(op.weight)], op.heads))
    return fail(OUTRIDER_INVALID, "corrections are an fp32 vector, one for each expert");
  if (op.head_size != 0 && op.integer > OUTRIDER_SOFTMAX_GROUPS)
    return fail(OUTRIDER_INVALID, "experts that are chosen by score have no groups");
  if (op.head_size == 0) return OUTRIDER_OK;
  const int64_t groups = op.head_size > 1 && op.heads % op.head_size == 0 ? op.heads / op.head_size : 0;
  if (op.window < 1 || op.window > groups || op.kv_heads > int64_t{op.window} * op.head_size)
    return fail(OUTRIDER_INVALID, "experts are chosen from some groups of two or more, which have enough of them");
  return OUTRIDER_OK;
}

void OpCheck::experts() {
  refuse(op.heads < 1 || op.kv_heads < 1 || op.kv_heads > op.heads, "a token takes some of the experts");
  columns(op.key, int64_t{2} * op.kv_heads, "experts and weights");
  if (status == OUTRIDER_OK) status = products_of_experts();
  refuse(op.in.buffer == op.out.buffer || op.residual.buffer >= 0, "experts have no residual, and an output of their own");
}

// The matrices of all experts must have the same shape and storage, so that what is planned for one is right for all.
int32_t OpCheck::products_of_experts() const {
  const int64_t count = static_cast<int64_t>(engine.weights.size());
  if (op.weight < 0 || op.weight + int64_t{op.heads} > count || op.bias + int64_t{op.heads} > count)
    return fail(OUTRIDER_INVALID, "%d experts from weight %d and bias %d on, of %lld", op.heads, op.weight, op.bias,
                static_cast<long long>(count));
  const outrider_weight &first = engine.weights[static_cast<size_t>(op.weight)];
  if (!are_alike(op.weight, op.heads))
    return fail(OUTRIDER_INVALID, "experts need matrices in tiles, all of one shape and storage");
  if (bounds_nothing(first.gated)) return fail(OUTRIDER_INVALID, "%s", kBoundsNothing);
  for (int32_t e = 0; e < op.heads; ++e) {
    if (op.bias >= 0 && !is_vector(engine.weights[static_cast<size_t>(op.bias + e)], first.rows))
      return fail(OUTRIDER_INVALID, "an expert's bias is an fp32 vector, one element a row");
  }
  const int64_t in = op.integer ? op.kv_heads * round_up(first.columns, kLanes) : first.columns;
  const int64_t out = op.kv_heads * round_up(first.gated ? first.rows / 2 : first.rows, kLanes);
  int32_t status = has_columns(op.in, in, "experts' input");
  if (status == OUTRIDER_OK) status = has_columns(op.out, out, "experts' output");
  if (status == OUTRIDER_OK &&
      (op.out.offset || op.out.width != out || (op.integer && (op.in.offset || op.in.width != in))))
    status = fail(OUTRIDER_INVALID, "experts' products fill a buffer");
  return status;
}

void OpCheck::mix() {
  refuse(op.kv_heads < 1, "mix needs the number of a token's experts");
  refuse(op.integer < 0 || op.integer > 1, "mix weighs products, or does not");
  columns(op.key, int64_t{2} * op.kv_heads, "experts and weights");
  columns(op.in, op.kv_heads * round_up(op.out.width, kLanes), "experts' products");
  if (status == OUTRIDER_OK)
    refuse(op.in.offset || op.in.width != engine.widths[static_cast<size_t>(op.in.buffer)],
           "experts' products fill a buffer");
  columns(op.out, op.out.width, "mix output");
  if (op.value.buffer >= 0) columns(op.value, op.out.width, "what stands for products");
  refuse((weight != nullptr) != (bias != nullptr), "products are multiplied before and behind their norm");
  refuse(weight && bias && (!is_vector(*weight, op.out.width) || !is_vector(*bias, op.out.width)),
         "the norm of products has fp32 vectors");
  refuse(op.value.buffer >= 0 && op.heads < 1, "mix needs the number of experts that have products");
  if (op.residual.buffer >= 0) columns(op.residual, op.out.width, "mix residual");
  refuse(op.in.buffer == op.out.buffer || op.residual.buffer == op.out.buffer || op.value.buffer == op.out.buffer,
         "mix cannot write into what it reads");
}

void OpCheck::gate() {
  columns(op.key, op.key.width == 1 ? 1 : op.out.width, "gate");
  columns(op.in, op.out.width, "gate input");
  columns(op.out, op.out.width, "gate output");
  if (op.residual.buffer >= 0) columns(op.residual, op.out.width, "gate residual");
}

void OpCheck::scale() {
  refuse(op.integer < 0 || (op.window == 0 && op.integer > 1), "scale takes one factor, or one for each column");
  refuse(op.integer > INT32_MAX - engine.context, "factors of positions that no row has");
  refuse(!weight || !is_vector(*weight, op.window == 0 && op.integer == 1 ? op.out.width : 1),
         "scale needs a vector of factors");
  refuse(op.window < 0 || (op.window > 0 && behind_select), "factors by position come before select");
  columns(op.in, op.out.width, "what is scaled");
  columns(op.out, op.out.width, "scale's output");
  if (op.residual.buffer >= 0) columns(op.residual, op.out.width, "scale's residual");
}

void OpCheck::xielu() {
  refuse(!weight || !is_vector(*weight, 4), "xIELU needs a vector of four numbers");
  columns(op.in, op.out.width, "what xIELU reads");
  columns(op.out, op.out.width, "what xIELU writes");
}

// BLEND and MATCH_RMS, whose input holds `heads` vectors side by side.
int32_t OpCheck::vectors_side_by_side() const {
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
    const int32_t status = has_columns(*slice, width_of_slice, "vectors side by side");
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

void OpCheck::connections() {
  const int parts = op.heads < 1 || op.heads > kMostStreams ? 0 : parts_of_connections(op);
  refuse(parts == 0, "connections need weights of 1 to 16 streams, to read, to write, and to mix them");
  refuse(!weight || !is_vector(*weight, parts + op.out.width), "connections need a vector of factors and biases");
  refuse(parts == 3 && op.integer < 1, "streams are mixed in one round or more");
  refuse(!(op.epsilon >= 0.0f), "connections need an epsilon of 0 or more");
  columns(op.in, op.out.width, "logits of connections");
  columns(op.out, op.out.width, "weights of connections");
  refuse(op.in.buffer == op.out.buffer, "connect cannot write into its input's buffer");
}

int32_t OpCheck::taps() const {
  if (op.weight < 0) return fail(OUTRIDER_INVALID, "a convolution needs taps");
  const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
  if (!weight.table || weight.format != OUTRIDER_FP32 || weight.columns < 2 || weight.columns > kMostTaps)
    return fail(OUTRIDER_INVALID, "a convolution's taps are an fp32 table of 2 to %d for each column", kMostTaps);
  if (op.bias >= 0 && !is_vector(engine.weights[static_cast<size_t>(op.bias)], weight.rows))
    return fail(OUTRIDER_INVALID, "a convolution's bias is an fp32 vector");
  for (const outrider_slice *slice : {&op.in, &op.key, &op.value, &op.out}) {
    if (slice->buffer < 0 && (slice == &op.key || slice == &op.value)) continue;
    const int32_t status = has_columns(*slice, weight.rows, "what a convolution reads or writes");
    if (status != OUTRIDER_OK) return status;
  }
  if (op.out.buffer == op.in.buffer || op.out.buffer == op.key.buffer || op.out.buffer == op.value.buffer)
    return fail(OUTRIDER_INVALID, "a convolution cannot write into what it reads");
  return OUTRIDER_OK;
}

void OpCheck::recurrence() {
  const int64_t numbers = op.kind == OUTRIDER_SCAN ? 2 : 1;  // for each head: A_log, and for a scan D
  const int64_t decays = int64_t{op.heads} * (decays_by_row(op) ? op.head_size : 1);
  refuse(op.heads < 1 || op.kv_heads < 1 || op.heads % op.kv_heads || op.head_size < 1,
         "heads with a state must be a multiple of the key heads");
  refuse(op.window && (op.kind == OUTRIDER_SCAN || op.window != 1 || !(op.cap > 0.0f)),
         "only the decays of a delta rule have a bound, which is greater than 0");
  if (scans_by_column(op))
    refuse(
        !weight || !bias || !is_table(*weight, op.out.width, op.head_size) || !is_vector(*bias, int64_t{2} * op.out.width),
        "rates are an fp32 table, with a row for each column; biases and factors an fp32 vector");
  else
    refuse(!weight || !bias || !is_vector(*weight, numbers * op.heads) || !is_vector(*bias, decays),
           "decays are fp32 vectors, one number a head");
  if (status != OUTRIDER_OK) return;
  refuse(op.out.width % (op.heads * int64_t{kLanes}), "heads with a state have values of a multiple of 16 columns");
  columns(op.in, int64_t{op.kv_heads} * op.head_size, "queries");
  columns(op.key, int64_t{op.kv_heads} * op.head_size, "keys");
  columns(op.value, op.out.width, "values");
  columns(op.residual,
          scans_by_column(op)        ? op.out.width
          : op.kind == OUTRIDER_SCAN ? op.heads
                                     : op.heads + decays,
          "gates");
  columns(op.out, op.out.width, "what is read of a state");
  refuse(op.out.buffer == op.in.buffer || op.out.buffer == op.key.buffer || op.out.buffer == op.value.buffer ||
             op.out.buffer == op.residual.buffer,
         "an operation with a state cannot write into what it reads");
}

// The hidden states that a pass returns for a head, and those that a head's program is given, loads and stores.
void OpCheck::hidden_state() {
  switch (op.kind) {
    case OUTRIDER_HIDDEN_OUT:
      refuse(behind_select, "states are returned before select");
      refuse(op.integer < 0 || op.integer > 1 << 24, "a state's columns begin at 0");
      columns(op.in, op.in.width, "state");
      return;
    case OUTRIDER_HIDDEN_IN:
      refuse(behind_select, "states are given before select");
      columns(op.out, op.out.width, "given state");
      return;
    case OUTRIDER_LOAD_HIDDEN:
      refuse(behind_select, "states are given before select");
      columns(op.in, op.out.width, "state");
      columns(op.out, op.out.width, "state");
      refuse(op.in.buffer == op.out.buffer, "load hidden cannot write into its input's buffer");
      return;
    default:
      refuse(!behind_select, "a state is stored behind select");
      columns(op.in, op.in.width, "state to store");
  }
}

void OpCheck::scatter() {
  refuse(!weight || !is_vector(*weight, op.in.width), "scatter needs a vector of token ids");
  refuse(!behind_select, "logits are scattered behind select");
  columns(op.in, op.in.width, "logits");
  columns(op.out, engine.vocabulary, "logits of the whole vocabulary");
  refuse(op.in.buffer == op.out.buffer, "scatter cannot write into its input's buffer");
  if (status == OUTRIDER_OK && !are_tokens(*weight, op.in.width, engine.vocabulary))
    status = fail(OUTRIDER_INVALID, "scatter needs ids of %d tokens, each once", engine.vocabulary);
}

void OpCheck::select() {
  refuse(behind_select && !selecting, "selects stand side by side");
  refuse(holds_selected(op.in) || holds_selected(op.out),
         "what is selected already is neither selected from nor written again");
  columns(op.in, op.in.width, "select input");
  columns(op.out, op.in.width, "select output");
  refuse(op.in.buffer == op.out.buffer, "select cannot write into its input's buffer");
}

}  // namespace

int32_t check_op(Engine &engine, const outrider_op &op, bool selecting, std::vector<bool> *selected) {
  OpCheck check(engine, op, selecting, *selected);
  const int32_t status = check.run();
  if (status == OUTRIDER_OK && check.selects()) (*selected)[static_cast<size_t>(op.out.buffer)] = true;
  return status;
}

}  // namespace outrider
