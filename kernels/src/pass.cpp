// The plan of a forward pass, and its smaller operations. All threads run each operation together, with barriers between operations.
#include <string.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "message.h"
#include "pack.h"
#include "pass.h"
#include "rotary.h"

namespace outrider {

void Pass::plan() {
  int choices = 0, logits = 0, branch = 0;
  int64_t logprobs = 0, states_out = 0, states_in = 0;
  // For each branch: its feed, and where the choice after it and its log-probabilities go.
  std::vector<int32_t> branch_feeds, branch_choices;
  std::vector<int64_t> branch_logprobs;
  for (int i = 0; i < batch.feeds; ++i) {
    RowState &row = engine.rows[static_cast<size_t>(batch.rows[i])];
    if (engine.corrections && row.kept.empty() && batch.choose[i]) {
      row.kept_states.resize(static_cast<size_t>(kKeptChoices * engine.corrections->width()));
      row.kept.resize(kKeptChoices);
    }
    FeedState feed;
    feed.row = batch.rows[i];
    feed.first_token = tokens;
    feed.count = batch.counts[i];
    feed.position = static_cast<int32_t>(row.history.size());
    feed.first_selected = static_cast<int32_t>(selected.size());
    for (const int block : row.blocks) feed.blocks.push_back(engine.cache->data(block));
    const int wanted_choices = batch.choose[i], wanted_logits = batch.logits ? batch.logits[i] : 0;
    const int explained = batch.logprobs ? batch.logprobs[i] : -1;
    const auto explain = [&](bool wanted) {
      const int64_t at = wanted && explained >= 0 ? logprobs : -1;
      if (at >= 0) logprobs += 1 + explained;
      return at;
    };
    for (int t = 0; t < feed.count; ++t, ++tokens) {
      token.push_back(batch.tokens[tokens]);
      position.push_back(feed.position + t);
      feed_of.push_back(i);
      const int left = feed.count - t;
      if (left > wanted_choices && left > wanted_logits) continue;
      selected.push_back(tokens);
      choice_at.push_back(left <= wanted_choices ? choices++ : -1);
      logits_at.push_back(left <= wanted_logits ? logits++ : -1);
      logprobs_at.push_back(explain(left <= wanted_choices));
    }
    feed.selected = static_cast<int32_t>(selected.size()) - feed.first_selected;
    feed.state_out = batch.states && batch.states[i] ? states_out : -1;
    feed.state_in = batch.given && batch.given[i] ? states_in : -1;
    feed.again = engine.fed_again.empty() ? 0 : engine.fed_again[static_cast<size_t>(i)];
    if (feed.state_out >= 0) states_out += feed.count - feed.again;
    if (feed.state_in >= 0) states_in += feed.count;
    any_given = any_given || feed.state_in >= 0;
    feed.first_branch = branch;
    feed.end_branch = branch + (batch.branches ? batch.branches[i] : 0);
    for (; branch < feed.end_branch; ++branch) {
      branches.push_back({-1, feed.first_token + batch.branch_after[branch], -1});
      branch_feeds.push_back(i);
      branch_choices.push_back(choices++);
      branch_logprobs.push_back(explain(true));
    }
    feeds.push_back(std::move(feed));
  }
  for (size_t b = 0; b < branches.size(); ++b, ++tokens) {
    branches[b].token = tokens;
    branches[b].selected = static_cast<int32_t>(selected.size());
    token.push_back(batch.branch_tokens[b]);
    position.push_back(position[static_cast<size_t>(branches[b].instead)]);
    feed_of.push_back(branch_feeds[b]);
    selected.push_back(tokens);
    choice_at.push_back(branch_choices[b]);
    logits_at.push_back(-1);
    logprobs_at.push_back(branch_logprobs[b]);
  }
  last_position = *std::max_element(position.begin(), position.end());
  // Room for what is written during and after the pass.
  engine.choosings.reserve(static_cast<size_t>(choices));
  parts.reserve(kMostParts);
  parts = {{0, 0, batch.feeds, {0, tokens}, {0, static_cast<int>(selected.size())}}};
}

void Pass::reserve_for_threads() {
  needed_of_thread.resize(static_cast<size_t>(engine.pool->threads()));
  for (const outrider_op &op : engine.ops) {
    if (op.kind == OUTRIDER_STORE_HIDDEN)
      for (const FeedState &feed : feeds)
        engine.rows[static_cast<size_t>(feed.row)].stored_hidden.reserve(static_cast<size_t>(op.in.width));
    if (op.kind != OUTRIDER_ROUTE) continue;
    const size_t experts = static_cast<size_t>(op.heads),
                 pairs = static_cast<size_t>(tokens) * static_cast<size_t>(op.kv_heads);
    expert_first.reserve(experts + 1);
    expert_next.reserve(experts);
    pair_of.reserve(pairs);
    token_of.reserve(pairs);
    for (std::vector<NeededExpert> &needed : needed_of_thread) needed.reserve(std::min(experts, pairs));
  }
}

void Pass::rotation_tables(int thread) {
  for (const auto &rotation : engine.rotations) {
    const int64_t half = round_up(rotation->half, kLanes);
    float *tables = rotation->tables.as<float>();
    const auto frequencies_of = [&](int32_t weight) {
      return weight < 0 ? nullptr : static_cast<const float *>(engine.weights[static_cast<size_t>(weight)].data);
    };
    const float *usual = frequencies_of(rotation->weight), *long_ones = frequencies_of(rotation->long_weight);
    share(tokens, thread, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        rotary_angles(position[static_cast<size_t>(t)], long_ones && is_long(t) ? long_ones : usual, rotation->half,
                      rotation->factor, tables + 2 * t * half, tables + (2 * t + 1) * half);
    });
  }
}

