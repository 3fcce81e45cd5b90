// A matrix for each head: each head's part of a token's vector is multiplied by that head's matrix. Like experts, except that every token
// uses all of them.
#include <algorithm>

#include "pack.h"
#include "pass.h"
#include "pass_inputs.h"

namespace outrider {
namespace {

// The tiles of all heads are divided into about kPiecesOfThread pieces for each thread.
constexpr int64_t kPiecesOfThread = 8;

// Tiles of a piece: a multiple of kTilesTogether if there are enough.
int tiles_of_piece(int64_t heads, int tiles, int threads) {
  const int even = static_cast<int>(std::clamp<int64_t>(heads * tiles / (kPiecesOfThread * threads), 1, tiles));
  return even >= kTilesTogether ? even / kTilesTogether * kTilesTogether : even;
}

}  // namespace

Inputs Pass::inputs_of(const outrider_weight &shape) const {
  const int block = integer_format(shape.format) ? geometry(shape).block : 0;
  const int32_t scales = block ? (shape.columns + block - 1) / block : 0;
  return {engine.words.as<int32_t>(),
          engine.scales.as<float>(),
          engine.offsets.as<int32_t>(),
          engine.starts.as<int32_t>(),
          engine.less.as<int32_t>(),
          words_in_row(shape),
          scales,
          block ? scales * offsets_in_block(shape) : 0,
          shape.group ? (shape.columns + shape.group - 1) / shape.group : 0,
          digits_of(shape.format)};
}

void Pass::multiply_heads(const outrider_op &op, size_t index, const Part &part, Rows rows, int thread) {
  const Kernels &kernels = *engine.kernels;
  const outrider_weight *const weights = &engine.weights[static_cast<size_t>(op.weight)];
  const outrider_weight &shape = weights[0];
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  const float *const in = engine.buffer(op.in) + rows.first * in_stride;
  float *const out = engine.buffer(op.out) + rows.first * out_stride;
  const int64_t in_width = op.in.width / op.heads, out_width = op.out.width / op.heads, kept = in_width - shape.columns;
  const Inputs inputs = inputs_of(shape);
  const int row_block = kernels.row_block(shape, rows.count);
  const auto input_of = [&](int64_t head) { return inputs.from(head * rows.count, rows.count, row_block); };
  const int64_t parts = pieces_of_block(shape);
  const int64_t items_of_head = input_of(0).blocks * parts;
  share(op.heads * items_of_head, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / items_of_head, here = item % items_of_head;
      kernels.prepare(weights[head], in + head * in_width + kept, in_stride, nullptr, input_of(head),
                      static_cast<int>(here / parts), static_cast<int>(here % parts));
    }
  });
  if (kept > 0)
    share(int64_t{rows.count} * op.heads, thread, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item) {
        const int64_t token = item / op.heads, head = item % op.heads;
        std::copy_n(in + token * in_stride + head * in_width, kept, out + token * out_stride + head * out_width);
      }
    });
  engine.pool->barrier();
  const int tiles = tile_count(shape), each = tiles_of_piece(op.heads, tiles, engine.pool->threads());
  const int64_t pieces = (tiles + each - 1) / each;
  const size_t claims = claimed(index, part);
  int owner = thread;
  const auto next_item = [&] { return engine.claims.next(claims, op.heads * pieces, thread, &owner); };
  const auto tile_of = [&](int64_t item) { return static_cast<int>(item % pieces) * each; };
  // The next piece is claimed before the current one is multiplied, so that its weights are prefetched.
  for (int64_t item = next_item(); item >= 0;) {
    const int64_t later = next_item(), head = item / pieces;
    const Input input = input_of(head);
    Linear task{};
    task.weight = &weights[head];
    task.input = &input;
    task.out = out + head * out_width + kept;
    task.out_stride = out_stride;
    task.width = shape.rows;
    task.expanded = engine.expanded_of(thread);
    task.scale = op.scale;
    const int first = tile_of(item), last = std::min(first + each, tiles);
    if (later >= 0) kernels.linear(task, first, last, &weights[later / pieces], tile_of(later));
    else kernels.linear(task, first, last, nullptr, 0);
    item = later;
  }
}

}  // namespace outrider
