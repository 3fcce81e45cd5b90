// Mixtures of experts. A pass sorts its pairs (token, expert) by expert, so that each expert that is needed is read once. A product's
// bits depend on its own row alone, and a token's products are added in the order of the router's choice for it: how other tokens are
// routed makes no difference.
#include <algorithm>
#include <cstring>

#include "pack.h"
#include "pass.h"
#include "pass_inputs.h"

namespace outrider {

void Pass::route(const outrider_op &op, int count, int thread) {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  const auto vector = [&](int32_t weight) {
    return weight < 0 ? nullptr : static_cast<const float *>(engine.weights[static_cast<size_t>(weight)].data);
  };
  const Route task{op.heads,     op.kv_heads, op.integer, vector(op.weight), vector(op.bias),
                   op.head_size, op.window,   op.epsilon, op.scale};
  share(count, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) engine.kernels->route(task, in + t * in_stride, out + t * out_stride);
  });
  engine.pool->barrier();
  if (thread == 0) group_by_expert(op, count);
}

void Pass::group_by_expert(const outrider_op &op, int count) {
  const float *chosen = engine.buffer(op.out);
  const int64_t stride = engine.stride(op.out), pairs = static_cast<int64_t>(count) * op.kv_heads;
  expert_first.assign(static_cast<size_t>(op.heads) + 1, 0);
  pair_of.resize(static_cast<size_t>(pairs));
  token_of.resize(static_cast<size_t>(pairs));
  const auto expert = [&](int64_t pair) {
    return static_cast<size_t>(chosen[pair / op.kv_heads * stride + pair % op.kv_heads]);
  };
  for (int64_t pair = 0; pair < pairs; ++pair) ++expert_first[expert(pair) + 1];
  for (size_t e = 0; e < static_cast<size_t>(op.heads); ++e) {
    expert_first[e + 1] += expert_first[e];
  }
  expert_next.assign(expert_first.begin(), expert_first.end() - 1);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t place = pair_of[static_cast<size_t>(pair)] = expert_next[expert(pair)]++;
    token_of[static_cast<size_t>(place)] = static_cast<int32_t>(pair / op.kv_heads);
  }
}

namespace {

// Copies one piece of channels of a block of an expert's rows from `from`, which has each token converted once and not interleaved.
// tokens: those of the expert's rows.
void gather(const Kernels &kernels, const outrider_weight &weight, const Input &from, const int32_t *tokens,
            const Input &to, int block, int piece) {
  const int digits = from.digits, first = block_first(to.tokens, to.blocks, block);
  const int rows = (block_first(to.tokens, to.blocks, block + 1) - first) * digits;
  const bool codes = integer_format(weight.format);
  const int width = piece_channels(weight), start = piece * width;
  const int a_word = codes ? 4 : weight.format == OUTRIDER_BF16 ? 2 : 1, first_word = start / a_word;
  // The last piece includes the padding after the last channel.
  const int words = start + width < weight.columns ? width / a_word : from.row_words - first_word;
  const int64_t before = int64_t{first} * digits;
  int32_t *const target = to.words + before * to.row_words + int64_t{first_word} * (to.apart ? 1 : rows);
  const int32_t *sources[kMostRows];
  const auto row_of = [&](int r) { return int64_t{tokens[first + r / digits]} * digits + r % digits; };
  for (int r = 0; r < rows; ++r) sources[r] = from.words + row_of(r) * from.row_words + first_word;
  if (!to.apart) kernels.interleave(sources, rows, words, target);
  for (int r = 0; to.apart && r < rows; ++r)
    memcpy(target + int64_t{r} * to.row_words, sources[r], sizeof(int32_t) * static_cast<size_t>(words));
  if (!codes) return;
  const int offsets = offsets_in_block(weight);
  for (int r = 0; r < rows; ++r) {
    to.scales[int64_t{piece} * to.rows + before + r] = from.scales[int64_t{piece} * from.rows + row_of(r)];
    for (int64_t o = int64_t{piece} * offsets; o < int64_t{piece + 1} * offsets; ++o) {
      to.offsets[o * to.rows + before + r] = from.offsets[o * from.rows + row_of(r)];
      to.starts[o * to.rows + before + r] = from.starts[o * from.rows + row_of(r)];
    }
  }
}

}  // namespace