void Pass::embed(const outrider_op &op, Rows rows, int thread) {
  const outrider_weight &table = engine.weights[static_cast<size_t>(op.weight)];
  const int64_t row_bytes = static_cast<int64_t>(table.columns) * (table.format == OUTRIDER_FP32 ? 4 : 2);
  float *out = engine.buffer(op.out);
  const int64_t stride = engine.stride(op.out);
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t row =
          op.kind == OUTRIDER_EMBED ? token[static_cast<size_t>(t)] : position[static_cast<size_t>(t)] + op.integer;
      const char *source = static_cast<const char *>(table.data) + row * row_bytes;
      const float scale = op.kind == OUTRIDER_EMBED ? op.scale : 1.0f;
      float *const to = out + t * stride;
      if (table.table) {
        engine.kernels->table_row(source, table.format, scale, to, table.columns);
      } else {
        unpack_row(table, static_cast<int>(row), to);
        if (scale != 1.0f) engine.kernels->scaled(to, scale, nullptr, to, table.columns);
      }
      if (op.kind == OUTRIDER_POSITION)
        engine.kernels->add(engine.buffer(op.in) + t * engine.stride(op.in), out + t * stride, out + t * stride,
                            table.columns);
    }
  });
}

void Pass::norm(const outrider_op &op, Rows rows, int thread) {
  const float *weight = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
  const float *bias =
      op.bias >= 0 ? static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) : nullptr;
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share_items(rows, op.heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item / op.heads, at = item % op.heads * op.head_size;
      const float *x = in + t * in_stride + at;
      const float *added = residual ? residual + t * residual_stride + at : nullptr;
      float *y = out + t * out_stride + at;
      if (op.integer == OUTRIDER_RMS) engine.kernels->rms_norm(x, weight, added, y, op.head_size, op.epsilon);
      else engine.kernels->layer_norm(x, weight, bias, added, y, op.head_size, op.epsilon);
    }
  });
}

void Pass::scale(const outrider_op &op, Rows rows, int thread) {
  const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
  const float *const factors = static_cast<const float *>(weight.data);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *const x = engine.buffer(op.in) + t * engine.stride(op.in);
      const float *const added = residual ? residual + t * residual_stride : nullptr;
      float *const out = engine.buffer(op.out) + t * engine.stride(op.out);
      const int32_t place =
          op.window ? std::min((position[static_cast<size_t>(t)] + op.integer) / op.window, weight.columns - 1) : 0;
      if (op.integer && !op.window) engine.kernels->gated_by(x, factors, OUTRIDER_NONE, added, out, op.out.width);
      else engine.kernels->scaled(x, factors[place], added, out, op.out.width);
    }
  });
}

