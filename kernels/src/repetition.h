// What a text went on with where its last tokens came before.
#ifndef OUTRIDER_SRC_REPETITION_H
#define OUTRIDER_SRC_REPETITION_H

#include <stddef.h>
#include <stdint.h>

namespace outrider {

struct Repetition {
  int32_t next = -1;  // the token that came then, -1: the last two tokens have not come before
  size_t kind = 0;
};
// Kinds of repetitions: two, three, four of the last tokens came before, or five and more.
constexpr size_t kRepetitionKinds = 4;

// Only among the last so many tokens is looked for them.
constexpr size_t kLookBack = 1024;

// Of the places where the most of the last tokens came before, the last one.
Repetition find_repetition(const int32_t *text, size_t count);

}  // namespace outrider

#endif
