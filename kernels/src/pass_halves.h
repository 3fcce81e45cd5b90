// A pass whose feeds run through the program in two halves.
#ifndef OUTRIDER_SRC_PASS_HALVES_H
#define OUTRIDER_SRC_PASS_HALVES_H

#include <array>

#include "pass.h"

namespace outrider {

// One thread's attention for one half while it computes matrix products for the other half. It takes batches of heads: the keys and values
// of a batch are prefetched between the products, and during the attention of the batch before. Attention of a batch is computed once all
// of it has been prefetched.
class AttentionBeside {
 public:
  // steps: the steps of all threads' products meanwhile (Pass::steps_in_pairs).
  AttentionBeside(const Pass &pass, size_t index, const Part &part, int64_t steps, int thread);
  AttentionBeside(const AttentionBeside &) = delete;
  AttentionBeside &operator=(const AttentionBeside &) = delete;

  PrefetchBeside *prefetch() { return &prefetch_; }
  // Computes attention of the current batch if all of it has been prefetched.
  void go_on();
  // Computes attention of everything that is left, prefetched or not.
  void finish();

 private:
  static constexpr size_t kMostItems = 16, kMostAreas = 256;
  // Heads that are prefetched, and then attended to, together.
  struct Batch {
    std::array<int64_t, kMostItems> items{};
    size_t count = 0;
    bool whole = true;  // whether `areas` covers all of its keys and values
    std::array<PrefetchBeside::Area, kMostAreas> areas{};
  };

  void claim();
  // Claims the next batch and computes attention of the current one. beside: prefetches the next batch meanwhile; or null.
  void attend_batch(PrefetchBeside *beside);
  const FeedState &feed_of(int64_t item) const;
  int64_t head_of(int64_t item) const { return item % items_of_feed_ * heads_each_; }
  int64_t end_head_of(int64_t item) const;

  const Pass &pass_;
  const outrider_op &op_;
  const Part &part_;
  const size_t claimed_;
  const int thread_;
  int owner_;     // the thread whose share is claimed from, as in Claims::next
  int rate_ = 0;  // PrefetchBeside::rate of every batch
  int64_t heads_each_ = 1, items_of_feed_ = 1, items_ = 0;
  std::array<Batch, 2> batches_;
  Batch *batch_ = &batches_[0];  // being prefetched, while the other one is attended to
  PrefetchBeside prefetch_;
};

}  // namespace outrider

#endif