void Pass::xielu(const outrider_op &op, Rows rows, int thread) {
  const float *const given = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
  const float beta = given[2];
  const Xielu task{static_cast<float>(softplus(static_cast<double>(given[0]))),
                   beta + static_cast<float>(softplus(static_cast<double>(given[1]))), beta, given[3]};
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      engine.kernels->xielu(engine.buffer(op.in) + t * engine.stride(op.in), task,
                            engine.buffer(op.out) + t * engine.stride(op.out), op.out.width);
  });
}

void Pass::gaussian_top_k(const outrider_op &op, Rows rows, int thread) {
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      engine.kernels->gaussian_top_k(engine.buffer(op.in) + t * engine.stride(op.in), op.scale,
                                     engine.buffer(op.out) + t * engine.stride(op.out), op.out.width);
  });
}

void Pass::blend(const outrider_op &op, Rows rows, int thread) {
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  const int width = op.in.width / op.heads, vectors = op.out.width / width;
  share_items(rows, vectors, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item / vectors, vector = item % vectors, at = vector * width;
      engine.kernels->blend(engine.buffer(op.in) + t * engine.stride(op.in), op.heads,
                            engine.buffer(op.key) + t * engine.stride(op.key) + vector * op.heads,
                            residual ? residual + t * residual_stride + at : nullptr,
                            engine.buffer(op.out) + t * engine.stride(op.out) + at, width);
    }
  });
}

void Pass::match_rms(const outrider_op &op, Rows rows, int thread) {
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  share_items(rows, op.heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item / op.heads, at = item % op.heads * op.key.width;
      engine.kernels->match_rms(engine.buffer(op.in) + t * engine.stride(op.in) + at,
                                engine.buffer(op.key) + t * engine.stride(op.key), op.epsilon,
                                residual ? residual + t * residual_stride + at : nullptr,
                                engine.buffer(op.out) + t * engine.stride(op.out) + at, op.key.width);
    }
  });
}

void Pass::connect(const outrider_op &op, Rows rows, int thread) {
  const float *const given = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
  const int parts = parts_of_connections(op);
  const Connect task{op.heads, parts > 1, parts > 2, op.integer, given, given + parts, op.epsilon, op.scale, op.cap};
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      engine.kernels->connect(task, engine.buffer(op.in) + t * engine.stride(op.in),
                              engine.buffer(op.out) + t * engine.stride(op.out));
  });
}

void Pass::rotate(const outrider_op &op, Rows rows, int thread) {
  const Rotation &rotation = *engine.rotations[static_cast<size_t>(op.integer)];
  const int64_t half = round_up(rotation.half, kLanes);
  const float *tables = rotation.tables.as<float>();
  float *x = engine.buffer(op.in);
  const int64_t stride = engine.stride(op.in);
  const bool behind = is_behind_select(op);
  share_items(rows, op.heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / op.heads, head = item % op.heads;
      const int64_t t = behind ? selected[static_cast<size_t>(row)] : row;
      engine.kernels->rope(x + row * stride + head * op.head_size, tables + 2 * t * half, tables + (2 * t + 1) * half,
                           op.rotated);
    }
  });
}

void Pass::select(const outrider_op &op, Rows chosen, int thread) {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share(chosen, thread, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s)
      memcpy(out + s * out_stride, in + selected[static_cast<size_t>(s)] * in_stride,
             sizeof(float) * static_cast<size_t>(op.in.width));
  });
}

// Masks are computed during the pass, by a thread that may share a core with this one; so this one spins briefly, then sleeps.
void Pass::wait_for_masks() const {
  if (!batch.masks_ready) return;
  constexpr int kSpins = 64;
  constexpr auto kNap = std::chrono::microseconds(20);
  for (int tries = 0; !__atomic_load_n(batch.masks_ready, __ATOMIC_ACQUIRE); ++tries)
    if (tries >= kSpins) std::this_thread::sleep_for(kNap);
}

