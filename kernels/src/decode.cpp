// Rows that go on by themselves, several passes in one call: between a small model's steps nothing else should take time.
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "engine.h"
#include "message.h"

namespace outrider {

namespace {

// A row that has not stopped.
struct ActiveRow {
  int32_t feed;
  double reach;
  const int32_t *ends;
  int32_t end_count;
};

// Takes the choice of a pass down; false where the row stops with it.
bool take(const outrider_decode_batch &wanted, ActiveRow *row, int32_t chosen, int32_t runner_up, double margin) {
  const int32_t made = wanted.made[row->feed]++;
  const int64_t at = static_cast<int64_t>(row->feed) * wanted.stride + made;
  wanted.chosen[at] = chosen;
  wanted.runners_up[at] = runner_up;
  wanted.margins[at] = margin;
  const int64_t span = std::upper_bound(wanted.bounds, wanted.bounds + wanted.spans - 1, margin) - wanted.bounds;
  row->reach *= std::max(wanted.least_chance, 1.0 - (1.0 - wanted.usual[span]) * wanted.miss_factor[row->feed]);
  const int32_t *end = row->ends + row->end_count;
  return made + 1 < wanted.most[row->feed] && row->reach >= wanted.least_reach && std::find(row->ends, end, chosen) == end;
}

int32_t check_decode(const outrider_decode_batch &wanted) {
  if (wanted.spans < 1) return fail(OUTRIDER_INVALID, "%d spans of margins", wanted.spans);
  for (int i = 0; i < wanted.feeds; ++i)
    if (wanted.most[i] < 1 || wanted.most[i] > wanted.stride)
      return fail(OUTRIDER_INVALID, "row %d: %d choices wanted, there is room for 1 to %d", wanted.rows[i], wanted.most[i],
                  wanted.stride);
  return OUTRIDER_OK;
}

}  // namespace

int32_t Engine::decode(const outrider_decode_batch &wanted) {
  stepping = true;
  int32_t status = check_decode(wanted);
  std::vector<ActiveRow> going;
  const int32_t *ends = wanted.ends;
  for (int i = 0; i < wanted.feeds && status == OUTRIDER_OK; ends += wanted.end_counts[i], ++i) {
    wanted.made[i] = 0;
    going.push_back({i, wanted.reach[i], ends, wanted.end_counts[i]});
  }
  std::vector<int32_t> fed_rows(wanted.rows, wanted.rows + wanted.feeds),
      counts(wanted.counts, wanted.counts + wanted.feeds);
  std::vector<int32_t> next, choose(static_cast<size_t>(wanted.feeds), 1), chosen(static_cast<size_t>(wanted.feeds)),
      runners_up(chosen);
  std::vector<double> margins(static_cast<size_t>(wanted.feeds));
  outrider_batch batch{};
  batch.tokens = wanted.tokens;
  batch.given = wanted.given;
  batch.states_in = wanted.states_in;
  for (int pass = 0; status == OUTRIDER_OK && !going.empty(); ++pass) {
    batch.feeds = static_cast<int32_t>(going.size());
    batch.rows = fed_rows.data();
    batch.counts = counts.data();
    batch.choose = choose.data();
    batch.chosen = chosen.data();
    batch.runners_up = runners_up.data();
    batch.margins = margins.data();
    const auto started = std::chrono::steady_clock::now();
    status = run(batch);
    wanted.seconds[pass] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (status != OUTRIDER_OK) break;
    std::vector<ActiveRow> still_going;
    double sum = 0.0;
    fed_rows.clear();
    next.clear();
    for (size_t i = 0; i < going.size(); ++i) {
      if (!take(wanted, &going[i], chosen[i], runners_up[i], margins[i])) continue;
      still_going.push_back(going[i]);
      sum += going[i].reach - wanted.least_reach;
      fed_rows.push_back(wanted.rows[going[i].feed]);
      next.push_back(chosen[i]);
    }
    if (sum < wanted.least_sum) break;
    going = std::move(still_going);
    counts.assign(going.size(), 1);
    batch.tokens = next.data();
    batch.given = nullptr;
  }
  return status;
}

}  // namespace outrider
