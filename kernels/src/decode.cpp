// Autoregressive decoding, several passes in one call: the steps of a small model are so short that a call for each would cost time.
#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <vector>

#include "engine.h"
#include "message.h"

namespace outrider {

namespace {

// A row that has not stopped. text: its last tokens, the last choice included. guesses: tokens to feed after the text. kind: that of the
// repetition from which the first guess comes.
struct ActiveRow {
  int32_t feed;
  double reach;
  const int32_t *ends;
  int32_t end_count;
  std::vector<int32_t> text, guesses;
  size_t kind;
};

// Guesses are fed as long as all of them are right with at least this probability: they make a pass only a little longer.
constexpr double kLeastGuess = 0.25;

// Sets the row's guesses: the tokens that followed earlier occurrences of its last tokens.
void guess(ActiveRow *row, size_t most, const std::array<GuessRecord, kRepetitionKinds> &records) {
  row->guesses.clear();
  std::vector<int32_t> &text = row->text;
  double chance = 1.0, all = 1.0;
  while (row->guesses.size() < most) {
    const Repetition found = find_repetition(text.data(), text.size());
    if (found.next < 0) break;
    if (row->guesses.empty()) row->kind = found.kind, chance = records[found.kind].chance();
    all *= chance;
    if (!row->guesses.empty() && all < kLeastGuess) break;
    row->guesses.push_back(found.next);
    // The next guess assumes that this one is right.
    text.push_back(found.next);
  }
  text.resize(text.size() - row->guesses.size());
}

// Records a choice. False if the row stops after it.
bool take(const outrider_decode_batch &wanted, ActiveRow *row, int32_t chosen, int32_t runner_up, double margin) {
  const int32_t made = wanted.made[row->feed]++;
  const int64_t at = static_cast<int64_t>(row->feed) * wanted.stride + made;
  wanted.chosen[at] = chosen;
  wanted.runners_up[at] = runner_up;
  wanted.margins[at] = margin;
  row->text.push_back(chosen);
  const int64_t span = std::upper_bound(wanted.bounds, wanted.bounds + wanted.spans - 1, margin) - wanted.bounds;
  row->reach *= std::max(wanted.least_chance, 1.0 - (1.0 - wanted.usual[span]) * wanted.miss_factor[row->feed]);
  const int32_t *end = row->ends + row->end_count;
  return made + 1 < wanted.most[row->feed] && row->reach >= wanted.least_reach && std::find(row->ends, end, chosen) == end;
}

int32_t check_decode(const outrider_decode_batch &wanted) {
  if (wanted.spans < 1) return fail(OUTRIDER_INVALID, "%d spans of margins", wanted.spans);
  for (int i = 0; i < wanted.feeds; ++i)
    if (wanted.counts[i] < 1)
      return fail(OUTRIDER_INVALID, "row %d: %d tokens to go on from", wanted.rows[i], wanted.counts[i]);
  for (int i = 0; i < wanted.feeds; ++i)
    if (wanted.most[i] < 1 || wanted.most[i] > wanted.stride)
      return fail(OUTRIDER_INVALID, "row %d: %d choices wanted, there is room for 1 to %d", wanted.rows[i], wanted.most[i],
                  wanted.stride);
  return OUTRIDER_OK;
}

// The input and the output of one pass.
struct Step {
  std::vector<int32_t> rows, counts, tokens, choose, chosen, runners_up;
  std::vector<double> margins;

  void add(const outrider_decode_batch &wanted, const ActiveRow &row, const int32_t *first, int32_t count) {
    const auto guesses = static_cast<int32_t>(row.guesses.size());
    rows.push_back(wanted.rows[row.feed]);
    counts.push_back(count + guesses);
    choose.push_back(1 + guesses);
    tokens.insert(tokens.end(), first, first + count);
    tokens.insert(tokens.end(), row.guesses.begin(), row.guesses.end());
    chosen.resize(chosen.size() + 1 + row.guesses.size());
    runners_up.resize(chosen.size());
    margins.resize(chosen.size());
  }

