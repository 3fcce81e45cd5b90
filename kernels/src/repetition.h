// The latest repetition in a text: where its last tokens have occurred before, and which token followed.
#ifndef OUTRIDER_SRC_REPETITION_H
#define OUTRIDER_SRC_REPETITION_H

#include <stddef.h>
#include <stdint.h>

namespace outrider {

struct Repetition {
  int32_t next = -1;  // the token that followed; -1: the last two tokens have not occurred before
  size_t kind = 0;
};
// Kinds of repetitions, by the number of last tokens that have occurred before: two, three, four, five or more.
constexpr size_t kRepetitionKinds = 4;

// The search covers only this many last tokens.
constexpr size_t kLookBack = 1024;

// The longest repetition of the text's last tokens; of several with the same length the latest.
Repetition find_repetition(const int32_t *text, size_t count);

}  // namespace outrider

#endif
