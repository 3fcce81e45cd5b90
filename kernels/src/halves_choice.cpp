#include "halves_choice.h"

#include <stdlib.h>

#include <algorithm>

namespace outrider {

HalvesChoice::HalvesChoice() {
  const char *const wanted = getenv("OUTRIDER_HALVES");
  if (!wanted || !*wanted) return;
  forced_ = (wanted[0] == '0' || wanted[0] == '1') && !wanted[1] ? wanted[0] - '0' : kNoChoice;
}

bool HalvesChoice::Size::is_like(const Size &other, double times) const {
  const auto like = [times](double a, double b) { return a <= b * times && b <= a * times; };
  return like(tokens, other.tokens) && like(cache_bytes, other.cache_bytes);
}

bool HalvesChoice::next(int tokens, int64_t cache_bytes) {
  if (forced_ >= 0) return forced_ == 1;
  size_ = {static_cast<double>(tokens), static_cast<double>(cache_bytes)};
  if (kept_ > 0 && size_.is_like(chosen_for_, kOtherWork)) {
    --kept_;
    return halves_;
  }
  if (kept_ > 0 || tried_ == kTrials) tried_ = 0;
  kept_ = 0;
  // A trial is a whole pass and then a pass in halves of about the same size.
  if (whole_seconds_ > 0.0 && !size_.is_like(whole_size_, kMostApart)) whole_seconds_ = 0.0;
  return halves_ = whole_seconds_ > 0.0;
}

void HalvesChoice::took(double seconds) {
  if (forced_ >= 0 || kept_ > 0 || tried_ == kTrials) return;
  const double of_token = seconds / size_.tokens;
  if (!halves_) {
    whole_seconds_ = of_token;
    whole_size_ = size_;
    return;
  }
  ratios_[tried_++] = of_token / whole_seconds_;
  whole_seconds_ = 0.0;
  if (tried_ < kTrials) return;
  std::nth_element(ratios_.begin(), ratios_.begin() + kTrials / 2, ratios_.end());
  halves_ = ratios_[kTrials / 2] <= kWorthIt;
  chosen_for_ = size_;
  kept_ = kKept;
}

}  // namespace outrider
