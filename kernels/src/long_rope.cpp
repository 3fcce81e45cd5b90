// Programs whose rope frequencies depend on the length of the row. The choice after n tokens is that of a row of n tokens, or of its whole
// prompt if n is less than that. If that length is at most `longest`, all keys of the row have the usual frequencies, else all have those
// of long rows. So a row never has keys of both kinds: one that grows or is truncated across `longest` is recomputed.
#include <algorithm>
#include <utility>

#include "engine.h"
#include "message.h"

namespace outrider {

namespace {

// The part of a feed that one pass computes: the row's tokens up to `end`, and some of the feed's outputs.
struct Part {
  int32_t feed;
  RowRope rope;
  int32_t end;
  int32_t choose, logits;
  std::vector<int32_t> branches;  // indices into the feed's branches
};

// The outputs of a pass over parts, before they are copied to the batch's.
struct Outputs {
  std::vector<int32_t> chosen, runners_up, logprob_tokens;
  std::vector<double> margins, logprob_values;
  std::vector<float> logits;
};

// Where a feed's outputs begin in the batch's, and how many of them have been written.
struct Place {
  int64_t choice = 0, logit = 0, logprob = 0;
  int32_t branch = 0, token = 0;
  int32_t choices_done = 0, logits_done = 0;
};

int32_t at(const int32_t *values, int index, int32_t otherwise) { return values ? values[index] : otherwise; }

// Tokens of a pass that recomputes a row: a pass over all tokens of several long rows would take too much memory.
constexpr int32_t kReadTogether = 512;

}  // namespace

int32_t Engine::forward(const outrider_batch &batch) {
  stepping = false;
  return run(batch);
}

int32_t Engine::run(const outrider_batch &batch) {
  experts_read = 0;
  if (lacks(batch)) return run_with_lacking(batch);
  if (longest <= 0) return run_pass(batch);
  const int32_t status = run_by_length(batch);
  choosings.clear();  // their indices are those of the last of several passes
  return status;
}

int32_t Engine::read(int32_t id, const std::vector<int32_t> &text, int32_t until) {
  const int32_t choose = 0;
  for (int32_t start; (start = static_cast<int32_t>(rows[static_cast<size_t>(id)].history.size())) < until;) {
    const int32_t count = std::min(kReadTogether, until - start);
    outrider_batch pass{};
    pass.feeds = 1;
    pass.rows = &id;
    pass.counts = &count;
    pass.tokens = text.data() + start;
    pass.choose = &choose;
    const int32_t status = run_pass(pass);
    if (status != OUTRIDER_OK) return status;
  }
  return OUTRIDER_OK;
}

int32_t Engine::run_by_length(const outrider_batch &batch) {
  int all_tokens = 0, all_selected = 0;
  int32_t status = check_batch(batch, &all_tokens, &all_selected);
  if (status != OUTRIDER_OK) return status;
  const size_t feeds = static_cast<size_t>(batch.feeds);
  std::vector<Place> places(feeds + 1);
  std::vector<int32_t> before(feeds);  // the rows' lengths
  std::vector<std::vector<int32_t>> texts(feeds);
  std::vector<Part> rounds[2];
  for (int i = 0; i < batch.feeds; ++i) {
    const size_t index = static_cast<size_t>(i);
    const RowState &row = rows[static_cast<size_t>(batch.rows[i])];
    const int32_t held = static_cast<int32_t>(row.history.size()), count = batch.counts[i], end = held + count;
    const int32_t choose = batch.choose[i], logits = at(batch.logits, i, 0), branches = at(batch.branches, i, 0);
    const int32_t explained = 1 + std::max(-1, at(batch.logprobs, i, -1));
    before[index] = held;
    texts[index] = row.history;
    texts[index].insert(texts[index].end(), batch.tokens + places[index].token, batch.tokens + places[index].token + count);
    Place &next = places[index + 1];
    next.choice = places[index].choice + choose + branches;
    next.logit = places[index].logit + logits;
    next.logprob = places[index].logprob + static_cast<int64_t>(choose + branches) * explained;
    next.branch = places[index].branch + branches;
    next.token = places[index].token + count;
    // Outputs after at most `longest` tokens are computed with the usual frequencies, unless the prompt alone is longer.
    const int32_t usual_until = row.prompt > longest ? 0 : longest;
    const auto usual_of = [&](int32_t wanted) { return std::clamp(usual_until - (end - wanted), 0, wanted); };
    const int32_t usual_choices = usual_of(choose), usual_logits = usual_of(logits);
    const int32_t *const after = branches ? batch.branch_after + places[index].branch : nullptr;
    std::vector<int32_t> usual_branches, long_branches;
    for (int32_t b = 0; b < branches; ++b) (held + after[b] < usual_until ? usual_branches : long_branches).push_back(b);
    const bool usual_wanted = usual_choices || usual_logits || !usual_branches.empty();
    if (usual_wanted || end <= usual_until)
      rounds[0].push_back({i, RowRope::kUsual, std::min(end, longest), usual_choices, usual_logits, usual_branches});
    if (end > usual_until)
      rounds[usual_wanted].push_back(
          {i, RowRope::kLong, end, choose - usual_choices, logits - usual_logits, long_branches});
  }
  // A token that differs from the choice before it is a rejected candidate. Choices after it are of no use, so no row is recomputed for
  // them.
  const auto is_idle = [&](const Part &part) {
    const Place &place = places[static_cast<size_t>(part.feed)];
    const std::vector<int32_t> &text = texts[static_cast<size_t>(part.feed)];
    if (part.logits > 0) return false;
    for (int32_t done = 0; done < place.choices_done; ++done)
      if (batch.chosen[place.choice + done] != text[static_cast<size_t>(longest - place.choices_done + done + 1)])
        return true;
    return false;
  };
  const auto leave = [&](const Part &part) {
    const size_t index = static_cast<size_t>(part.feed);
    const Place &place = places[index];
    const auto unknown = [&](int64_t to, int64_t count) {
      const int64_t each = 1 + std::max(-1, at(batch.logprobs, part.feed, -1)), from = place.choice + to;
      std::fill_n(batch.chosen + from, count, -1);
      if (batch.runners_up) std::fill_n(batch.runners_up + from, count, -1);
      if (batch.margins) std::fill_n(batch.margins + from, count, 0.0);
      if (each > 0 && batch.logprob_tokens) std::fill_n(batch.logprob_tokens + place.logprob + to * each, count * each, -1);
      if (each > 0 && batch.logprob_values)
        std::fill_n(batch.logprob_values + place.logprob + to * each, count * each, 0.0);
    };
    unknown(place.choices_done, part.choose);
    for (const int32_t b : part.branches) unknown(batch.choose[part.feed] + b, 1);
    // The row's last tokens have no keys. Unless it is truncated to `longest`, it is recomputed when it is fed again.
    rows[static_cast<size_t>(batch.rows[part.feed])].history = texts[index];
  };
  // After a failure nothing counts as fed: rows get their earlier length; those whose keys are lost are recomputed when they are fed again.
  const auto take_back = [&] {
    for (size_t i = 0; i < feeds; ++i) {
      const int32_t id = batch.rows[i];
      RowState &row = rows[static_cast<size_t>(id)];
      const std::vector<int32_t> held(texts[i].begin(), texts[i].begin() + before[i]);
      if (static_cast<int32_t>(row.history.size()) >= before[i] && !row.blocks.empty()) {
        truncate(id, before[i]);
      } else {
        truncate(id, 0);
        row.history = held;
        row.rope = RowRope::kNone;
      }
    }
  };
  for (std::vector<Part> &parts : rounds) {
    if (&parts == &rounds[1]) {
      for (const Part &part : parts)
        if (is_idle(part)) leave(part);
      parts.erase(std::remove_if(parts.begin(), parts.end(), is_idle), parts.end());
    }
    if (parts.empty()) continue;
    for (const Part &part : parts) {
      const size_t index = static_cast<size_t>(part.feed);
      RowState &row = rows[static_cast<size_t>(batch.rows[part.feed])];
      if (row.rope == part.rope) continue;
      const int32_t truncated = truncate(batch.rows[part.feed], 0);
      if (truncated != OUTRIDER_OK) return truncated;
      row.rope = part.rope;
      const int32_t ran = read(batch.rows[part.feed], texts[index], before[index]);
      if (ran != OUTRIDER_OK) return take_back(), ran;
    }
    std::vector<int32_t> row_ids, counts, tokens, choose, logits, branches, branch_after, branch_tokens, logprobs, mask_of;
    size_t choices = 0, logit_count = 0, logprob_count = 0;
    for (const Part &part : parts) {
      const size_t index = static_cast<size_t>(part.feed);
      const int32_t id = batch.rows[part.feed];
      const RowState &row = rows[static_cast<size_t>(id)];
      const int32_t start = static_cast<int32_t>(row.history.size());
      const std::vector<int32_t> &text = texts[index];
      row_ids.push_back(id);
      counts.push_back(part.end - start);
      tokens.insert(tokens.end(), text.begin() + start, text.begin() + part.end);
      choose.push_back(part.choose);
      logits.push_back(part.logits);
      branches.push_back(static_cast<int32_t>(part.branches.size()));
      for (const int32_t b : part.branches) {
        branch_after.push_back(before[index] + batch.branch_after[places[index].branch + b] - start);
        branch_tokens.push_back(batch.branch_tokens[places[index].branch + b]);
      }
      logprobs.push_back(at(batch.logprobs, part.feed, -1));
      const Place &place = places[index];
      const auto masked = [&](int64_t to) { mask_of.push_back(batch.mask_of ? batch.mask_of[place.choice + to] : -1); };
      for (int32_t c = 0; c < part.choose; ++c) masked(place.choices_done + c);
      for (const int32_t b : part.branches) masked(batch.choose[part.feed] + b);
      const size_t of_part = static_cast<size_t>(part.choose) + part.branches.size();
      choices += of_part;
      logit_count += static_cast<size_t>(part.logits);
      logprob_count += of_part * static_cast<size_t>(1 + std::max(-1, logprobs.back()));
    }
    Outputs outputs;
    outputs.chosen.resize(choices + 1);
    outputs.runners_up.resize(choices + 1);
    outputs.margins.resize(choices + 1);
    outputs.logits.resize(logit_count * static_cast<size_t>(vocabulary) + 1);
    outputs.logprob_tokens.resize(logprob_count + 1);
    outputs.logprob_values.resize(logprob_count + 1);
    outrider_batch pass{};
    pass.feeds = static_cast<int32_t>(parts.size());
    pass.rows = row_ids.data();
    pass.counts = counts.data();
    pass.tokens = tokens.data();
    pass.choose = choose.data();
    pass.logits = logits.data();
    pass.branches = branches.data();
    pass.branch_after = branch_after.data();
    pass.branch_tokens = branch_tokens.data();
    pass.chosen = outputs.chosen.data();
    pass.runners_up = batch.runners_up ? outputs.runners_up.data() : nullptr;
    pass.margins = batch.margins ? outputs.margins.data() : nullptr;
    pass.logits_out = outputs.logits.data();
    pass.logprobs = logprobs.data();
    pass.logprob_tokens = outputs.logprob_tokens.data();
    pass.logprob_values = outputs.logprob_values.data();
    pass.masks = batch.masks;
    pass.mask_of = batch.mask_of ? mask_of.data() : nullptr;
    pass.masks_ready = batch.masks_ready;
    pass.mask_words = batch.mask_words;
    const int32_t ran = run_pass(pass);
    if (ran == OUTRIDER_NOT_FINITE) {
      status = ran;
    } else if (ran != OUTRIDER_OK) {
      return take_back(), ran;
    }
    size_t choice = 0, logit = 0, logprob = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
      const Part &part = parts[p];
      Place &place = places[static_cast<size_t>(part.feed)];
      const size_t each = static_cast<size_t>(1 + std::max(-1, logprobs[p]));
      const auto hand_over = [&](int64_t to, int32_t count) {
        const int64_t explained = place.logprob + to * static_cast<int64_t>(each);
        const auto copy = [](const auto &from, size_t first, size_t number, auto *target, int64_t offset) {
          if (target) std::copy_n(from.begin() + static_cast<int64_t>(first), number, target + offset);
        };
        const size_t number = static_cast<size_t>(count);
        copy(outputs.chosen, choice, number, batch.chosen, place.choice + to);
        copy(outputs.runners_up, choice, number, batch.runners_up, place.choice + to);
        copy(outputs.margins, choice, number, batch.margins, place.choice + to);
        copy(outputs.logprob_tokens, logprob, number * each, batch.logprob_tokens, explained);
        copy(outputs.logprob_values, logprob, number * each, batch.logprob_values, explained);
        choice += number;
        logprob += number * each;
      };
      hand_over(place.choices_done, part.choose);
      // Choices after branches follow all choices of the feed.
      for (const int32_t b : part.branches) hand_over(batch.choose[part.feed] + b, 1);
      place.choices_done += part.choose;
      const size_t values = static_cast<size_t>(part.logits) * static_cast<size_t>(vocabulary);
      if (values)
        std::copy_n(outputs.logits.begin() + static_cast<int64_t>(logit), values,
                    batch.logits_out + (place.logit + place.logits_done) * vocabulary);
      logit += values;
      place.logits_done += part.logits;
    }
  }
  return status;
}

}  // namespace outrider
