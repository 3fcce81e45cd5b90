// Hidden states: those that a target returns with its tokens (HIDDEN_OUT), those that a head is given (HIDDEN_IN, LOAD_HIDDEN) and stores for
// its row's next token (STORE_HIDDEN), and a head's logits, scattered over the target's vocabulary (SCATTER).
#include <string.h>

#include <algorithm>

#include "pass.h"

namespace outrider {
namespace {

// The logit of tokens that are not in a head's vocabulary: finite, and never chosen.
constexpr float kNever = -1e30f;

// To nearest, ties to even; finite values only, as logits are checked to be.
uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace

bool Pass::is_left_out(const outrider_op &op) const {
  if (op.kind == OUTRIDER_SCALE && op.window > last_position + op.integer) {
    const float *const factors = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
    return factors[0] == 1.0f && op.residual.buffer < 0 && op.in.buffer == op.out.buffer && op.in.offset == op.out.offset;
  }
  return (op.kind == OUTRIDER_HIDDEN_OUT && !batch.states) || (op.kind == OUTRIDER_HIDDEN_IN && !any_given);
}

void Pass::return_hidden(const outrider_op &op, int thread) const {
  const float *in = engine.buffer(op.in);
  const int64_t stride = engine.stride(op.in), columns = engine.hidden_out;
  share(tokens - static_cast<int64_t>(branches.size()), thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(t)])];
      const int64_t place = t - feed.first_token - feed.again;
      if (feed.state_out < 0 || place < 0) continue;
      uint16_t *const to = batch.states_out + (feed.state_out + place) * columns + op.integer;
      const float *const from = in + t * stride;
      for (int32_t c = 0; c < op.in.width; ++c) to[c] = to_bf16(from[c]);
    }
  });
}

void Pass::hidden_in(const outrider_op &op, int thread) const {
  float *out = engine.buffer(op.out);
  const int64_t stride = engine.stride(op.out);
  share(tokens, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(t)])];
      float *const to = out + t * stride;
      // A token without a state goes through the products all the same; LOAD_HIDDEN replaces the result.
      if (feed.state_in < 0) {
        std::fill_n(to, op.out.width, 0.0f);
        continue;
      }
      const uint16_t *const from = batch.states_in + (feed.state_in + t - feed.first_token) * engine.hidden_in;
      for (int32_t c = 0; c < op.out.width; ++c) to[c] = from_bf16(from[c]);
    }
  });
}

void Pass::load_hidden(const outrider_op &op, int thread) const {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share(tokens, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(t)])];
      const float *from =
          feed.state_in >= 0 ? in + t * in_stride : engine.rows[static_cast<size_t>(feed.row)].stored_hidden.data();
      memcpy(out + t * out_stride, from, sizeof(float) * static_cast<size_t>(op.out.width));
    }
  });
}

void Pass::store_hidden(const outrider_op &op, int thread) const {
  const float *in = engine.buffer(op.in);
  const int64_t stride = engine.stride(op.in);
  share(static_cast<int64_t>(selected.size()), thread, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int32_t t = selected[static_cast<size_t>(s)];
      const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(t)])];
      if (t != feed.first_token + feed.count - 1) continue;
      RowState &row = engine.rows[static_cast<size_t>(feed.row)];
      row.stored_hidden.assign(in + s * stride, in + s * stride + op.in.width);
      row.stored_at = row.history.size();
    }
  });
}

void Pass::scatter(const outrider_op &op, int thread) const {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  const float *ids = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
  share(static_cast<int64_t>(selected.size()), thread, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      float *const to = out + s * out_stride;
      std::fill_n(to, op.out.width, kNever);
      for (int32_t c = 0; c < op.in.width; ++c) to[static_cast<int32_t>(ids[c])] = in[s * in_stride + c];
    }
  });
}

}  // namespace outrider
