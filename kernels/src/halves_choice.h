// Whether passes go through the program whole or in halves (pass_halves.cpp): the bits are the same, and which is quicker depends on how
// fast memory and products are here. So both are tried in turn, and the quicker one is kept to for a while.
#ifndef OUTRIDER_SRC_HALVES_CHOICE_H
#define OUTRIDER_SRC_HALVES_CHOICE_H

#include <stddef.h>
#include <stdint.h>

#include <array>

namespace outrider {

class HalvesChoice {
 public:
  // OUTRIDER_HALVES of the environment, 0 or 1, takes the choice away: for tests and measurements. It is no_choice() if it is
  // anything else.
  HalvesChoice();
  bool no_choice() const { return forced_ == kNoChoice; }
  bool always() const { return forced_ == 1; }
  // Whether the next pass, over so many tokens and bytes of keys and values, goes in halves.
  bool next(int tokens, int64_t cache_bytes);
  // What that pass took.
  void took(double seconds);

 private:
  struct Size {
    double tokens = 0.0, cache_bytes = 0.0;
    bool is_like(const Size &other, double times) const;
  };
  static constexpr size_t kTrials = 5;
  static constexpr int kKept = 250;           // passes
  static constexpr double kMostApart = 1.25;  // sizes of two passes that are compared, by a factor
  static constexpr double kOtherWork = 2.0;   // sizes for which the choice is made anew
  static constexpr double kWorthIt = 0.98;    // halves are taken if they need at most so much of the time

  static constexpr int kFree = -1, kNoChoice = -2;
  int forced_ = kFree;  // or 0, 1
  int kept_ = 0;        // passes for which the choice holds
  bool halves_ = false;
  Size size_, chosen_for_;
  Size whole_size_;
  double whole_seconds_ = 0.0;  // a token's, of the pass that went whole, 0: none yet
  std::array<double, kTrials> ratios_{};
  size_t tried_ = 0;
};

}  // namespace outrider

#endif