void Pass::multiply_experts(const outrider_op &op, size_t index, int count, int thread) {
  const Kernels &kernels = *engine.kernels;
  const outrider_weight &shape = engine.weights[static_cast<size_t>(op.weight)];
  const bool by_pair = op.integer != 0;
  const float *in = engine.buffer(op.in);
  const int64_t in_stride = by_pair ? round_up(shape.columns, kLanes) : engine.stride(op.in);
  const Inputs inputs = inputs_of(shape);
  const int parts = pieces_of_block(shape);
  const bool paired = engine.pair_constants_of(op.weight) != nullptr;
  std::vector<NeededExpert> &needed = needed_of_thread[static_cast<size_t>(thread)];
  needed.clear();
  int64_t items = 0;
  for (int32_t e = 0; e < op.heads; ++e) {
    const int32_t first = expert_first[static_cast<size_t>(e)], rows = expert_first[static_cast<size_t>(e) + 1] - first;
    if (rows == 0) continue;
    const int row_block = kernels.row_block(shape, rows);
    const bool in_pairs = paired && engine.enough_for_pairs(shape, rows);
    needed.push_back({e, first, inputs.from(first, rows, row_block, in_pairs)});
    items += static_cast<int64_t>(needed.back().input.blocks) * parts;
  }
  if (thread == 0 && !by_pair) engine.experts_read += static_cast<int64_t>(needed.size());
  // A token is converted once for all of its experts, into the space after all pairs, unless experts have their columns in activation
  // order. For experts that are multiplied in pairs of channels it is converted again, since pair_up replaces its words by sums.
  const bool once = !by_pair && !shape.ordered &&
                    std::any_of(needed.begin(), needed.end(), [](const NeededExpert &each) { return !each.input.less; });
  const Input tokens_apart = inputs.from(static_cast<int64_t>(count) * op.kv_heads, count, 0);
  if (once) {
    share(static_cast<int64_t>(parts) * count, thread, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item)
        kernels.prepare(shape, in, in_stride, nullptr, tokens_apart, static_cast<int>(item / parts),
                        static_cast<int>(item % parts));
    });
    engine.pool->barrier();
  }
  // Threads divide the channels, too, since an expert's rows may be interleaved.
  share(items, thread, [&](int64_t first, int64_t last) {
    int64_t before = 0;
    for (const NeededExpert &expert : needed) {
      const int64_t here = static_cast<int64_t>(expert.input.blocks) * parts;
      const int32_t *const tokens = token_of.data() + expert.first;
      for (int64_t item = std::max<int64_t>(first - before, 0); item < std::min(last - before, here); ++item) {
        const int block_of_rows = static_cast<int>(item / parts), piece = static_cast<int>(item % parts);
        if (once && !expert.input.less) gather(kernels, shape, tokens_apart, tokens, expert.input, block_of_rows, piece);
        else
          kernels.prepare(engine.weights[static_cast<size_t>(op.weight + expert.number)],
                          by_pair ? in + expert.first * in_stride : in, in_stride, by_pair ? nullptr : tokens, expert.input,
                          block_of_rows, piece);
      }
      before += here;
    }
  });
  engine.pool->barrier();
  const Pieces pieces = pieces_of(shape);
  const int64_t all = static_cast<int64_t>(needed.size()) * pieces.count;
  const int32_t width = shape.gated ? shape.rows / 2 : shape.rows;
  const int64_t out_stride = round_up(width, kLanes);
  float *out = engine.buffer(op.out);
  int owner = thread;
  const auto next_item = [&] { return engine.claims.next(index, all, thread, &owner); };
  const auto weight_of = [&](int64_t item) {
    return &engine.weights[static_cast<size_t>(op.weight + needed[static_cast<size_t>(item / pieces.count)].number)];
  };
  const auto tile_of = [&](int64_t item) { return static_cast<int>(item % pieces.count) * pieces.tiles_each; };
  // The next piece is claimed before the current one is multiplied, so that its weights are prefetched.
  for (int64_t item = next_item(); item >= 0;) {
    const int64_t later = next_item();
    const NeededExpert &expert = needed[static_cast<size_t>(item / pieces.count)];
    Linear task{};
    task.weight = weight_of(item);
    task.input = &expert.input;
    if (op.bias >= 0)
      task.bias = static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias + expert.number)].data);
    task.out = out + expert.first * out_stride;
    task.out_stride = out_stride;
    task.width = width;
    task.expanded = engine.expanded_of(thread);
    task.constants = engine.pair_constants_of(op.weight, expert.number);
    task.activation = op.activation;
    task.scale = op.scale;
    task.cap = op.cap;
    const int first = tile_of(item), last = std::min(first + pieces.tiles_each, pieces.tiles);
    if (later >= 0) kernels.linear(task, first, last, weight_of(later), tile_of(later));
    else kernels.linear(task, first, last, nullptr, 0);
    item = later;
  }
}

