// A pass whose feeds go through the program in two halves.
#ifndef OUTRIDER_SRC_PASS_HALVES_H
#define OUTRIDER_SRC_PASS_HALVES_H

#include <array>

#include "pass.h"

namespace outrider {

// One thread's attention of one half while it multiplies for the other: batches of heads, whose keys and values memory is
// asked for between the products, and beside attention of the batch before, and which are attended once it has been.
class AttentionBeside {
 public:
  // steps: of all threads' products meanwhile.
  AttentionBeside(const Pass &pass, size_t index, const Part &part, int64_t steps, int thread);
  AttentionBeside(const AttentionBeside &) = delete;
  AttentionBeside &operator=(const AttentionBeside &) = delete;

  AskedBeside *asked() { return &asked_; }
  // Attends the batch at hand if memory has been asked for all of it.
  void go_on();
  // Attends all that is left, whether memory has been asked for all of it or not.
  void finish();

 private:
  static constexpr size_t kMostItems = 16, kMostAreas = 256;
  // Heads that are asked for, or attended, together.
  struct Batch {
    std::array<int64_t, kMostItems> items{};
    size_t count = 0;
    bool whole = true;  // whether all of it is in `areas`
    std::array<AskedBeside::Area, kMostAreas> areas{};
  };

  void claim();
  // Attends the batch at hand, and claims the next one, for which memory is asked meanwhile by way of `beside`, or not if it is null.
  void attend_batch(AskedBeside *beside);
  const FeedState &feed_of(int64_t item) const;
  int64_t head_of(int64_t item) const { return item % items_of_feed_ * heads_each_; }
  int64_t end_head_of(int64_t item) const;

  const Pass &pass_;
  const outrider_op &op_;
  const Part &part_;
  const size_t claimed_;
  const int thread_;
  int owner_;     // of the share that is claimed from
  int rate_ = 0;  // AskedBeside's, for every batch
  int64_t heads_each_ = 1, items_of_feed_ = 1, items_ = 0;
  std::array<Batch, 2> batches_;
  Batch *batch_ = &batches_[0];  // that memory is asked for, while the other one is attended
  AskedBeside asked_;
};

}  // namespace outrider

#endif
