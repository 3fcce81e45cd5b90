// Matrix products: how the threads of a pass divide the tiles, by shares and work stealing.
#include <algorithm>

#include "pack.h"
#include "pass.h"
#include "pass_halves.h"
#include "pass_inputs.h"

namespace outrider {

// A thread's share of a matrix is 8 to 32 pieces, of kPieceBytes each if that gives a number in between.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

void Pass::linear(const outrider_op &op, size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread) {
  const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
  const Kernels &kernels = *engine.kernels;
  const int count = rows.count;
  const int32_t *const constants = engine.pair_constants_of(op.weight);
  const bool can_pair = has_pair_constants(weight) ? constants != nullptr : engine.in_pairs(weight);
  const bool in_pairs = can_pair && engine.enough_for_pairs(weight, count);
  const int row_block = in_pairs ? kMostInPairs / digits_of(weight.format) : kernels.row_block(weight, count);
  const Input input = inputs_of(weight).from(0, count, row_block, in_pairs);
  const int64_t in_stride = engine.stride(op.in);
  const float *in = engine.buffer(op.in) + rows.first * in_stride;
  // A block's rows are interleaved, so threads divide its channels: with a row for each thread they would write to the same cache lines,
  // and with a single row all but one thread would be idle.
  const int parts = pieces_of_block(weight);
  share(static_cast<int64_t>(input.blocks) * parts, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item)
      kernels.prepare(weight, in, in_stride, nullptr, input, static_cast<int>(item / parts),
                      static_cast<int>(item % parts));
  });
  engine.pool->barrier();
  Linear task{};
  task.weight = &weight;
  task.input = &input;
  task.bias = op.bias >= 0 ? static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) : nullptr;
  if (op.residual.buffer >= 0) {
    task.residual_stride = engine.stride(op.residual);
    task.residual = engine.buffer(op.residual) + rows.first * task.residual_stride;
  }
  task.out_stride = engine.stride(op.out);
  task.out = engine.buffer(op.out) + rows.first * task.out_stride;
  task.width = op.out.width;
  task.expanded = engine.expanded_of(thread);
  task.constants = constants;
  task.activation = op.activation;
  task.scale = op.scale;
  task.cap = op.cap;
  multiply_pieces(task, index, part, beside, thread);
}

// Each thread's first piece is fixed, and the next one is claimed before the current one is multiplied. So a thread prefetches the
// weights that it reads next while it finishes a piece, also those of the next matrix, across barriers and the operations in between.
void Pass::multiply_pieces(Linear &task, size_t index, const Part &part, AttentionBeside *beside, int thread) {
  const Kernels &kernels = *engine.kernels;
  const outrider_weight &weight = *task.weight;
  const Pieces pieces = pieces_of(weight);
  const int threads = engine.pool->threads(), later = engine.next_linear[index];
  const outrider_weight *later_weight =
      later < 0 ? nullptr : &engine.weights[static_cast<size_t>(engine.ops[static_cast<size_t>(later)].weight)];
  int later_tile = 0;
  if (later_weight) {
    const Pieces to_come = pieces_of(*later_weight);
    later_tile = to_come.first(thread, threads) * to_come.tiles_each;
    if (to_come.first(thread, threads) == to_come.first(thread + 1, threads)) later_weight = nullptr;
  }
  const size_t claims = claimed(index, part);
  // A thread reads its own share from beginning to end, then steals pieces of other threads' shares.
  int owner = thread, mine = pieces.first(thread, threads);
  const auto next_piece = [&] {
    return static_cast<int>(engine.claims.next(claims, pieces.count, thread, &owner, /*own=*/1));
  };
  if (mine == pieces.first(thread + 1, threads)) mine = next_piece();
  while (mine >= 0) {
    const int next = next_piece();
    int first = mine * pieces.tiles_each;
    const int last = std::min(first + pieces.tiles_each, pieces.tiles);
    // After each tile the other half's attention may run.
    if (beside) {
      task.beside = beside->prefetch();
      for (; first < last - 1; ++first) {
        kernels.linear(task, first, first + 1, &weight, first + 1);
        beside->go_on();
      }
    }
    if (next >= 0) kernels.linear(task, first, last, &weight, next * pieces.tiles_each);
    else kernels.linear(task, first, last, later_weight, later_tile);
    if (beside) beside->go_on();
    mine = next;
  }
}

// Pieces are small enough to balance the threads, large enough that claiming them costs nothing noticeable, and a multiple of
// kTilesTogether tiles if there are enough.
Pieces Pass::pieces_of(const outrider_weight &weight) const {
  const int threads = engine.pool->threads(), tiles = tile_count(weight);
  const int enough = static_cast<int>(kPieceBytes * tiles / packed_bytes(weight));
  const int even = std::clamp(enough, tiles / (32 * threads), tiles / (8 * threads));
  const int together = tiles / threads >= 2 * kTilesTogether ? kTilesTogether : std::max(1, even);
  const int each = even >= kTilesTogether ? even / kTilesTogether * kTilesTogether : together;
  return {tiles, each, (tiles + each - 1) / each};
}

}  // namespace outrider