void Pass::mix(const outrider_op &op, int count, int thread) {
  float *products = engine.buffer(op.in);
  const float *chosen = engine.buffer(op.key);
  const auto vector = [&](int32_t weight) {
    return weight < 0 ? nullptr : static_cast<const float *>(engine.weights[static_cast<size_t>(weight)].data);
  };
  const float *const before = vector(op.weight), *const behind = vector(op.bias);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  const float *own = op.value.buffer >= 0 ? engine.buffer(op.value) : nullptr;
  float *out = engine.buffer(op.out);
  const int64_t own_stride = own ? engine.stride(op.value) : 0;
  const int64_t products_stride = round_up(op.out.width, kLanes), chosen_stride = engine.stride(op.key);
  const int64_t out_stride = engine.stride(op.out), residual_stride = residual ? engine.stride(op.residual) : 0;
  share(count, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float *const sum = out + t * out_stride;
      const float *const experts = chosen + t * chosen_stride, *const weights = experts + op.kv_heads;
      for (int32_t slot = 0; slot < op.kv_heads; ++slot) {
        const bool idle = own && experts[slot] >= static_cast<float>(op.heads);
        float *const computed = products + pair_of[static_cast<size_t>(t * op.kv_heads + slot)] * products_stride;
        if (before && !idle) {  // in place: no other token has this product
          engine.kernels->gated_by(computed, before, OUTRIDER_NONE, nullptr, computed, op.out.width);
          engine.kernels->rms_norm(computed, behind, nullptr, computed, op.out.width, op.epsilon);
        }
        const float *const product = idle ? own + t * own_stride : computed;
        engine.kernels->scaled(product, op.integer ? 1.0f : weights[slot], slot ? sum : nullptr, sum, op.out.width);
      }
      engine.kernels->scaled(sum, op.scale, residual ? residual + t * residual_stride : nullptr, sum, op.out.width);
    }
  });
}

void Pass::gate(const outrider_op &op, Rows rows, int thread) {
  const float *in = engine.buffer(op.in), *key = engine.buffer(op.key);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), key_stride = engine.stride(op.key), out_stride = engine.stride(op.out);
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  const bool wide = op.key.width > 1;
  share(rows, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      if (wide)
        engine.kernels->gated_by(in + t * in_stride, key + t * key_stride, op.activation,
                                 residual ? residual + t * residual_stride : nullptr, out + t * out_stride, op.out.width);
      else
        engine.kernels->scaled(in + t * in_stride, engine.kernels->activated(key[t * key_stride], op.activation),
                               residual ? residual + t * residual_stride : nullptr, out + t * out_stride, op.out.width);
  });
}

}  // namespace outrider
