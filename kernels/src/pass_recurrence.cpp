// Recurrent operations (convolution, gated delta net, Mamba scans): compute a row's new tokens from the state and the inputs that the
// row keeps, and update these.
#include <string.h>

#include <algorithm>

#include "pass.h"
#include "state_step_list.h"

namespace outrider {

namespace {

// Columns of a convolution that one thread takes at once.
constexpr int32_t kColumnsTogether = 64;
// Above this softplus(x) = x.
constexpr double kLinear = 20.0;
// Above this e^-x is nothing beside 1.
constexpr double kNone = 40.0;

double exponential_of(const Kernels &kernels, double x) {
  double result;
  kernels.exponentials(&x, 0.0, &result, 1);
  return result;
}

}  // namespace

void Pass::convolve(const outrider_op &op, size_t index, int thread) {
  const int64_t chunks = (op.in.width + kColumnsTogether - 1) / kColumnsTogether;
  claim(index, static_cast<int64_t>(feeds.size()) * chunks, thread, [&](int64_t item) {
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
  // The convolution's input at token i after the row's state; for i < 0 the state has it.
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
  // Computes the output of `token` as token i after the state, which for a branch is the place of its candidate.
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
  // In rising order, so nothing is overwritten before it is read.
  for (int32_t tap = 0; row.moves && tap < back; ++tap)
    memmove(state + tap * width, input_at(row.moves - back + tap), bytes);
  for (int32_t i = row.moves ? 0 : kept; i < all - row.moves; ++i)
    memmove(inputs + i * plan.input_size, input_at(row.moves + i), bytes);
}

// A row's new tokens through the states of the heads of one part, which share a key. The state is read and written once for each token: the
// delta rule's update, which depends on what is read, is applied when the next token reads the state, a scan's at once. So is what kept
// tokens add, by the first step.
struct Pass::HeadSteps {
  HeadSteps(const Pass &whole, const outrider_op &operation, const FeedState &fed, int32_t number, int thread)
      : pass(whole),
        op(operation),
        feed(fed),
        part(number),
        aside(engine.attention.as<float>() + thread * engine.most_attention) {}
  void run() {
    if (!scans) normalise_keys_and_queries();
    const int32_t part_heads = op.heads / parts;
    for (head = part * part_heads; head < (part + 1) * part_heads; ++head) {
      prepare_factors_and_decays();
      take_steps();
      keep_updates();
    }
    keep_keys();
  }

 private:
  StateStepList::Kernel kernel() const {
    if (by_column) return engine.kernels->scan_by_column;
    if (scans) return engine.kernels->scan;
    return decays_by_row(op) ? engine.kernels->delta_rule_by_row : engine.kernels->delta_rule;
  }

  float *at(const outrider_slice &slice, int64_t token) const {
    return engine.buffer(slice) + token * engine.stride(slice);
  }
  float *key_of(int64_t token) const { return at(op.key, token) + key_head * size; }
  float *query_of(int64_t token) const { return at(op.in, token) + key_head * size; }
  float *delta_of(int64_t token) const { return at(op.value, token) + head * columns; }
  // The delta rule's beta, or the scan's step dt.
  float &factor_of(int64_t token) const { return at(op.residual, token)[head]; }
  // The steps of a scan by columns.
  float *steps_of(int64_t token) const { return at(op.residual, token) + head * columns; }
  // The delta rule's decays follow its factors in the buffer.
  float *deltas_decays_of(int64_t token) const { return at(op.residual, token) + op.heads + head * decays_each; }
  StateUpdate update_of(int64_t token) const {
    if (by_column) return {key_of(token), delta_of(token), 0.0f, steps_of(token)};
    if (scans) return {key_of(token), delta_of(token), scan_decay(token), nullptr};
    return {key_of(token), delta_of(token), *deltas_decays_of(token), deltas_decays_of(token)};
  }
  float scan_decay(int64_t token) const {
    return static_cast<float>(exponential_of(*engine.kernels, -rate * static_cast<double>(factor_of(token))));
  }
  // What the row keeps of a token: its key for each part, then the deltas of all heads, then their decays.
  float *input_at(int32_t slot) const { return row.inputs.data() + slot * plan.input_size + place.input; }
  float *kept_key(int32_t slot) const { return input_at(slot) + part * size; }
  float *kept_delta(int32_t slot) const { return input_at(slot) + parts * size + head * columns; }
  float *kept_decays(int32_t slot) const { return input_at(slot) + parts * size + op.value.width + head * decays_each; }

  template <typename Work> void each_token(Work work) const {
    for (int32_t t = 0; t < feed.count; ++t) work(feed.first_token + t);
    for (int32_t b = feed.first_branch; b < feed.end_branch; ++b) work(pass.branches[static_cast<size_t>(b)].token);
  }

  void normalise_keys_and_queries() const {
    each_token([&](int64_t token) {
      engine.kernels->unit_vector(key_of(token), op.epsilon, 1.0f, key_of(token), size);
      engine.kernels->unit_vector(query_of(token), op.epsilon, op.scale, query_of(token), size);
    });
  }

  void prepare_factors_and_decays() {
    rate = by_column ? 0.0 : pass.decay_rate(op, head);
    each_token([&](int64_t token) {
      if (by_column) return engine.kernels->steps(steps_of(token), biases + head * columns, columns);
      float &factor = factor_of(token);
      if (scans) {
        factor = pass.scan_step(op, head, factor);
        return;
      }
      float *const decay = deltas_decays_of(token);
      for (int32_t i = 0; i < decays_each; ++i) decay[i] = pass.delta_decay(op, head * decays_each + i, rate, decay[i]);
      factor = engine.kernels->activated(factor, OUTRIDER_SIGMOID);
      if (op.cap != 0.0f && !op.window) factor *= op.cap;
    });
  }

  void take_steps() {
    StateSteps shape{};
    shape.rows = size;
    shape.columns = columns;
    shape.aside = aside;
    if (by_column) {
      shape.rates = place.rates.data() + head * head_state;
      shape.skips = biases + op.out.width + head * columns;
    } else if (scans) {
      shape.skip = pass.number_of(op.weight, op.heads + head);
    }
    StateStepList steps(kernel(), shape, row.state.data() + place.state + head * head_state);
    for (int32_t i = 0; i < kept; ++i) {
      steps.put_off({kept_key(i), kept_delta(i), *kept_decays(i), kept_decays(i)});
      if (i + 1 == row.moves) steps.keep_state();
    }
    for (int32_t t = 0; t < feed.count; ++t) {
      const int64_t token = feed.first_token + t;
      for (int32_t b = feed.first_branch; b < feed.end_branch; ++b)
        if (const Branch &branch = pass.branches[static_cast<size_t>(b)]; branch.instead == token)
          steps.read(step_of(branch.token));
      StateStep step = step_of(token);
      step.updates = scans && t + 1 < feed.count;
      steps.go_on(step);
      if (!step.updates) steps.put_off(step.token);
      const auto snapshot = row.snapshots.find(row.at + kept + t + 1);
      if (snapshot != row.snapshots.end()) steps.copy_to(snapshot->second->data() + place.state + head * head_state);
      if (kept + t + 1 == row.moves) steps.keep_state();
    }
    steps.finish();
  }

  StateStep step_of(int64_t token) const {
    StateStep step{};
    step.token = update_of(token);
    step.query = query_of(token);
    step.factor = by_column ? 0.0f : factor_of(token);
    step.value = delta_of(token);
    step.out = at(op.out, token) + head * columns;
    return step;
  }

  // Calls work(to, from, token) for each input that stays: it goes to slot `to`, from slot `from` or, where `from` is not below `kept`,
  // from the new token. In rising order, so nothing is overwritten before it is read.
  template <typename Work> void each_kept(Work work) const {
    for (int32_t to = row.moves ? 0 : kept; to < kept + feed.count - row.moves; ++to) {
      const int32_t from = to + row.moves;
      work(to, from, feed.first_token + from - kept);
    }
  }

  void keep_updates() const {
    each_kept([&](int32_t to, int32_t from, int64_t token) {
      const bool before = from < kept;
      memmove(kept_delta(to), before ? kept_delta(from) : delta_of(token), sizeof(float) * static_cast<size_t>(columns));
      const StateUpdate update = before ? StateUpdate{} : update_of(token);
      const float *const decays = update.decays ? update.decays : &update.decay;
      memmove(kept_decays(to), before ? kept_decays(from) : decays, sizeof(float) * static_cast<size_t>(decays_each));
    });
  }

  void keep_keys() const {
    each_kept([&](int32_t to, int32_t from, int64_t token) {
      memmove(kept_key(to), from < kept ? kept_key(from) : key_of(token), sizeof(float) * static_cast<size_t>(size));
    });
  }

  const Pass &pass;
  Engine &engine = pass.engine;
  const outrider_op &op;
  const FeedState &feed;
  const int32_t part;
  float *const aside;  // for a state between steps
  const RecurrencePlan &plan = engine.recurrence;
  const Recurrent &place = plan.of[static_cast<size_t>(op.integer)];
  Recurrence &row = engine.rows[static_cast<size_t>(feed.row)].recurrence;
  const bool scans = op.kind == OUTRIDER_SCAN, by_column = scans_by_column(op);
  const int32_t parts = parts_of(op), key_head = part * op.kv_heads / parts, decays_each = decays_of_head(op);
  const int32_t size = op.head_size, columns = op.out.width / op.heads, kept = row.kept;
  const int64_t head_state = static_cast<int64_t>(size) * columns;
  const float *const biases = static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data);
  // Of the present head.
  int32_t head = 0;
  double rate = 0.0;
};

void Pass::step_states(const outrider_op &op, size_t index, int thread) {
  const int32_t parts = parts_of(op);
  claim(index, static_cast<int64_t>(feeds.size()) * parts, thread, [&](int64_t item) {
    HeadSteps(*this, op, feeds[static_cast<size_t>(item / parts)], static_cast<int32_t>(item % parts), thread).run();
  });
}

double Pass::softplus(double x) const {
  return x > kLinear ? x : engine.kernels->logarithm(1.0 + exponential_of(*engine.kernels, x));
}

float Pass::number_of(int32_t weight, int32_t index) const {
  return static_cast<const float *>(engine.weights[static_cast<size_t>(weight)].data)[index];
}

double Pass::decay_rate(const outrider_op &op, int32_t head) const {
  return exponential_of(*engine.kernels, static_cast<double>(number_of(op.weight, head)));
}

// exp(-rate * softplus(a + bias)), or the bounded decay, in float64. Infinities and NaNs give NaN, so that the check of the logits finds
// them.
float Pass::delta_decay(const outrider_op &op, int32_t number, double rate, float a) const {
  const float shifted = a + number_of(op.bias, number);
  if (!(shifted - shifted == 0.0f)) return shifted - shifted;
  const double x = static_cast<double>(shifted);
  if (!op.window) return static_cast<float>(exponential_of(*engine.kernels, -rate * softplus(x)));
  // Of a sigmoid below e^-kNone nothing is left, nor does the exponential overflow.
  const double share = -rate * x > kNone ? 0.0 : 1.0 / (1.0 + exponential_of(*engine.kernels, -rate * x));
  return static_cast<float>(exponential_of(*engine.kernels, static_cast<double>(-op.cap) * share));
}

// softplus(dt + bias), likewise.
float Pass::scan_step(const outrider_op &op, int32_t head, float dt) const {
  const float shifted = dt + number_of(op.bias, head);
  if (!(shifted - shifted == 0.0f)) return shifted - shifted;
  return static_cast<float>(softplus(static_cast<double>(shifted)));
}

}  // namespace outrider
