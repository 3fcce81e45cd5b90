#include "suffixes.h"

#include <algorithm>
#include <new>

#include "message.h"

namespace outrider {

namespace {

// The longest match in tokens; longer ones are not compared further.
constexpr int kDepth = 32;
// For each n-gram length at most kMatches of the newest matches in the row's own text vote, and as many in the answers. Shorter n-grams
// are looked up only while there are fewer than kEnough.
constexpr size_t kMatches = 12;
constexpr size_t kEnough = 4;
// The most places tried for these: a place may have only the same hash, or may have been overwritten by another text.
constexpr int kPlaces = 32;
// The last tokens of a prompt that are stored with its answer, so that the answer's first tokens can be matched.
constexpr int64_t kLead = 8;
constexpr int64_t kLeastBuckets = 256;
// The prior of a kind's probability weighs as much as this many guesses.
constexpr double kPriorWeight = 8.0;
// The prior is share * length / (length + kDoubtfulLength): 1/2 for an undisputed match of this length.
constexpr double kDoubtfulLength = 8.0;
// Counts of a kind are halved at this number, so that they follow a job whose texts change.
constexpr double kMostTried = 1024.0;
// A row's probabilities are multiplied by (held + kRowWeight) / (expected + kRowWeight); both decay by kRowMemory with each guess.
constexpr double kRowWeight = 4.0, kRowMemory = 0.97;
// A match votes with the square of its length; one in the row's own text counts this many times.
constexpr double kOwnWeight = 3.0;
constexpr double kLeastChance = 0.01, kMostChance = 0.99;

uint64_t hash(const int32_t *tokens, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; ++i) {
    value = (value ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
    value ^= value >> 29;
  }
  return value;
}

size_t bucket(const int32_t *end, int level, uint64_t mask) {
  return static_cast<size_t>(hash(end - kGrams[static_cast<size_t>(level)], kGrams[static_cast<size_t>(level)]) & mask);
}

int length_kind(int length) {
  constexpr std::array<int, 9> bounds = {2, 3, 4, 5, 7, 9, 13, 17, 25};
  return static_cast<int>(std::upper_bound(bounds.begin(), bounds.end(), length) - bounds.begin());
}

int share_kind(double share) {
  constexpr std::array<double, 5> bounds = {0.3, 0.5, 0.7, 0.9, 0.999};
  return static_cast<int>(std::upper_bound(bounds.begin(), bounds.end(), share) - bounds.begin());
}

int support_kind(int count) { return count == 1 ? 0 : count < 4 ? 1 : 2; }

uint64_t buckets_for(int64_t tokens) {
  uint64_t count = kLeastBuckets;
  while (count < static_cast<uint64_t>(tokens)) count *= 2;
  return count;
}

}  // namespace

void OwnText::append(const int32_t *tokens, int64_t count) {
  const auto first = static_cast<int64_t>(tokens_.size());
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  if (tokens_.size() > (mask_ ? mask_ + 1 : 0)) {
    make_room();
    return;
  }
  for (auto place = first; place < static_cast<int64_t>(tokens_.size()); ++place) insert(place);
}

void OwnText::make_room() {
  mask_ = buckets_for(2 * static_cast<int64_t>(tokens_.size())) - 1;
  for (size_t level = 0; level < kGrams.size(); ++level) {
    places_.newest[level].assign(static_cast<size_t>(mask_) + 1, 0);
    places_.before[level].clear();
    places_.before[level].reserve(static_cast<size_t>(mask_) + 1);
  }
  for (int64_t place = 0; place < static_cast<int64_t>(tokens_.size()); ++place) insert(place);
}

void OwnText::insert(int64_t place) {
  for (int level = 0; level < kLevels; ++level) {
    auto &before = places_.before[static_cast<size_t>(level)];
    if (place + 1 < kGrams[static_cast<size_t>(level)]) {
      before.push_back(0);
      continue;
    }
    int32_t &newest =
        places_.newest[static_cast<size_t>(level)][bucket(&tokens_[static_cast<size_t>(place)] + 1, level, mask_)];
    before.push_back(newest);
    newest = static_cast<int32_t>(place + 1);
  }
}

int64_t OwnText::before(int level, int64_t place) const {
  return places_.before[static_cast<size_t>(level)][static_cast<size_t>(place)] - 1;
}

Answers::Answers(int64_t tokens) {
  const auto chunks = static_cast<size_t>(tokens / kChunk);
  if (chunks == 0) return;
  chunks_.resize(chunks);
  // calloc: pages take no memory before they are written.
  const auto zeroed = [](size_t count) {
    auto *memory = static_cast<int32_t *>(calloc(count, sizeof(int32_t)));
    if (!memory) throw std::bad_alloc();
    return Memory(memory);
  };
  mask_ = buckets_for(tokens) - 1;
  tokens_ = zeroed(chunks * kChunk);
  for (size_t level = 0; level < static_cast<size_t>(kSharedLevels); ++level) {
    newest_[level] = zeroed(static_cast<size_t>(mask_) + 1);
    before_[level] = zeroed(chunks * kChunk);
  }
}

int64_t Answers::bytes() const {
  if (empty()) return 0;
  const auto tokens = static_cast<int64_t>(chunks_.size()) * kChunk;
  return static_cast<int64_t>(chunks_.size() * sizeof(Chunk)) +
         static_cast<int64_t>(sizeof(int32_t)) *
             (tokens * (1 + kSharedLevels) + (static_cast<int64_t>(mask_) + 1) * kSharedLevels);
}

void Answers::append(Tail *tail, const std::vector<int32_t> &text, int64_t count) {
  if (empty()) return;
  const auto length = static_cast<int64_t>(text.size());
  for (int64_t at = length - count; at < length; ++at) {
    const bool kept = tail->chunk >= 0 && chunks_[static_cast<size_t>(tail->chunk)].owner == tail->owner;
    if (!kept || chunks_[static_cast<size_t>(tail->chunk)].used == kChunk) {
      const int32_t taken = turn_;
      turn_ = static_cast<size_t>(turn_) + 1 == chunks_.size() ? 0 : turn_ + 1;
      Chunk &chunk = chunks_[static_cast<size_t>(taken)];
      // The overwritten chunk's neighbours in its old answer lose their link to it.
      if (chunk.next >= 0) chunks_[static_cast<size_t>(chunk.next)].previous = -1;
      if (chunk.previous >= 0) chunks_[static_cast<size_t>(chunk.previous)].next = -1;
      chunk = {tail->owner, 0, -1, -1};
      if (kept && tail->chunk != taken) {
        chunk.previous = tail->chunk;
        chunks_[static_cast<size_t>(tail->chunk)].next = taken;
      }
      tail->chunk = taken;
    }
    Chunk &chunk = chunks_[static_cast<size_t>(tail->chunk)];
    const int64_t place = static_cast<int64_t>(tail->chunk) * kChunk + chunk.used++;
    tokens_[static_cast<size_t>(place)] = text[static_cast<size_t>(at)];
    for (int level = 0; level < kSharedLevels; ++level) {
      int32_t &before = before_[static_cast<size_t>(level)][static_cast<size_t>(place)];
      before = 0;
      if (at + 1 < kGrams[static_cast<size_t>(level)]) continue;
      int32_t &newest = newest_[static_cast<size_t>(level)][bucket(&text[static_cast<size_t>(at)] + 1, level, mask_)];
      before = newest;
      newest = static_cast<int32_t>(place + 1);
    }
  }
}

bool Answers::holds(int64_t place) const { return place % kChunk < chunks_[static_cast<size_t>(place / kChunk)].used; }

int64_t Answers::newest(int level, const std::vector<int32_t> &text) const {
  if (static_cast<int>(text.size()) < kGrams[static_cast<size_t>(level)]) return -1;
  const int64_t place = newest_[static_cast<size_t>(level)][bucket(text.data() + text.size(), level, mask_)] - 1;
  return place >= 0 && holds(place) ? place : -1;
}

int64_t Answers::before(int level, int64_t place) const {
  const int64_t found = before_[static_cast<size_t>(level)][static_cast<size_t>(place)] - 1;
  return found >= 0 && holds(found) ? found : -1;
}

int64_t Answers::next(int64_t place) const {
  const Chunk &chunk = chunks_[static_cast<size_t>(place / kChunk)];
  if (place % kChunk + 1 < chunk.used) return place + 1;
  // Only a full chunk has a next one.
  return chunk.next >= 0 ? static_cast<int64_t>(chunk.next) * kChunk : -1;
}

int64_t Answers::previous(int64_t place) const {
  if (place % kChunk) return place - 1;
  const int32_t chunk = chunks_[static_cast<size_t>(place / kChunk)].previous;
  return chunk >= 0 ? static_cast<int64_t>(chunk) * kChunk + kChunk - 1 : -1;
}

int32_t Suffixes::advance(const outrider_suffix_rows &rows) {
  const int32_t *tokens = rows.tokens;
  for (int32_t i = 0; i < rows.count; ++i) {
    if (rows.gained[i] < 0) return fail(OUTRIDER_INVALID, "a row that gained %d tokens", rows.gained[i]);
    if (rows.most[i] > rows.stride)
      return fail(OUTRIDER_INVALID, "%d candidates wanted, there is room for %d", rows.most[i], rows.stride);
  }
  try {
    for (int32_t i = 0; i < rows.count; tokens += rows.gained[i], ++i)
      take_in(&rows_[rows.keys[i]], tokens, rows.gained[i], rows.prompts[i]);
    // After all rows have been taken in, so that a row can match what the others have just gained.
    for (int32_t i = 0; i < rows.count; ++i) {
      const int64_t at = static_cast<int64_t>(i) * rows.stride;
      rows.made[i] = propose(&rows_[rows.keys[i]], rows.most[i], rows.least_reach, rows.candidates + at, rows.reaches + at,
                             rows.from_others + at);
    }
  } catch (...) {
    // Without memory a text may have been indexed by half: these rows begin anew, with what they gain next.
    for (int32_t i = 0; i < rows.count; ++i) rows_.erase(rows.keys[i]);
    throw;
  }
  return OUTRIDER_OK;
}

void Suffixes::end(int64_t key, const int32_t *tokens, int32_t count) {
  const auto found = rows_.find(key);
  if (found == rows_.end()) return;
  // Whatever happens, the row is at its end.
  Row row = std::move(found->second);
  rows_.erase(found);
  take_in(&row, tokens, count, 0);
}

void Suffixes::learn(const int32_t *tokens, int32_t count) {
  Answers::Tail tail{owners_++, -1};
  answers_.append(&tail, std::vector<int32_t>(tokens, tokens + count), count);
}

void Suffixes::take_in(Row *row, const int32_t *tokens, int64_t count, int64_t prompt) {
  const bool is_new = row->tail.owner < 0;
  if (is_new) row->tail.owner = owners_++;
  judge(row, tokens, count);
  row->text.append(tokens, count);
  const int64_t written = is_new ? count - std::min(prompt, count) + std::min(prompt, kLead) : count;
  answers_.append(&row->tail, row->text.tokens(), std::min(written, count));
}

void Suffixes::judge(Row *row, const int32_t *tokens, int64_t count) {
  for (size_t i = 0; i < row->guesses.size() && static_cast<int64_t>(i) < count; ++i) {
    const Guess &guess = row->guesses[i];
    const bool held = guess.token == tokens[i];
    Kind &kind = kinds_[static_cast<size_t>(guess.kind)];
    kind.tried += 1.0;
    kind.held += held ? 1.0 : 0.0;
    if (kind.tried >= kMostTried) {
      kind.tried /= 2.0;
      kind.held /= 2.0;
    }
    row->held = row->held * kRowMemory + (held ? 1.0 : 0.0);
    row->expected = row->expected * kRowMemory + guess.chance;
    if (!held) break;
  }
  row->guesses.clear();
}

double Suffixes::chance(int32_t kind, int length, double share) const {
  const Kind &known = kinds_[static_cast<size_t>(kind)];
  const double prior = share * length / (length + kDoubtfulLength);
  return (known.held + prior * kPriorWeight) / (known.tried + kPriorWeight);
}

void Suffixes::find(const Row &row) {
  matches_.clear();
  for (int level = 0; level < kLevels && matches_.size() < kEnough; ++level) {
    add_own(row, level);
    if (level < kSharedLevels) add_others(row, level);
  }
}

void Suffixes::add(const Match &found) {
  // The same place may have been found by a longer n-gram, or again because overwritten chunks have made a loop of `before`.
  for (const Match &match : matches_)
    if (match.own == found.own && match.place == found.place) return;
  matches_.push_back(found);
}

void Suffixes::add_own(const Row &row, int level) {
  const std::vector<int32_t> &text = row.text.tokens();
  const int64_t end = static_cast<int64_t>(text.size()) - 1;
  if (end < 0) return;
  const size_t most = matches_.size() + kMatches;
  int64_t place = row.text.before(level, end);
  for (int tries = 0; place >= 0 && tries < kPlaces && matches_.size() < most; ++tries) {
    int length = 0;
    while (length < kDepth && length <= place &&
           text[static_cast<size_t>(place - length)] == text[static_cast<size_t>(end - length)])
      ++length;
    if (length >= kGrams[static_cast<size_t>(level)]) add({place + 1, length, true});
    place = row.text.before(level, place);
  }
}

void Suffixes::add_others(const Row &row, int level) {
  if (answers_.empty()) return;
  const std::vector<int32_t> &text = row.text.tokens();
  const int64_t end = static_cast<int64_t>(text.size()) - 1;
  const size_t first = matches_.size();
  int64_t place = answers_.newest(level, text);
  for (int tries = 0; place >= 0 && tries < kPlaces && matches_.size() < first + kMatches; ++tries) {
    if (answers_.owner(place) != row.tail.owner) {
      int length = 0;
      for (int64_t back = place;
           back >= 0 && length < kDepth && length <= end && answers_.token(back) == text[static_cast<size_t>(end - length)];
           back = answers_.previous(back))
        ++length;
      const int64_t behind = answers_.next(place);
      if (length >= kGrams[static_cast<size_t>(level)] && behind >= 0) add({behind, length, false});
    }
    place = answers_.before(level, place);
  }
}

int32_t Suffixes::propose(Row *row, int32_t most, double least, int32_t *candidates, double *reaches,
                          uint8_t *from_others) {
  struct Vote {
    int32_t token;
    double weight;
    int count, longest;
    bool own;
  };
  find(*row);
  const std::vector<int32_t> &text = row->text.tokens();
  const auto length = static_cast<int64_t>(text.size());
  const double like_others = (row->held + kRowWeight) / (row->expected + kRowWeight);
  std::vector<Vote> votes;
  double reach = 1.0;
  int32_t made = 0;
  for (int32_t step = 0; step < std::max(most, 1) && !matches_.empty(); ++step) {
    // A match that reaches the end of the row's own text continues with the guesses made after it.
    const auto token_of = [&](const Match &match) {
      if (!match.own) return answers_.token(match.place);
      return match.place < length ? text[static_cast<size_t>(match.place)]
                                  : row->guesses[static_cast<size_t>(match.place - length)].token;
    };
    votes.clear();
    double all = 0.0;
    for (const Match &match : matches_) {
      const int32_t token = token_of(match);
      const double weight = static_cast<double>(match.length) * match.length * (match.own ? kOwnWeight : 1.0);
      all += weight;
      auto vote = std::find_if(votes.begin(), votes.end(), [token](const Vote &each) { return each.token == token; });
      if (vote == votes.end()) vote = votes.insert(votes.end(), {token, 0.0, 0, 0, false});
      vote->weight += weight;
      vote->count += 1;
      if (match.length > vote->longest) {
        vote->longest = match.length;
        vote->own = match.own;
      }
    }
    // max_element takes the first of equal votes: that of the row's own text, or of the newest match.
    const Vote &best = *std::max_element(votes.begin(), votes.end(),
                                         [](const Vote &left, const Vote &right) { return left.weight < right.weight; });
    const double share = best.weight / all;
    const int32_t kind =
        ((length_kind(best.longest) * kShares + share_kind(share)) * kSupports + support_kind(best.count)) * 2 +
        (best.own ? 1 : 0);
    const double usual = chance(kind, best.longest, share);
    reach *= std::min(kMostChance, std::max(kLeastChance, usual * like_others));
    // The first guess is always recorded, even if it is no candidate: so the probabilities of unlikely kinds are learned too.
    if (step && reach < least) break;
    row->guesses.push_back({best.token, kind, usual});
    if (reach >= least && step < most) {
      candidates[made] = best.token;
      reaches[made] = reach;
      from_others[made] = best.own ? 0 : 1;
      ++made;
    }
    const int32_t token = best.token;
    size_t kept = 0;
    for (Match match : matches_) {
      if (token_of(match) != token) continue;
      match.length = std::min(kDepth, match.length + 1);
      match.place = match.own ? match.place + 1 : answers_.next(match.place);
      if (match.place >= 0) matches_[kept++] = match;
    }
    matches_.resize(kept);
  }
  return made;
}

}  // namespace outrider