// The choice by corrected logits. Both choices are kept with the hidden state, to learn from when the target has told which was right.
template <typename ChooseBy>
Choice Pass::corrected(const Choice &own, int64_t s, SamplerScratch *scratch, const ChooseBy &choose_by) const {
  const size_t t = static_cast<size_t>(selected[static_cast<size_t>(s)]);
  const FeedState &feed = feeds[static_cast<size_t>(feed_of[t])];
  const Corrections &corrections = *engine.corrections;
  const outrider_slice &states = engine.states_of_choices;
  const float *state = engine.buffer(states) + s * engine.stride(states);
  RowState &row = engine.rows[static_cast<size_t>(feed.row)];
  const int32_t length = position[t] + 1, slot = length % kKeptChoices;
  // Only in a draft's own steps: the mask tokens of a parallel draft are not a text that could repeat itself.
  const Repetition repetition =
      engine.stepping ? find_repetition(row.history.data(), static_cast<size_t>(length)) : Repetition{};
  Choice choice = own;
  if (corrections.change(repetition)) {
    const outrider_op &op = engine.ops.back();
    float *scores = engine.buffer(op.in) + s * engine.stride(op.in);
    corrections.add(*engine.kernels, state, repetition, scores, &scratch->corrections);
    choice = choose_by(scores);
    if (!choice.finite) choice = own;
  }
  // In a longer feed two choices would have the same slot.
  if (feed.position + feed.count - position[t] <= kKeptChoices) {
    row.kept[static_cast<size_t>(slot)] = {length, own.token, choice.token, choice.runner_up, choice.margin, repetition};
    memcpy(row.kept_states.data() + static_cast<int64_t>(slot) * corrections.width(), state,
           sizeof(float) * static_cast<size_t>(corrections.width()));
  }
  return corrections.trusted() ? choice : own;
}

void Pass::choose_one(const outrider_op &op, int64_t s, int thread) {
  const int64_t stride = engine.stride(op.in);
  const float *const logits = engine.buffer(op.in) + s * stride;
  const size_t at = static_cast<size_t>(s), t = static_cast<size_t>(selected[at]);
  if (logits_at[at] >= 0)
    memcpy(batch.logits_out + static_cast<int64_t>(logits_at[at]) * engine.vocabulary, logits,
           sizeof(float) * static_cast<size_t>(engine.vocabulary));
  if (choice_at[at] < 0) return;
  const int feed = feed_of[t];
  const RowState &row = engine.rows[static_cast<size_t>(feeds[static_cast<size_t>(feed)].row)];
  SamplerScratch *scratch = &engine.samplers[static_cast<size_t>(thread)];
  const int32_t length = position[t] + 1, *history = row.history.data();
  const bool branch = s >= static_cast<int64_t>(selected.size() - branches.size());
  if (branch) {
    // At this position the row's history has the candidate that the branch is an alternative to.
    scratch->history.assign(history, history + length);
    scratch->history.back() = token[t];
    history = scratch->history.data();
  }
  const int32_t masked = batch.mask_of ? batch.mask_of[choice_at[at]] : -1;
  if (masked >= 0) wait_for_masks();
  const uint32_t *mask = masked >= 0 ? batch.masks + static_cast<int64_t>(masked) * batch.mask_words : nullptr;
  const auto choose_by = [&](const float *scores) {
    return choose_token(*engine.kernels, scores, engine.vocabulary, row.sampling, history, length,
                        std::min(row.prompt, length), scratch, mask, nullptr, batch.runners_up != nullptr);
  };
  Choice choice = choose_by(logits);
  if (engine.corrections && !branch && choice.finite) choice = corrected(choice, s, scratch, choose_by);
  batch.chosen[choice_at[at]] = choice.token;
  if (batch.runners_up) batch.runners_up[choice_at[at]] = choice.runner_up;
  if (batch.margins) batch.margins[choice_at[at]] = choice.margin;
  // If a branch's logits are not finite the branch is dropped, and the row goes on.
  if (!choice.finite && branch) batch.chosen[choice_at[at]] = -1;
  else if (!choice.finite) not_finite.store(feeds[static_cast<size_t>(feed)].row);
  else if (logprobs_at[at] >= 0 && choice.token >= 0)
    log_probabilities(*engine.kernels, logits, engine.vocabulary, choice.token, batch.logprobs[feed], scratch,
                      batch.logprob_tokens + logprobs_at[at], batch.logprob_values + logprobs_at[at]);
}

void Pass::choose(const outrider_op &op, size_t index, const Part &part, int thread) {
  claim(claimed(index, part), part.selected.count, thread, [&](int64_t s) {
    // The sampler allocates its scratch memory at first use.
    try {
      choose_one(op, part.selected.first + s, thread);
    } catch (const std::bad_alloc &) {
      no_memory.store(true);
    }
  });
}

