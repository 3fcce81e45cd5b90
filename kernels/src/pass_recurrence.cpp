// Recurrent operations in a pass: from what a row has kept over its new tokens, and what it keeps of these.
#include <string.h>

#include <algorithm>

#include "pass.h"

namespace outrider {

namespace {

// Columns of a convolution that one thread takes at once.
constexpr int32_t kColumnsTogether = 64;

}  // namespace

void Pass::convolve(const outrider_op &op, size_t index, int thread) {
  const int64_t chunks = (op.in.width + kColumnsTogether - 1) / kColumnsTogether;
  claim(index, static_cast<int64_t>(feeds.size()) * chunks, [&](int64_t item) {
    const int32_t first = static_cast<int32_t>(item % chunks) * kColumnsTogether;
    convolve_columns(op, feeds[static_cast<size_t>(item / chunks)], first, std::min(kColumnsTogether, op.in.width - first));
  });
}

void Pass::convolve_columns(const outrider_op &op, const FeedState &feed, int32_t first, int32_t columns) const {
  const RecurrencePlan &plan = engine.recurrence;
  const Recurrent &place = plan.of[static_cast<size_t>(op.integer)];
  const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
  Recurrence &row = engine.rows[static_cast<size_t>(feed.row)].recurrence;
  const int32_t back = weight.columns - 1, width = op.in.width, kept = row.kept, all = kept + feed.count;
  const int64_t in_stride = engine.stride(op.in);
  float *const in = engine.buffer(op.in) + first;
  float *const state = row.state.data() + place.state + first;
  float *const inputs = row.inputs.data() + place.input + first;
  const size_t bytes = sizeof(float) * static_cast<size_t>(columns);
  const auto part_of = [&](const outrider_slice &slice, int64_t token) {
    return slice.buffer >= 0 ? engine.buffer(slice) + token * engine.stride(slice) + first : nullptr;
  };
  // What the operation is over at token i behind the row's state; before 0 that has it.
  const auto input_at = [&](int64_t i) -> float * {
    if (i < 0) return state + (back + i) * width;
    return i < kept ? inputs + i * plan.input_size : in + (feed.first_token + i - kept) * in_stride;
  };
  const auto make = [&](int64_t token) {
    if (op.key.buffer < 0) return;
    float *const x = in + token * in_stride;
    engine.kernels->gated_by(x, part_of(op.key, token), OUTRIDER_NONE, nullptr, x, columns);
  };
  const float *taps[kMostTaps];
  for (int32_t tap = 0; tap <= back; ++tap) taps[tap] = place.taps.data() + tap * round_up(width, kLanes) + first;
  const float *const bias =
      op.bias >= 0 ? static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) + first : nullptr;
  // `token` as if it stood at i behind the state.
  const auto put_out = [&](int64_t token, int64_t i) {
    const float *rows[kMostTaps];
    for (int32_t tap = 0; tap < back; ++tap) rows[tap] = input_at(i - back + tap);
    rows[back] = in + token * in_stride;
    engine.kernels->convolve(rows, taps, back + 1, bias, op.activation, part_of(op.value, token), part_of(op.out, token),
                             columns);
  };
  for (int32_t t = 0; t < feed.count; ++t) {
    make(feed.first_token + t);
    put_out(feed.first_token + t, kept + t);
  }
  for (int32_t b = feed.first_branch; b < feed.end_branch; ++b) {
    const Branch &branch = branches[static_cast<size_t>(b)];
    make(branch.token);
    put_out(branch.token, kept + branch.instead - feed.first_token);
  }
  for (auto snapshot = row.snapshots.upper_bound(row.computed()); snapshot != row.snapshots.end(); ++snapshot)
    for (int32_t tap = 0; tap < back; ++tap)
      memcpy(snapshot->second->data() + place.state + tap * width + first, input_at(snapshot->first - row.at - back + tap),
             bytes);
  // In rising order, in which nothing is written over before it has been read.
  for (int32_t tap = 0; row.moves && tap < back; ++tap)
    memmove(state + tap * width, input_at(row.moves - back + tap), bytes);
  for (int32_t i = row.moves ? 0 : kept; i < all - row.moves; ++i)
    memmove(inputs + i * plan.input_size, input_at(row.moves + i), bytes);
}

}  // namespace outrider
