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

// Elements of a choice in logprob_tokens and logprob_values.
int32_t logprobs_of(const outrider_batch &batch, int feed) { return 1 + std::max(-1, at(batch.logprobs, feed, -1)); }

// A batch whose rows may lie on both sides of `longest`.
struct Divided {
  const outrider_batch &batch;
  std::vector<Place> places;                // [feeds + 1]
  std::vector<int32_t> before;              // the rows' lengths
  std::vector<std::vector<int32_t>> texts;  // the rows' tokens and those that are fed
  std::vector<Part> rounds[2];              // two passes; a row that crosses `longest` has a part in each

  Divided(const Engine &engine, const outrider_batch &whole) : batch(whole) {
    const size_t feeds = static_cast<size_t>(batch.feeds);
    places.resize(feeds + 1);
    before.resize(feeds);
    texts.resize(feeds);
    for (int i = 0; i < batch.feeds; ++i) divide(i, engine.rows[static_cast<size_t>(batch.rows[i])], engine.longest);
  }

  void divide(int i, const RowState &row, int32_t longest) {
    const size_t index = static_cast<size_t>(i);
    const int32_t held = static_cast<int32_t>(row.history.size()), count = batch.counts[i], end = held + count;
    const int32_t choose = batch.choose[i], logits = at(batch.logits, i, 0), branches = at(batch.branches, i, 0);
    before[index] = held;
    texts[index] = row.history;
    texts[index].insert(texts[index].end(), batch.tokens + places[index].token, batch.tokens + places[index].token + count);
    Place &next = places[index + 1];
    next.choice = places[index].choice + choose + branches;
    next.logit = places[index].logit + logits;
    next.logprob = places[index].logprob + static_cast<int64_t>(choose + branches) * logprobs_of(batch, i);
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
  bool is_idle(const Part &part, int32_t longest) const {
    const Place &place = places[static_cast<size_t>(part.feed)];
    const std::vector<int32_t> &text = texts[static_cast<size_t>(part.feed)];
    if (part.logits > 0) return false;
    for (int32_t done = 0; done < place.choices_done; ++done)
      if (batch.chosen[place.choice + done] != text[static_cast<size_t>(longest - place.choices_done + done + 1)])
        return true;
    return false;
  }

  // Writes "no choice" for a part that is not computed.
  void write_none(const Part &part) const {
    const Place &place = places[static_cast<size_t>(part.feed)];
    const auto unknown = [&](int64_t to, int64_t count) {
      const int64_t each = logprobs_of(batch, part.feed), from = place.choice + to;
      std::fill_n(batch.chosen + from, count, -1);
      if (batch.runners_up) std::fill_n(batch.runners_up + from, count, -1);
      if (batch.margins) std::fill_n(batch.margins + from, count, 0.0);
      if (each > 0 && batch.logprob_tokens) std::fill_n(batch.logprob_tokens + place.logprob + to * each, count * each, -1);
      if (each > 0 && batch.logprob_values)
        std::fill_n(batch.logprob_values + place.logprob + to * each, count * each, 0.0);
    };
    unknown(place.choices_done, part.choose);
    for (const int32_t b : part.branches) unknown(batch.choose[part.feed] + b, 1);
  }
};

// One pass over parts: what it is given, and its outputs, which are then copied to those of the whole batch.
class PassOfParts {
 public:
  PassOfParts(Divided &divided, const std::vector<Part> &parts, const Engine &engine)
      : divided_(divided), batch_(divided.batch), parts_(parts), vocabulary_(engine.vocabulary) {
    size_t choices = 0, logits = 0, logprobs = 0;
    for (const Part &part : parts) {
      add(part, static_cast<int32_t>(engine.rows[static_cast<size_t>(batch_.rows[part.feed])].history.size()));
      const size_t of_part = static_cast<size_t>(part.choose) + part.branches.size();
      choices += of_part;
      logits += static_cast<size_t>(part.logits);
      logprobs += of_part * static_cast<size_t>(logprobs_of(batch_, part.feed));
    }
    outputs_.chosen.resize(choices + 1);
    outputs_.runners_up.resize(choices + 1);
    outputs_.margins.resize(choices + 1);
    outputs_.logits.resize(logits * static_cast<size_t>(vocabulary_) + 1);
    outputs_.logprob_tokens.resize(logprobs + 1);
    outputs_.logprob_values.resize(logprobs + 1);
  }

  outrider_batch structure() {
    outrider_batch pass{};
    pass.feeds = static_cast<int32_t>(parts_.size());
    pass.rows = rows_.data();
    pass.counts = counts_.data();
    pass.tokens = tokens_.data();
    pass.choose = choose_.data();
    pass.logits = logits_.data();
    pass.branches = branches_.data();
    pass.branch_after = branch_after_.data();
    pass.branch_tokens = branch_tokens_.data();
    pass.chosen = outputs_.chosen.data();
    pass.runners_up = batch_.runners_up ? outputs_.runners_up.data() : nullptr;
    pass.margins = batch_.margins ? outputs_.margins.data() : nullptr;
    pass.logits_out = outputs_.logits.data();
    pass.logprobs = logprobs_.data();
    pass.logprob_tokens = outputs_.logprob_tokens.data();
    pass.logprob_values = outputs_.logprob_values.data();
    pass.masks = batch_.masks;
    pass.mask_of = batch_.mask_of ? mask_of_.data() : nullptr;
    pass.masks_ready = batch_.masks_ready;
    pass.mask_words = batch_.mask_words;
    return pass;
  }