void Pass::run_op(size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread) {
  const outrider_op &op = engine.ops[index];
  switch (op.kind) {
    case OUTRIDER_EMBED:
    case OUTRIDER_POSITION:
      return embed(op, rows, thread);
    case OUTRIDER_NORM:
      return norm(op, rows, thread);
    case OUTRIDER_LINEAR:
      return linear(op, index, part, rows, beside, thread);
    case OUTRIDER_ROPE:
      return rotate(op, rows, thread);
    case OUTRIDER_ATTENTION:
      return attention(op, index, thread);
    case OUTRIDER_SELECT:
      return select(op, part.selected, thread);
    case OUTRIDER_ROUTE:
      return route(op, rows.count, thread);
    case OUTRIDER_EXPERTS:
      return multiply_experts(op, index, rows.count, thread);
    case OUTRIDER_MIX:
      return mix(op, rows.count, thread);
    case OUTRIDER_GATE:
      return gate(op, rows, thread);
    case OUTRIDER_SCALE:
      return scale(op, rows, thread);
    case OUTRIDER_XIELU:
      return xielu(op, rows, thread);
    case OUTRIDER_HEADS:
      return multiply_heads(op, index, part, rows, thread);
    case OUTRIDER_GAUSSIAN_TOP_K:
      return gaussian_top_k(op, rows, thread);
    case OUTRIDER_BLEND:
      return blend(op, rows, thread);
    case OUTRIDER_MATCH_RMS:
      return match_rms(op, rows, thread);
    case OUTRIDER_CONNECT:
      return connect(op, rows, thread);
    case OUTRIDER_CONVOLVE:
      return convolve(op, index, thread);
    case OUTRIDER_DELTA:
    case OUTRIDER_SCAN:
      return step_states(op, index, thread);
    case OUTRIDER_HIDDEN_OUT:
      return return_hidden(op, thread);
    case OUTRIDER_HIDDEN_IN:
      return hidden_in(op, thread);
    case OUTRIDER_LOAD_HIDDEN:
      return load_hidden(op, thread);
    case OUTRIDER_STORE_HIDDEN:
      return store_hidden(op, thread);
    case OUTRIDER_SCATTER:
      return scatter(op, thread);
    default:
      return choose(op, index, part, thread);
  }
}