  outrider_batch batch() {
    outrider_batch batch{};
    batch.feeds = static_cast<int32_t>(rows.size());
    batch.rows = rows.data();
    batch.counts = counts.data();
    batch.tokens = tokens.data();
    batch.choose = choose.data();
    batch.chosen = chosen.data();
    batch.runners_up = runners_up.data();
    batch.margins = margins.data();
    return batch;
  }
};

struct Taken {
  size_t right;  // guesses
  bool goes_on;
};

// Takes a row's choices of a pass, which are in the step's output from `at` on. The first choice is always valid; each later one follows
// a guess, and is valid only if that guess was right.
Taken take_all(const outrider_decode_batch &wanted, const Step &step, size_t at, ActiveRow *row, GuessRecord *record) {
  size_t right = 0;
  for (;;) {
    const size_t place = at + right;
    const bool goes_on = take(wanted, row, step.chosen[place], step.runners_up[place], step.margins[place]);
    if (right == row->guesses.size()) return {right, goes_on};
    const bool held = step.chosen[place] == row->guesses[right];
    record->observe(held);
    if (!held || !goes_on) return {right, goes_on};
    ++right;
  }
}

}  // namespace

int32_t Engine::decode(const outrider_decode_batch &wanted) {
  stepping = true;
  *wanted.passes = 0;
  int32_t status = check_decode(wanted);
  // A head needs a hidden state with each token, which guesses lack; and a recurrent state would have to be taken back after wrong guesses.
  const bool guessing = wanted.guess_room > 0 && hidden_in == 0 && recurrence.empty();
  std::vector<ActiveRow> going;
  const int32_t *ends = wanted.ends, *fed = wanted.tokens;
  for (int i = 0; i < wanted.feeds && status == OUTRIDER_OK; ends += wanted.end_counts[i], fed += wanted.counts[i], ++i) {
    wanted.made[i] = 0;
    going.push_back({i, wanted.reach[i], ends, wanted.end_counts[i], {}, {}, 0});
    status = check_row(wanted.rows[i]);
    if (status != OUTRIDER_OK) break;
    const std::vector<int32_t> &history = rows[static_cast<size_t>(wanted.rows[i])].history;
    std::vector<int32_t> &text = going.back().text;
    if (guessing) text.assign(history.end() - static_cast<int64_t>(std::min(history.size(), kLookBack)), history.end());
    text.insert(text.end(), fed, fed + wanted.counts[i]);
  }
  for (int pass = 0; status == OUTRIDER_OK && !going.empty(); ++pass) {
    Step step;
    const int32_t room = guessing ? wanted.guess_room / static_cast<int32_t>(going.size()) : 0;
    for (ActiveRow &row : going) {
      // After the first pass only the last choice is not in the cache yet.
      const int32_t count = pass == 0 ? wanted.counts[row.feed] : 1;
      const int32_t left = wanted.most[row.feed] - wanted.made[row.feed] - 1;
      guess(&row, static_cast<size_t>(std::max(0, std::min(room - count, left))), guess_records);
      step.add(wanted, row, row.text.data() + row.text.size() - count, count);
      const size_t longest_text = row.text.size() + 1 + row.guesses.size();
      if (row.text.capacity() < longest_text) row.text.reserve(2 * longest_text);
    }
    // After a pass no memory may be missing, or its wrong guesses would stay in the rows.
    std::vector<ActiveRow> still_going;
    still_going.reserve(going.size());
    outrider_batch batch = step.batch();
    if (pass == 0) batch.given = wanted.given, batch.states_in = wanted.states_in;
    const auto started = std::chrono::steady_clock::now();
    status = run(batch);
    wanted.seconds[pass] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (status != OUTRIDER_OK) break;
    wanted.going[pass] = batch.feeds;
    *wanted.passes = pass + 1;
    double sum = 0.0;
    size_t at = 0;
    for (ActiveRow &row : going) {
      const size_t guesses = row.guesses.size();
      const Taken taken = take_all(wanted, step, at, &row, &guess_records[row.kind]);
      at += guesses + 1;
      if (taken.right < guesses) {
        const int32_t id = wanted.rows[row.feed];
        status = truncate(id, length(id) - static_cast<int32_t>(guesses - taken.right));
        if (status != OUTRIDER_OK) return status;
      }
      if (!taken.goes_on) continue;
      sum += row.reach - wanted.least_reach;
      still_going.push_back(std::move(row));
    }
    if (sum < wanted.least_sum) break;
    going = std::move(still_going);
  }
  return status;
}

}  // namespace outrider
