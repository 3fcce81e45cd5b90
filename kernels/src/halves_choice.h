// Chooses whether passes run whole or in two halves (pass_halves.cpp). Results have the same bits; which is faster depends on the
// machine's memory bandwidth and arithmetic. So both are tried alternately, and the faster one is used for the next kKept passes.
#ifndef OUTRIDER_SRC_HALVES_CHOICE_H
#define OUTRIDER_SRC_HALVES_CHOICE_H

#include <stddef.h>
#include <stdint.h>

#include <array>

namespace outrider {

class HalvesChoice {
 public:
  // The environment variable OUTRIDER_HALVES, 0 or 1, forces the choice, for tests and measurements. no_choice(): it has another value.
  HalvesChoice();
  bool no_choice() const { return forced_ == kNoChoice; }
  bool always() const { return forced_ == 1; }
  // Whether the next pass, over this many tokens and bytes of keys and values, is to run in halves.
  bool next(int tokens, int64_t cache_bytes);
  // Reports the time of that pass.
  void took(double seconds);

 private:
  struct Size {
    double tokens = 0.0, cache_bytes = 0.0;
    bool is_like(const Size &other, double times) const;
  };
  static constexpr size_t kTrials = 5;
  static constexpr int kKept = 250;           // passes
  static constexpr double kMostApart = 1.25;  // two passes are compared if their sizes differ by at most this factor
  static constexpr double kOtherWork = 2.0;   // a pass whose size differs by more than this factor starts new trials
  static constexpr double kWorthIt = 0.98;    // halves are chosen if the median of halves / whole is at most this

  static constexpr int kFree = -1, kNoChoice = -2;
  int forced_ = kFree;  // or 0, 1
  int kept_ = 0;        // passes for which the choice holds
  bool halves_ = false;
  Size size_, chosen_for_;
  Size whole_size_;
  double whole_seconds_ = 0.0;  // per token of the latest whole pass in a trial; 0: none yet
  std::array<double, kTrials> ratios_{};
  size_t tried_ = 0;
};

}  // namespace outrider

#endif
