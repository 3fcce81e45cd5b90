// Mixtures of experts. A pass orders its pairs of a token and an expert by expert, so that each expert that is needed is read once.
// A product's bits depend on its own row alone, and a token's products are added in the order of its own choice: who else is
// routed where makes no difference.
#include <algorithm>

#include "pack.h"
#include "pass.h"

namespace outrider {

void Pass::route(const outrider_op &op, int count, int thread) {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share(count, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      engine.kernels->route(in + t * in_stride, op.heads, op.kv_heads, op.integer, out + t * out_stride);
  });
  engine.pool->barrier();
  if (thread == 0) group_by_expert(op, count);
}

void Pass::group_by_expert(const outrider_op &op, int count) {
  const float *chosen = engine.buffer(op.out);
  const int64_t stride = engine.stride(op.out), pairs = static_cast<int64_t>(count) * op.kv_heads;
  expert_first.assign(static_cast<size_t>(op.heads) + 1, 0);
  pair_token.resize(static_cast<size_t>(pairs));
  pair_of.resize(static_cast<size_t>(pairs));
  const auto expert = [&](int64_t pair) {
    return static_cast<size_t>(chosen[pair / op.kv_heads * stride + pair % op.kv_heads]);
  };
  for (int64_t pair = 0; pair < pairs; ++pair) ++expert_first[expert(pair) + 1];
  for (size_t e = 0; e < static_cast<size_t>(op.heads); ++e) {
    engine.experts_read += expert_first[e + 1] > 0;
    expert_first[e + 1] += expert_first[e];
  }
  std::vector<int32_t> next(expert_first.begin(), expert_first.end() - 1);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t place = next[expert(pair)]++;
    pair_of[static_cast<size_t>(pair)] = place;
    pair_token[static_cast<size_t>(place)] = static_cast<int32_t>(pair / op.kv_heads);
  }
}

void Pass::multiply_experts(const outrider_op &op, size_t index, int count, int thread) {
  const Kernels &kernels = *engine.kernels;
  const outrider_weight &shape = engine.weights[static_cast<size_t>(op.weight)];
  const bool by_pair = op.integer != 0;
  const float *in = engine.buffer(op.in);
  const int64_t in_stride = by_pair ? round_up(shape.columns, kLanes) : engine.stride(op.in);
  const int32_t digits = digits_of(shape.format), words = words_in_row(shape);
  const int block = integer_format(shape.format) ? geometry(shape).block : 0;
  const int32_t scales = block ? (shape.columns + block - 1) / block : 0;
  const int32_t offsets = block ? scales * offsets_in_block(shape) : 0;
  const int parts = (shape.columns + piece_channels(shape) - 1) / piece_channels(shape);
  // Those with rows of this pass, each with a part of the converted input of its own.
  struct Expert {
    int32_t number, first;
    Input input;
  };
  std::vector<Expert> needed;
  int64_t items = 0;
  for (int32_t e = 0; e < op.heads; ++e) {
    const int32_t first = expert_first[static_cast<size_t>(e)], rows = expert_first[static_cast<size_t>(e) + 1] - first;
    if (rows == 0) continue;
    Input input{};
    const int64_t before = static_cast<int64_t>(first) * digits;
    input.words = engine.words.as<int32_t>() + before * words;
    input.scales = engine.scales.as<float>() + before * scales;
    input.offsets = engine.offsets.as<int32_t>() + before * offsets;
    input.row_words = words;
    input.tokens = rows;
    input.digits = digits;
    input.rows = rows * digits;
    const int row_block = kernels.row_block(shape, rows);
    input.blocks = (rows + row_block - 1) / row_block;
    items += static_cast<int64_t>(input.blocks) * parts;
    needed.push_back({e, first, input});
  }
  (void)count;
  share(items, thread, [&](int64_t first, int64_t last) {
    int64_t before = 0;
    for (const Expert &expert : needed) {
      const int64_t here = static_cast<int64_t>(expert.input.blocks) * parts;
      for (int64_t item = std::max<int64_t>(first - before, 0); item < std::min(last - before, here); ++item) {
        const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight + expert.number)];
        const float *const rows = by_pair ? in + expert.first * in_stride : in;
        kernels.prepare(weight, rows, in_stride, by_pair ? nullptr : pair_token.data() + expert.first, expert.input,
                        static_cast<int>(item / parts), static_cast<int>(item % parts));
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
  std::atomic<int64_t> &claimed = engine.claims[index * static_cast<size_t>(engine.pool->threads())];
  const auto next_item = [&] { return claimed.fetch_add(1, std::memory_order_relaxed); };
  const auto weight_of = [&](int64_t item) {
    return &engine.weights[static_cast<size_t>(op.weight + needed[static_cast<size_t>(item / pieces.count)].number)];
  };
  const auto tile_of = [&](int64_t item) { return static_cast<int>(item % pieces.count) * pieces.tiles_each; };
  // The next piece is claimed before one is worked on: it is asked for while that is finished.
  for (int64_t item = next_item(); item < all;) {
    const int64_t later = next_item();
    const Expert &expert = needed[static_cast<size_t>(item / pieces.count)];
    Linear task{};
    task.weight = weight_of(item);
    task.input = &expert.input;
    if (op.bias >= 0)
      task.bias = static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias + expert.number)].data);
    task.out = out + expert.first * out_stride;
    task.out_stride = out_stride;
    task.width = width;
    task.expanded = engine.expanded_of(thread);
    task.activation = op.activation;
    task.scale = op.scale;
    task.cap = op.cap;
    const int first = tile_of(item), last = std::min(first + pieces.tiles_each, pieces.tiles);
    if (later < all) kernels.linear(task, first, last, weight_of(later), tile_of(later));
    else kernels.linear(task, first, last, nullptr, 0);
    item = later;
  }
}

void Pass::mix(const outrider_op &op, int count, int thread) {
  const float *products = engine.buffer(op.in), *chosen = engine.buffer(op.key);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  float *out = engine.buffer(op.out);
  const int64_t products_stride = round_up(op.out.width, kLanes), chosen_stride = engine.stride(op.key);
  const int64_t out_stride = engine.stride(op.out), residual_stride = residual ? engine.stride(op.residual) : 0;
  share(count, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float *const sum = out + t * out_stride;
      const float *const weights = chosen + t * chosen_stride + op.kv_heads;
      for (int32_t slot = 0; slot < op.kv_heads; ++slot) {
        const float *const product = products + pair_of[static_cast<size_t>(t * op.kv_heads + slot)] * products_stride;
        engine.kernels->scaled(product, weights[slot], slot ? sum : nullptr, sum, op.out.width);
      }
      engine.kernels->scaled(sum, op.scale, residual ? residual + t * residual_stride : nullptr, sum, op.out.width);
    }
  });
}

void Pass::gate(const outrider_op &op, int count, int thread) {
  const float *in = engine.buffer(op.in), *key = engine.buffer(op.key);
  const float *residual = op.residual.buffer >= 0 ? engine.buffer(op.residual) : nullptr;
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), key_stride = engine.stride(op.key), out_stride = engine.stride(op.out);
  const int64_t residual_stride = residual ? engine.stride(op.residual) : 0;
  share(count, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      engine.kernels->scaled(in + t * in_stride, engine.kernels->logistic(key[t * key_stride]),
                             residual ? residual + t * residual_stride : nullptr, out + t * out_stride, op.out.width);
  });
}

}  // namespace outrider
