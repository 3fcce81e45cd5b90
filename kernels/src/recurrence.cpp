#include "recurrence.h"

#include <algorithm>
#include <new>

#include "engine.h"
#include "message.h"

namespace outrider {

void Recurrence::truncate(int32_t length) {
  snapshots.erase(snapshots.upper_bound(length), snapshots.end());
  if (length >= at) {
    kept = std::min(kept, length - at);
    return;
  }
  at = snapshots.empty() ? 0 : snapshots.rbegin()->first;
  kept = 0;
  state.clear();
}

Recurrence Recurrence::forked(int32_t length, const RecurrencePlan &plan) const {
  Recurrence result;
  result.snapshots = snapshots;
  result.at = at;
  if (length >= at) {
    result.kept = std::min(kept, length - at);
    result.state = state;
    result.inputs.assign(inputs.begin(), inputs.begin() + result.kept * plan.input_size);
  }
  result.truncate(length);
  return result;
}

void Recurrence::make_room(const RecurrencePlan &plan, int32_t tokens, int32_t chosen, int32_t taken_back) {
  const int32_t before = computed(), all = kept + tokens;
  const int32_t least = std::min(all, std::clamp(chosen, taken_back, kMostTakenBack));
  moves = all <= std::max(2 * taken_back, least) ? 0 : all - least;
  if (state.empty()) {
    if (at > 0) state = *snapshots.at(at);
    else state.assign(static_cast<size_t>(plan.state_size), 0.0f);
  }
  inputs.resize(static_cast<size_t>(std::max(kept, all - moves) * plan.input_size));
  for (int32_t p = (before / plan.spacing + 1) * plan.spacing; p <= before + tokens; p += plan.spacing)
    snapshots[p] = std::make_shared<std::vector<float>>(static_cast<size_t>(plan.state_size));
}

namespace {

// A convolution's taps as [taps][columns].
std::vector<float> transposed(const outrider_weight &weight) {
  const int64_t stride = round_up(weight.rows, kLanes);
  std::vector<float> taps(static_cast<size_t>(weight.columns * stride));
  const float *const rows = static_cast<const float *>(weight.data);
  for (int64_t c = 0; c < weight.rows; ++c)
    for (int64_t tap = 0; tap < weight.columns; ++tap)
      taps[static_cast<size_t>(tap * stride + c)] = rows[c * weight.columns + tap];
  return taps;
}

// The rates of a scan by columns, in the order of its states' elements. A_log: [columns of all heads, rows of a state].
std::vector<float> rates_of(const outrider_op &op, const outrider_weight &weight, const Kernels &kernels) {
  const int64_t rows = op.head_size, columns = op.out.width / op.heads;
  std::vector<float> rates(static_cast<size_t>(rows * op.out.width));
  const float *const logs = static_cast<const float *>(weight.data);
  for (int64_t column = 0; column < op.out.width; ++column)
    for (int64_t row = 0; row < rows; ++row) {
      const double log = static_cast<double>(logs[column * rows + row]);
      double rate;
      kernels.exponentials(&log, 0.0, &rate, 1);
      rates[static_cast<size_t>((column / columns * rows + row) * columns + column % columns)] = static_cast<float>(rate);
    }
  return rates;
}

}  // namespace

int32_t parts_of(const outrider_op &op) {
  if (op.kind == OUTRIDER_DELTA) return op.kv_heads;  // one thread normalises a key, in place, for all heads that share it
  const int32_t group = op.heads / op.kv_heads;
  int32_t divisor = 1;
  for (int32_t d = 2; d <= group && op.kv_heads * d <= kMostHeadParts; ++d)
    if (group % d == 0) divisor = d;
  return op.kv_heads * divisor;
}

int32_t Engine::plan_recurrence() {
  recurrence.taken_back = kTakenBack;
  for (outrider_op &op : ops) {
    if (op.kind != OUTRIDER_CONVOLVE && !has_matrices(op)) continue;
    const outrider_weight &weight = weights[static_cast<size_t>(op.weight)];
    Recurrent one;
    one.state = recurrence.state_size;
    one.input = recurrence.input_size;
    if (has_matrices(op)) {
      const int64_t head = static_cast<int64_t>(op.head_size) * (op.out.width / op.heads);
      one.input_size = int64_t{parts_of(op)} * op.head_size + op.value.width + int64_t{op.heads} * decays_of_head(op);
      one.state_size = op.heads * head;
      if (scans_by_column(op)) one.rates = rates_of(op, weight, *kernels);
      most_attention = std::max(most_attention, head);
      recurrence.taken_back = kTakenBackOfMatrices;
    } else {
      one.input_size = op.in.width;
      one.state_size = static_cast<int64_t>(weight.columns - 1) * op.in.width;
      one.taps = transposed(weight);
    }
    recurrence.state_size += one.state_size;
    recurrence.input_size += one.input_size;
    op.integer = static_cast<int32_t>(recurrence.of.size());
    recurrence.of.push_back(std::move(one));
  }
  if (recurrence.empty()) return OUTRIDER_OK;
  if (longest > 0 || hidden_in)
    return fail(OUTRIDER_INVALID,
                "a program with a recurrent state can neither take in states nor change rope with a row's length");
  // The spacing at which snapshots take as much memory as they may.
  const int64_t float_bytes = static_cast<int64_t>(sizeof(float)), state_bytes = recurrence.state_size * float_bytes;
  const int64_t block_share = cache->empty() ? kBlockTokens * recurrence.input_size * float_bytes / kInputsShare
                                             : kSnapshotShare * cache->block_bytes();
  const int64_t blocks = (state_bytes + block_share - 1) / block_share;
  recurrence.spacing = static_cast<int32_t>(std::min<int64_t>(blocks, context / kBlockTokens + 1)) * kBlockTokens;
  return OUTRIDER_OK;
}

// On failure the rows stay as they were.
int32_t Engine::reserve_recurrence(const outrider_batch &batch) {
  for (int i = 0; i < batch.feeds; ++i) {
    RowState &row = rows[static_cast<size_t>(batch.rows[i])];
    try {
      row.recurrence.make_room(recurrence, batch.counts[i], batch.choose[i], stepping ? kTakenBack : recurrence.taken_back);
    } catch (const std::bad_alloc &) {
      give_back(batch);
      return fail(OUTRIDER_NO_MEMORY, "no memory for the recurrent state of row %d", batch.rows[i]);
    }
  }
  return OUTRIDER_OK;
}

bool Engine::lacks(const outrider_batch &batch) const {
  for (int i = 0; !recurrence.empty() && i < batch.feeds; ++i)
    if (check_row(batch.rows[i]) == OUTRIDER_OK &&
        cached(rows[static_cast<size_t>(batch.rows[i])]) <
            static_cast<int32_t>(rows[static_cast<size_t>(batch.rows[i])].history.size()))
      return true;
  return false;
}

// Rows whose recurrent state was lost by a truncation or a fork are fed the tokens that it lacks again, before the new ones.
int32_t Engine::run_with_lacking(const outrider_batch &batch) {
  int tokens = 0, selected = 0;
  int32_t status = check_batch(batch, &tokens, &selected);
  if (status != OUTRIDER_OK) return status;
  std::vector<std::vector<int32_t>> lacking(static_cast<size_t>(batch.feeds));
  std::vector<int32_t> computed, counts, fed, after, again;
  int64_t token = 0, branch = 0;
  for (int i = 0; i < batch.feeds; ++i) {
    const RowState &row = rows[static_cast<size_t>(batch.rows[i])];
    std::vector<int32_t> &lacks = lacking[static_cast<size_t>(i)];
    computed.push_back(row.recurrence.computed());
    lacks.assign(row.history.begin() + computed.back(), row.history.end());
    fed.insert(fed.end(), lacks.begin(), lacks.end());
    fed.insert(fed.end(), batch.tokens + token, batch.tokens + token + batch.counts[i]);
    token += batch.counts[i];
    const int32_t more = static_cast<int32_t>(lacks.size());
    again.push_back(more);
    counts.push_back(batch.counts[i] + more);
    for (int32_t b = 0; batch.branches && b < batch.branches[i]; ++b) after.push_back(batch.branch_after[branch++] + more);
  }
  outrider_batch whole = batch;
  whole.counts = counts.data();
  whole.tokens = fed.data();
  whole.branch_after = after.data();
  for (int i = 0; i < batch.feeds; ++i)
    rows[static_cast<size_t>(batch.rows[i])].history.resize(static_cast<size_t>(computed[static_cast<size_t>(i)]));
  fed_again.swap(again);
  // Rows that were not fed get back what they had, for which their histories still have room.
  const auto restore = [&] {
    fed_again.clear();
    for (int i = 0; i < batch.feeds; ++i) {
      const std::vector<int32_t> &lacks = lacking[static_cast<size_t>(i)];
      std::vector<int32_t> &history = rows[static_cast<size_t>(batch.rows[i])].history;
      if (static_cast<int32_t>(history.size()) == computed[static_cast<size_t>(i)])
        history.insert(history.end(), lacks.begin(), lacks.end());
    }
  };
  try {
    status = run_pass(whole);
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return status;
}

}  // namespace outrider
