#include "shortlist.h"

#include <algorithm>

#include "message.h"
#include "pack.h"

namespace outrider {
namespace {

constexpr int32_t kNowhere = -1;

outrider_weight vector_of(const std::vector<float> &values) {
  outrider_weight vector{};
  vector.data = values.data();
  vector.rows = 1;
  vector.columns = static_cast<int32_t>(values.size());
  vector.format = OUTRIDER_FP32;
  vector.table = 1;
  return vector;
}

}  // namespace

int32_t Shortlist::create(const outrider_weight &all, const outrider_weight *bias, int32_t count) {
  if (count < 1 || count >= all.rows || all.gated)
    return fail(OUTRIDER_INVALID, "a shortlist of %d tokens of %d", count, all.rows);
  all_ = matrix_ = all;
  matrix_.rows = count;
  if (!memory_.reserve(packed_bytes(matrix_)))
    return fail(OUTRIDER_NO_MEMORY, "no memory for a shortlist of %d tokens", count);
  matrix_.data = memory_.as<void>();
  copy_order(all_, matrix_);
  tokens_.resize(static_cast<size_t>(count));
  ids_ = vector_of(tokens_);
  if (bias) {
    all_bias_ = *bias;
    biases_.resize(static_cast<size_t>(count));
    bias_ = vector_of(biases_);
  }
  places_.assign(static_cast<size_t>(all.rows), kNowhere);
  const size_t ring = static_cast<size_t>(count) + 1;
  earlier_.resize(ring);
  later_.resize(ring);
  // The lowest id counts as met most recently.
  for (int32_t place = 0; place <= count; ++place) {
    earlier_[static_cast<size_t>(place)] = place == count ? 0 : place + 1;
    later_[static_cast<size_t>(place)] = place == 0 ? count : place - 1;
  }
  for (int32_t place = 0; place < count; ++place) put(place, place);
  return OUTRIDER_OK;
}

void Shortlist::put(int32_t place, int32_t token) {
  const size_t at = static_cast<size_t>(place);
  copy_row(all_, token, matrix_, place);
  if (!biases_.empty()) biases_[at] = static_cast<const float *>(all_bias_.data)[token];
  tokens_[at] = static_cast<float>(token);
  places_[static_cast<size_t>(token)] = place;
}

void Shortlist::make_latest(int32_t place) {
  const size_t at = static_cast<size_t>(place), ends = tokens_.size();
  later_[static_cast<size_t>(earlier_[at])] = later_[at];
  earlier_[static_cast<size_t>(later_[at])] = earlier_[at];
  earlier_[at] = earlier_[ends];
  later_[at] = static_cast<int32_t>(ends);
  later_[static_cast<size_t>(earlier_[ends])] = place;
  earlier_[ends] = place;
}

std::vector<int32_t> Shortlist::meet(const int32_t *tokens, int count) {
  std::vector<int32_t> changed;
  changed.reserve(static_cast<size_t>(count));  // if there is no memory for it, nothing has changed
  for (int i = 0; i < count; ++i) {
    const int32_t token = tokens[i];
    int32_t place = places_[static_cast<size_t>(token)];
    if (place == kNowhere) {
      place = later_[tokens_.size()];
      places_[static_cast<size_t>(tokens_[static_cast<size_t>(place)])] = kNowhere;
      put(place, token);
      changed.push_back(lane_of(matrix_, place).tile);
    }
    make_latest(place);
  }
  std::sort(changed.begin(), changed.end());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
  return changed;
}

}  // namespace outrider