namespace {

// Operations that read and write each token's own row only. A thread has the same rows in all of them, so they need no barrier between
// them.
bool stays_in_rows(int32_t kind) {
  switch (kind) {
    case OUTRIDER_NORM:
    case OUTRIDER_ROPE:
    case OUTRIDER_GATE:
    case OUTRIDER_SCALE:
    case OUTRIDER_XIELU:
    case OUTRIDER_GAUSSIAN_TOP_K:
    case OUTRIDER_BLEND:
    case OUTRIDER_MATCH_RMS:
    case OUTRIDER_CONNECT:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Pass::run_ops(size_t from, size_t end, const Part &part, AttentionBeside *beside, int thread) {
  Rows rows = part.tokens;
  for (size_t index = from; index < end; ++index) {
    if (is_left_out(engine.ops[index])) {
      // All operations up to LOAD_HIDDEN depend on the given states, so they are skipped as well.
      if (engine.ops[index].kind == OUTRIDER_HIDDEN_IN)
        while (engine.ops[index + 1].kind != OUTRIDER_LOAD_HIDDEN) ++index;
      continue;
    }
    run_op(index, part, rows, beside, thread);
    if (engine.ops[index].kind == OUTRIDER_SELECT) rows = part.selected;
    if (rows.count == 0) break;
    size_t next = index + 1;
    while (next < end && engine.ops[next].kind == OUTRIDER_SCALE && is_left_out(engine.ops[next])) ++next;
    if (next == end || !stays_in_rows(engine.ops[index].kind) || !stays_in_rows(engine.ops[next].kind))
      engine.pool->barrier();
  }
}

void Pass::walk(int thread) {
  rotation_tables(thread);
  if (parts.size() > 1) walk_in_halves(thread);
  else run_ops(0, engine.ops.size(), parts[0], nullptr, thread);
}

void Pass::keep_choosings() const {
  const outrider_op &op = engine.ops.back();
  for (size_t s = 0; s < selected.size(); ++s) {
    if (choice_at[s] < 0) continue;
    const size_t choice = static_cast<size_t>(choice_at[s]), t = static_cast<size_t>(selected[s]);
    if (choice >= engine.choosings.size()) engine.choosings.resize(choice + 1);
    if (s >= selected.size() - branches.size()) continue;
    engine.choosings[choice] = {feeds[static_cast<size_t>(feed_of[t])].row, position[t] + 1, batch.chosen[choice],
                                engine.buffer(op.in) + static_cast<int64_t>(s) * engine.stride(op.in)};
  }
}

int32_t Engine::rank(int choice, const uint32_t *mask, int mask_words, int count, int32_t *tokens) {
  if (count < 1 || count > kMostLeaders) return fail(OUTRIDER_INVALID, "%d tokens ranked", count);
  if (mask && int64_t{32} * mask_words < vocabulary)
    return fail(OUTRIDER_INVALID, "a mask of %d words for a vocabulary of %d", mask_words, vocabulary);
  const Choosing known =
      choice >= 0 && static_cast<size_t>(choice) < choosings.size() ? choosings[static_cast<size_t>(choice)] : Choosing{};
  if (known.row < 0) return fail(OUTRIDER_INVALID, "choice %d is not one of the latest pass", choice);
  const RowState &row = rows[static_cast<size_t>(known.row)];
  if (!row.open || static_cast<int32_t>(row.history.size()) < known.length)
    return fail(OUTRIDER_INVALID, "row %d does not hold what stood before choice %d any more", known.row, choice);
  rank_tokens(*kernels, known.logits, vocabulary, row.sampling, row.history.data(), known.length,
              std::min(row.prompt, known.length), &samplers[0], mask, std::max(0, known.token), count, tokens);
  return OUTRIDER_OK;
}

int32_t Engine::run_pass(const outrider_batch &batch) {
  int tokens = 0, selected = 0;
  int32_t status = check_threads();
  if (status == OUTRIDER_OK) status = check_batch(batch, &tokens, &selected);
  if (status != OUTRIDER_OK || tokens == 0) return status;
  status = reserve_scratch(tokens, selected);
  if (status == OUTRIDER_OK) status = reserve_blocks(batch);
  if (status == OUTRIDER_OK && !recurrence.empty()) status = reserve_recurrence(batch);
  if (status != OUTRIDER_OK) return status;
  // Everything that allocates memory, except the choices, comes before the rows' histories get these tokens: if memory runs out, rows are
  // unchanged.
  Pass pass(*this, batch);
  try {
    int fed = 0;
    for (int i = 0; i < batch.feeds; fed += batch.counts[i], ++i) {
      std::vector<int32_t> &history = rows[static_cast<size_t>(batch.rows[i])].history;
      const size_t length = history.size() + static_cast<size_t>(batch.counts[i]);
      if (history.capacity() < length) history.reserve(std::max(length, 2 * history.capacity()));
    }
    meet(batch.tokens, fed);
    pass.plan();
    pass.reserve_for_threads();
  } catch (...) {
    give_back(batch);
    throw;
  }
  const int32_t *next = batch.tokens;
  for (int i = 0; i < batch.feeds; next += batch.counts[i], ++i) {
    std::vector<int32_t> &history = rows[static_cast<size_t>(batch.rows[i])].history;
    history.insert(history.end(), next, next + batch.counts[i]);
  }
  claims.clear();
  const bool chooses = pass.tries_halves();
  if (chooses ? halves.next(tokens, pass.cache_bytes()) : halves.always() && pass.may_go_in_halves()) pass.divide();
  const auto started = std::chrono::steady_clock::now();
  pool->run([&pass](int thread) { pass.walk(thread); });
  if (chooses) halves.took(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  pass.keep_choosings();
  if (!recurrence.empty())
    for (const FeedState &feed : pass.feeds) rows[static_cast<size_t>(feed.row)].recurrence.go_on(feed.count);
  if (pass.no_memory) return fail(OUTRIDER_NO_MEMORY, "no memory for the choice of a token");
  if (pass.not_finite >= 0)
    return fail(OUTRIDER_NOT_FINITE, "row %d: a logit is not a finite number", pass.not_finite.load());
  return OUTRIDER_OK;
}

}  // namespace outrider
