#include "repetition.h"

#include <algorithm>

namespace outrider {
namespace {

// The fewest last tokens that count as a repetition, and the length at which the search stops.
constexpr size_t kShortest = 2, kLongest = 8;

}  // namespace

Repetition find_repetition(const int32_t *text, size_t count) {
  const size_t begin = count > kLookBack ? count - kLookBack : 0;
  size_t best = 0, behind = 0;
  for (size_t place = count; place-- > begin + 1 && best < kLongest;) {
    // How many tokens before `place` equal those before the end.
    size_t length = 0;
    while (length < kLongest && length < place - begin && text[place - 1 - length] == text[count - 1 - length]) ++length;
    if (length > best) best = length, behind = place;
  }
  if (best < kShortest) return {};
  return {text[behind], std::min(best, kShortest + kRepetitionKinds - 1) - kShortest};
}

}  // namespace outrider
