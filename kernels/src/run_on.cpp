// Rows that go on by themselves, several passes in one call: between a small model's steps nothing else should take time.
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "engine.h"
#include "message.h"

namespace outrider {

namespace {

// A row of the run that has not stopped.
struct Going {
  int32_t feed;
  double reach;
  const int32_t *ends;
  int32_t end_count;
};

// Takes the choice of a pass down; false where the row stops with it.
bool take(const outrider_run &run, Going *row, int32_t chosen, int32_t runner_up, double margin) {
  const int32_t made = run.made[row->feed]++;
  const int64_t at = static_cast<int64_t>(row->feed) * run.stride + made;
  run.chosen[at] = chosen;
  run.runners_up[at] = runner_up;
  run.margins[at] = margin;
  const int64_t span = std::upper_bound(run.bounds, run.bounds + run.spans - 1, margin) - run.bounds;
  row->reach *= std::max(run.least_chance, 1.0 - (1.0 - run.usual[span]) * run.doubt[row->feed]);
  const int32_t *end = row->ends + row->end_count;
  return made + 1 < run.most[row->feed] && row->reach >= run.least_reach && std::find(row->ends, end, chosen) == end;
}

int32_t check_run(const outrider_run &run) {
  if (run.spans < 1) return fail(OUTRIDER_INVALID, "%d spans of margins", run.spans);
  for (int i = 0; i < run.feeds; ++i)
    if (run.most[i] < 1 || run.most[i] > run.stride)
      return fail(OUTRIDER_INVALID, "row %d: %d choices wanted, there is room for 1 to %d", run.rows[i], run.most[i],
                  run.stride);
  return OUTRIDER_OK;
}

}  // namespace

int32_t Engine::run_on(const outrider_run &run) {
  int32_t status = check_run(run);
  std::vector<Going> going;
  const int32_t *ends = run.ends;
  for (int i = 0; i < run.feeds && status == OUTRIDER_OK; ends += run.end_counts[i], ++i) {
    run.made[i] = 0;
    going.push_back({i, run.reach[i], ends, run.end_counts[i]});
  }
  std::vector<int32_t> fed_rows(run.rows, run.rows + run.feeds), counts(run.counts, run.counts + run.feeds);
  std::vector<int32_t> next, choose(static_cast<size_t>(run.feeds), 1), chosen(static_cast<size_t>(run.feeds)), runners_up(chosen);
  std::vector<double> margins(static_cast<size_t>(run.feeds));
  outrider_batch batch{};
  batch.tokens = run.tokens;
  for (int pass = 0; status == OUTRIDER_OK && !going.empty(); ++pass) {
    batch.feeds = static_cast<int32_t>(going.size());
    batch.rows = fed_rows.data();
    batch.counts = counts.data();
    batch.choose = choose.data();
    batch.chosen = chosen.data();
    batch.runners_up = runners_up.data();
    batch.margins = margins.data();
    const auto started = std::chrono::steady_clock::now();
    status = forward(batch);
    run.seconds[pass] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (status != OUTRIDER_OK) break;
    std::vector<Going> still_going;
    double sum = 0.0;
    fed_rows.clear();
    next.clear();
    for (size_t i = 0; i < going.size(); ++i) {
      if (!take(run, &going[i], chosen[i], runners_up[i], margins[i])) continue;
      still_going.push_back(going[i]);
      sum += going[i].reach - run.least_reach;
      fed_rows.push_back(run.rows[going[i].feed]);
      next.push_back(chosen[i]);
    }
    if (sum < run.least_sum) break;
    going = std::move(still_going);
    counts.assign(going.size(), 1);
    batch.tokens = next.data();
  }
  return status;
}

}  // namespace outrider