  void copy_outputs() {
    size_t choice = 0, logit = 0, logprob = 0;
    for (const Part &part : parts_) {
      Place &place = divided_.places[static_cast<size_t>(part.feed)];
      const size_t each = static_cast<size_t>(logprobs_of(batch_, part.feed));
      const auto copy_choices = [&](int64_t to, int32_t count) {
        const int64_t explained = place.logprob + to * static_cast<int64_t>(each);
        const auto copy = [](const auto &from, size_t first, size_t number, auto *target, int64_t offset) {
          if (target) std::copy_n(from.begin() + static_cast<int64_t>(first), number, target + offset);
        };
        const size_t number = static_cast<size_t>(count);
        copy(outputs_.chosen, choice, number, batch_.chosen, place.choice + to);
        copy(outputs_.runners_up, choice, number, batch_.runners_up, place.choice + to);
        copy(outputs_.margins, choice, number, batch_.margins, place.choice + to);
        copy(outputs_.logprob_tokens, logprob, number * each, batch_.logprob_tokens, explained);
        copy(outputs_.logprob_values, logprob, number * each, batch_.logprob_values, explained);
        choice += number;
        logprob += number * each;
      };
      copy_choices(place.choices_done, part.choose);
      // Choices after branches follow all choices of the feed.
      for (const int32_t b : part.branches) copy_choices(batch_.choose[part.feed] + b, 1);
      place.choices_done += part.choose;
      const size_t values = static_cast<size_t>(part.logits) * static_cast<size_t>(vocabulary_);
      if (values)
        std::copy_n(outputs_.logits.begin() + static_cast<int64_t>(logit), values,
                    batch_.logits_out + (place.logit + place.logits_done) * vocabulary_);
      logit += values;
      place.logits_done += part.logits;
    }
  }

 private:
  // `start`: how many tokens the row has.
  void add(const Part &part, int32_t start) {
    const size_t index = static_cast<size_t>(part.feed);
    const Place &place = divided_.places[index];
    const std::vector<int32_t> &text = divided_.texts[index];
    rows_.push_back(batch_.rows[part.feed]);
    counts_.push_back(part.end - start);
    tokens_.insert(tokens_.end(), text.begin() + start, text.begin() + part.end);
    choose_.push_back(part.choose);
    logits_.push_back(part.logits);
    branches_.push_back(static_cast<int32_t>(part.branches.size()));
    for (const int32_t b : part.branches) {
      branch_after_.push_back(divided_.before[index] + batch_.branch_after[place.branch + b] - start);
      branch_tokens_.push_back(batch_.branch_tokens[place.branch + b]);
    }
    logprobs_.push_back(at(batch_.logprobs, part.feed, -1));
    const auto masked = [&](int64_t to) { mask_of_.push_back(batch_.mask_of ? batch_.mask_of[place.choice + to] : -1); };
    for (int32_t c = 0; c < part.choose; ++c) masked(place.choices_done + c);
    for (const int32_t b : part.branches) masked(batch_.choose[part.feed] + b);
  }

  Divided &divided_;
  const outrider_batch &batch_;
  const std::vector<Part> &parts_;
  const int32_t vocabulary_;
  std::vector<int32_t> rows_, counts_, tokens_, choose_, logits_, branches_, branch_after_, branch_tokens_, logprobs_,
      mask_of_;
  Outputs outputs_;
};

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
  Divided divided(*this, batch);
  // After a failure nothing counts as fed: rows get their earlier length; those whose keys are lost are recomputed when they are fed again.
  const auto take_back = [&] {
    for (size_t i = 0; i < divided.before.size(); ++i) {
      const int32_t id = batch.rows[i], length = divided.before[i];
      RowState &row = rows[static_cast<size_t>(id)];
      if (static_cast<int32_t>(row.history.size()) >= length && !row.blocks.empty()) {
        truncate(id, length);
      } else {
        truncate(id, 0);
        // It has had as many tokens, so this needs no memory.
        row.history.assign(divided.texts[i].begin(), divided.texts[i].begin() + length);
        row.rope = RowRope::kNone;
      }
    }
  };
  // OUTRIDER_OK if both rounds ran; a logit that is not finite is in `status`.
  const auto run_rounds = [&]() -> int32_t {
    for (std::vector<Part> &parts : divided.rounds) {
      if (&parts == &divided.rounds[1]) {
        const auto is_idle = [&](const Part &part) { return divided.is_idle(part, longest); };
        for (const Part &part : parts) {
          if (!is_idle(part)) continue;
          divided.write_none(part);
          // The row's last tokens have no keys. Unless it is truncated to `longest`, it is recomputed when it is fed again.
          rows[static_cast<size_t>(batch.rows[part.feed])].history = divided.texts[static_cast<size_t>(part.feed)];
        }
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
        const int32_t ran = read(batch.rows[part.feed], divided.texts[index], divided.before[index]);
        if (ran != OUTRIDER_OK) return ran;
      }
      PassOfParts pass(divided, parts, *this);
      const int32_t ran = run_pass(pass.structure());
      if (ran == OUTRIDER_NOT_FINITE) status = ran;
      else if (ran != OUTRIDER_OK) return ran;
      pass.copy_outputs();
    }
    return OUTRIDER_OK;
  };
  int32_t ran = OUTRIDER_OK;
  try {
    ran = run_rounds();
  } catch (...) {
    take_back();
    throw;
  }
  if (ran != OUTRIDER_OK) take_back();
  return ran != OUTRIDER_OK ? ran : status;
}

}  // namespace outrider
