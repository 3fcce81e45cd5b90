// Recurrent states of rows, which unlike a KV cache cannot be truncated: of causal convolutions, the gated delta rule and Mamba 2 scans.
//
// A row keeps the state after its first `at` tokens, and the operations' inputs for the `kept` tokens after those. A truncation to at
// least `at` tokens drops inputs. A shorter one goes back to a snapshot, and the tokens after the snapshot are computed again.
#ifndef OUTRIDER_SRC_RECURRENCE_H
#define OUTRIDER_SRC_RECURRENCE_H

#include <stdint.h>

#include <map>
#include <memory>
#include <vector>

#include "outrider_kernels.h"

namespace outrider {

// Tokens that can always be taken back by a truncation: the candidates of a draft that turned out wrong. The state advances once inputs
// of twice as many would be kept. With matrix states each pass has to apply all kept inputs: there it is kTakenBackOfMatrices, except in
// decode().
constexpr int32_t kTakenBack = 16, kTakenBackOfMatrices = 1;
// All tokens of a pass whose choice is asked for can be taken back, since candidates are among them; but at most this many, as keeping
// their inputs takes memory.
constexpr int32_t kMostTakenBack = 64;
// The most inputs that a row keeps.
constexpr int32_t kMostKept = (2 * kTakenBack > kMostTakenBack ? 2 * kTakenBack : kMostTakenBack) + 1;
// Snapshots take at most this many times the memory of the keys and values of the same tokens.
constexpr int64_t kSnapshotShare = 4;
// Without attention there are neither. Then they take at most this part of the memory of the inputs of the same tokens.
constexpr int64_t kInputsShare = 16;

// The heads of a scan that share a key head are divided further, as long as there are at most this many parts in all.
constexpr int32_t kMostHeadParts = 16;

// Whether an operation has a matrix as the state of each head, to which every token adds an outer product key delta^T.
inline bool has_matrices(const outrider_op &op) { return op.kind == OUTRIDER_DELTA || op.kind == OUTRIDER_SCAN; }

// Whether a delta rule has a decay for each row of a state, not one for each head.
inline bool decays_by_row(const outrider_op &op) {
  return op.kind == OUTRIDER_DELTA && op.residual.width != int64_t{2} * op.heads;
}

// Whether a scan has a step for each column of a state and a decay for each of its elements (Mamba 1), not one for each head.
inline bool scans_by_column(const outrider_op &op) { return op.kind == OUTRIDER_SCAN && op.residual.width == op.out.width; }

// The decays of a head that a token's input has: of a scan by columns its steps, by which the decays of all elements are computed.
inline int32_t decays_of_head(const outrider_op &op) {
  return decays_by_row(op) ? op.head_size : scans_by_column(op) ? op.out.width / op.heads : 1;
}

// The number of parts into which the heads of an operation with matrices are divided. Different threads may work on different parts, so
// each part stores the token's key for itself.
int32_t parts_of(const outrider_op &op);

// One operation's offset and size, in floats, in a row's state and in a token's inputs. With matrices a token's input is what it adds to
// them: a key for each part, then the delta of each head, then the decays.
struct Recurrent {
  int64_t state = 0, state_size = 0;
  int64_t input = 0, input_size = 0;
  std::vector<float> taps;   // only for a convolution: [taps][columns rounded up to 16]
  std::vector<float> rates;  // only for a scan by columns: e^A_log [heads][rows of a state][columns]
};

// The recurrent operations of a program.
struct RecurrencePlan {
  std::vector<Recurrent> of;  // [operation's `integer`]
  int64_t state_size = 0, input_size = 0;
  int32_t spacing = 0;     // tokens from one snapshot to the next
  int32_t taken_back = 0;  // tokens that can be taken back at any time
  bool empty() const { return of.empty(); }
};

struct Recurrence {
  int32_t at = 0;             // the number of tokens that the state includes
  int32_t kept = 0;           // the number of tokens after these whose inputs are kept
  int32_t moves = 0;          // the number of tokens by which the current pass advances the state
  std::vector<float> state;   // empty: it equals the snapshot at `at`, or is zero (at 0)
  std::vector<float> inputs;  // [at least kept][inputs of a token]
  // By the number of tokens that a snapshot includes, a multiple of the spacing. Forked rows share snapshots.
  std::map<int32_t, std::shared_ptr<std::vector<float>>> snapshots;

  int32_t computed() const { return at + kept; }
  // Takes back all tokens after the first `length`. Afterwards computed() may be less than `length`.
  void truncate(int32_t length);
  // The recurrence of a new row that begins with the first `length` tokens; its computed() may be less.
  Recurrence forked(int32_t length, const RecurrencePlan &plan) const;
  // Prepares a pass over `tokens` new tokens, the last `chosen` of which have choices; at least `taken_back` tokens must stay revocable.
  void make_room(const RecurrencePlan &plan, int32_t tokens, int32_t chosen, int32_t taken_back);
  // Accounts for the tokens of a pass, after it.
  void go_on(int32_t tokens) {
    at += moves;
    kept += tokens - moves;
  }
};

}  // namespace outrider

#endif
