// A pass whose feeds go through the program in two halves.
#ifndef OUTRIDER_SRC_PASS_HALVES_H
#define OUTRIDER_SRC_PASS_HALVES_H

#include <array>

#include "pass.h"

namespace outrider {

// One thread's attention of one half while it multiplies for the other: some heads, whose keys and values memory is asked for
// between the products, and which are attended once it has been.
class AttentionBeside {
 public:
  AttentionBeside(const Pass &pass, size_t index, const Part &part, int thread);
  AttentionBeside(const AttentionBeside &) = delete;
  AttentionBeside &operator=(const AttentionBeside &) = delete;

  AskedBeside *asked() { return &asked_; }
  // Attends the heads if memory has been asked for all of them, and claims the next.
  void go_on();
  // Attends all that is left, asked for or not.
  void finish();

 private:
  void claim();
  void attend() const;
  const FeedState &feed_of(int64_t item) const;
  int64_t head_of(int64_t item) const { return item % items_of_feed_ * heads_each_; }
  int64_t end_head_of(int64_t item) const;

  static constexpr size_t kMostItems = 16, kMostAreas = 256;

  const Pass &pass_;
  const outrider_op &op_;
  const Part &part_;
  const size_t claimed_;
  const int thread_;
  int owner_;  // of the share that is claimed from
  int64_t heads_each_ = 1, items_of_feed_ = 1, items_ = 0;
  std::array<int64_t, kMostItems> taken_{};
  size_t taken_count_ = 0;
  std::array<AskedBeside::Area, kMostAreas> areas_{};
  AskedBeside asked_;
};

}  // namespace outrider

#endif
