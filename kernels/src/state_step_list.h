// Lists the steps of a recurrent head in a pass, and has the kernel take some dozens of them at a time.
#ifndef OUTRIDER_SRC_STATE_STEP_LIST_H
#define OUTRIDER_SRC_STATE_STEP_LIST_H

#include <stdint.h>

#include <algorithm>

#include "kernels.h"
#include "recurrence.h"

namespace outrider {

class StateStepList {
 public:
  using Kernel = void (*)(const StateSteps &);
  StateStepList(Kernel kernel, const StateSteps &shape, float *state)
      : kernel_(kernel), all_(shape), state_(state), from_(state) {
    all_.steps = steps_;
  }

  // An update that each step from now on applies first, until a step leaves the state with it.
  void put_off(const StateUpdate &update) {
    write_state();
    updates_[first_ + pending_++] = update;
  }

  // Reads the state for a candidate in place of the next token.
  void read(const StateStep &candidate) {
    if (add(candidate).to == state_) begin_at_state();
  }

  // Reads the state for a token. What comes later reads what this step leaves: with the token's own update, if the step makes it.
  void go_on(const StateStep &token) {
    add(token);
    left_ = all_.count - 1;
    drop_pending();
    from_ = nullptr;
  }

  void copy_to(float *to) {
    write_state();
    add({}).to = to;
  }

  // The row's state becomes the one here, as soon as a step has it at hand.
  void keep_state() { wanted_ = true; }

  void finish() {
    write_state();
    take();
  }

 private:
  // Keys and queries of 64 tokens take 64 KB where a head has 128 rows, so that they stay in the second cache.
  static constexpr int32_t kTogether = 64;

  StateStep &add(const StateStep &step) {
    if (!from_ && left_ >= 0) steps_[left_].aside = true;
    if (all_.count == kTogether) take();
    StateStep &added = steps_[all_.count++] = step;
    added.from = from_;
    added.pending = updates_ + first_;
    added.pending_count = pending_;
    if (wanted_) added.to = state_;
    wanted_ = false;
    return added;
  }

  void write_state() {
    if (!wanted_) return;
    add({});
    begin_at_state();
  }

  void begin_at_state() {
    from_ = state_;
    drop_pending();
  }

  void drop_pending() {
    first_ += pending_;
    pending_ = 0;
  }

  void take() {
    if (all_.count) kernel_(all_);
    all_.count = 0;
    left_ = -1;
    std::copy(updates_ + first_, updates_ + first_ + pending_, updates_);
    first_ = 0;
  }

  const Kernel kernel_;
  StateSteps all_;
  float *const state_;
  const float *from_;                // what the next step reads: the row's state, or null: what the last token's step left
  int32_t left_ = -1;                // that step, if it is listed
  bool wanted_ = false;              // whether the next step writes the row's state
  int32_t first_ = 0, pending_ = 0;  // the pending updates
  StateUpdate updates_[kMostKept + kTogether];
  StateStep steps_[kTogether];
};

}  // namespace outrider

#endif
