// What rows keep of operations whose state cannot be truncated: convolutions over the tokens before, the delta rule, and scans.
//
// A row keeps the state behind so many of its tokens, and the operations' inputs of the tokens behind those: a truncation into
// these drops inputs. Where it goes further back, a snapshot serves, and the tokens behind that one are fed once more.
#ifndef OUTRIDER_SRC_RECURRENCE_H
#define OUTRIDER_SRC_RECURRENCE_H

#include <stdint.h>

#include <map>
#include <memory>
#include <vector>

#include "outrider_kernels.h"

namespace outrider {

// Tokens that can be taken back at any time, as many as a draft goes astray by. The state moves on once inputs of twice as many
// would be kept. With states that are matrices, whose kept inputs are work for each pass, so many only for rows that go on by themselves.
constexpr int32_t kTakenBack = 16, kTakenBackOfMatrices = 1;
// Of a pass all tokens whose choice is asked for can be taken back: candidates among them. Inputs of more would cost too much.
constexpr int32_t kMostTakenBack = 64;
// Snapshots take at most so many times the memory of their tokens' keys and values.
constexpr int64_t kSnapshotShare = 4;

// A scan's heads are worked on in at most so many parts where they share few keys.
constexpr int32_t kMostHeadParts = 16;

// Whether an operation's state is a matrix for each head, to which every token adds the product of its key and another vector.
inline bool has_matrices(const outrider_op &op) { return op.kind == OUTRIDER_DELTA || op.kind == OUTRIDER_SCAN; }

// Of the delta rule: whether every row of a state has a decay of its own, not all of a head the same.
inline bool decays_by_row(const outrider_op &op) { return op.kind == OUTRIDER_DELTA && op.residual.width != 2 * op.heads; }

// Of such an operation: into how many parts the heads are divided. Threads work on different parts, so each keeps its key of a token.
int32_t parts_of(const outrider_op &op);

// One operation's part of a row's state and of a token's inputs, in floats. Of an operation with matrices a token's input is what it
// adds to them: a key for each part, then the other vectors, then decays.
struct Recurrent {
  int64_t state = 0, state_size = 0;
  int64_t input = 0, input_size = 0;
  std::vector<float> taps;  // of a convolution: [taps][columns rounded up to 16]
};

// Of all recurrent operations of a program.
struct RecurrencePlan {
  std::vector<Recurrent> of;  // by an operation's `integer`
  int64_t state_size = 0, input_size = 0;
  int32_t spacing = 0;     // tokens from one snapshot to the next
  int32_t taken_back = 0;  // tokens that can be taken back at any time
  bool empty() const { return of.empty(); }
};

struct Recurrence {
  int32_t at = 0;             // the tokens that the state is behind
  int32_t kept = 0;           // tokens behind these whose inputs are here
  int32_t moves = 0;          // by how many tokens the pass being run moves the state on
  std::vector<float> state;   // empty: that of the snapshot at `at`, or of a row without tokens
  std::vector<float> inputs;  // [kept at least][inputs of a token]
  // By the number of tokens that they are behind, multiples of the spacing. Rows that begin alike share them.
  std::map<int32_t, std::shared_ptr<std::vector<float>>> snapshots;

  int32_t computed() const { return at + kept; }
  // As if the tokens behind the first `length` had never been. Fewer may be computed afterwards.
  void truncate(int32_t length);
  // What a row of the first `length` tokens has of it.
  Recurrence forked(int32_t length, const RecurrencePlan &plan) const;
  // Makes room for so many new tokens, the last `chosen` of which have choices, where so many can be taken back at any time.
  void make_room(const RecurrencePlan &plan, int32_t tokens, int32_t chosen, int32_t taken_back);
  // They have been computed.
  void go_on(int32_t tokens) {
    at += moves;
    kept += tokens - moves;
  }
};

}  // namespace outrider

#endif
