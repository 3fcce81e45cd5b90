// Suffix decoding: candidates from the longest matches of a row's end, in its own text and in the answers of other rows.
#ifndef OUTRIDER_SRC_SUFFIXES_H
#define OUTRIDER_SRC_SUFFIXES_H

#include <stdint.h>
#include <stdlib.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "outrider_suffixes.h"

namespace outrider {

// The n-grams that are indexed, one level each. A match has at least n equal tokens; the longest are looked up first. Single tokens are
// indexed only in a row's own text.
constexpr std::array<int, 4> kGrams = {8, 4, 2, 1};
constexpr int kLevels = static_cast<int>(kGrams.size()), kSharedLevels = kLevels - 1;

// An index of n-grams. newest [level][hash]: the newest place where an n-gram with this hash ends; before [level][place]: the one before a
// place, with the same hash. Both are stored plus 1; 0: none.
struct Places {
  std::array<std::vector<int32_t>, kLevels> newest, before;
};

// A row's own text, with its index.
class OwnText {
 public:
  void append(const int32_t *tokens, int64_t count);
  const std::vector<int32_t> &tokens() const { return tokens_; }
  // The place before this one where the same n-gram may end (the same hash), -1: none.
  int64_t before(int level, int64_t place) const;

 private:
  void insert(int64_t place);
  void make_room();

  std::vector<int32_t> tokens_;
  Places places_;
  uint64_t mask_ = 0;
};

// The answers of all rows, in a ring of chunks. Each chunk belongs to one answer; a new chunk overwrites the oldest.
class Answers {
 public:
  static constexpr int kChunk = 32;

  explicit Answers(int64_t tokens);
  bool empty() const { return chunks_.empty(); }
  int64_t bytes() const;
  // The end of an answer: its last chunk, or -1. The chunk may have been overwritten since (then its owner differs).
  struct Tail {
    int64_t owner = -1;
    int32_t chunk = -1;
  };
  // Adds the last `count` tokens of `text` to an answer. The tokens before them count for n-grams that end in the added ones.
  void append(Tail *tail, const std::vector<int32_t> &text, int64_t count);
  // The newest place where the text's last n-gram may end, and the place before another one; -1: none.
  int64_t newest(int level, const std::vector<int32_t> &text) const;
  int64_t before(int level, int64_t place) const;
  int64_t owner(int64_t place) const { return chunks_[static_cast<size_t>(place / kChunk)].owner; }
  int32_t token(int64_t place) const { return tokens_[static_cast<size_t>(place)]; }
  // The next and the previous token's place in the same answer, -1: none.
  int64_t next(int64_t place) const;
  int64_t previous(int64_t place) const;
  bool holds(int64_t place) const;

 private:
  struct Chunk {
    int64_t owner = -1;
    int32_t used = 0, previous = -1, next = -1;
  };
  struct Free {
    void operator()(int32_t *memory) const { free(memory); }
  };
  using Memory = std::unique_ptr<int32_t[], Free>;

  std::vector<Chunk> chunks_;
  Memory tokens_;
  std::array<Memory, kSharedLevels> newest_, before_;
  uint64_t mask_ = 0;
  int32_t turn_ = 0;
};

// Candidates for rows, each with its probability, which is learned from the outcomes of earlier guesses.
class Suffixes {
 public:
  explicit Suffixes(int64_t tokens) : answers_(tokens) {}

  int32_t advance(const outrider_suffix_rows &rows);
  void end(int64_t key, const int32_t *tokens, int32_t count);
  void learn(const int32_t *tokens, int32_t count);
  int64_t bytes() const { return answers_.bytes(); }

 private:
  struct Guess {
    int32_t token, kind;
    double chance;
  };
  struct Row {
    OwnText text;
    Answers::Tail tail;
    // The guesses for what follows the text. held: the number of this row's guesses that were right; expected: the sum of their
    // probabilities. Both decay exponentially.
    std::vector<Guess> guesses;
    double held = 0.0, expected = 0.0;
  };
  // A match of a row's end. place: the token after the match, which is the one it votes for.
  struct Match {
    int64_t place;
    int length;
    bool own;
  };
  // The number of guesses of one kind, and how many of them were right.
  struct Kind {
    double tried = 0.0, held = 0.0;
  };

  void take_in(Row *row, const int32_t *tokens, int64_t count, int64_t prompt);
  void judge(Row *row, const int32_t *tokens, int64_t count);
  void find(const Row &row);
  void add(const Match &found);
  void add_own(const Row &row, int level);
  void add_others(const Row &row, int level);
  int32_t propose(Row *row, int32_t most, double least, int32_t *candidates, double *reaches, uint8_t *from_others);
  double chance(int32_t kind, int length, double share) const;

  static constexpr int kLengths = 10, kShares = 6, kSupports = 3, kKinds = kLengths * kShares * kSupports * 2;

  Answers answers_;
  std::unordered_map<int64_t, Row> rows_;
  std::array<Kind, kKinds> kinds_;
  std::vector<Match> matches_;
  int64_t owners_ = 0;
};

}  // namespace outrider

#endif
