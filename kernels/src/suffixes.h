// What texts that repeat themselves go on with: the longest matches of each row's end, in its own text and in what other rows wrote.
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

// A match begins with this many equal tokens: the longest is looked for first. A single one is looked for in own text alone.
constexpr std::array<int, 4> kGrams = {8, 4, 2, 1};
constexpr int kLevels = static_cast<int>(kGrams.size()), kSharedLevels = kLevels - 1;

// Places where an n-gram ended, by its hash: the newest, and before each the one that it followed. 0 stands for none.
struct Places {
  std::array<std::vector<int32_t>, kLevels> newest, before;
};

// A row's own text.
class OwnText {
 public:
  void append(const int32_t *tokens, int64_t count);
  const std::vector<int32_t> &tokens() const { return tokens_; }
  // The place before this one where the same n-gram may have ended, -1: none.
  int64_t before(int level, int64_t place) const;

 private:
  void insert(int64_t place);
  void make_room();

  std::vector<int32_t> tokens_;
  Places places_;
  uint64_t mask_ = 0;
};

// What all rows wrote, in a ring of chunks: each belongs to one answer, and the oldest gives way to a new one.
class Answers {
 public:
  static constexpr int kChunk = 32;

  explicit Answers(int64_t tokens);
  bool empty() const { return chunks_.empty(); }
  int64_t bytes() const;
  // Where an answer goes on: nowhere yet, or its last chunk as long as nobody has taken that.
  struct Tail {
    int64_t owner = -1;
    int32_t chunk = -1;
  };
  // `text` ends with the `count` tokens that the answer has gained. Of the tokens before them matches are made, too.
  void append(Tail *tail, const std::vector<int32_t> &text, int64_t count);
  // The newest place where the text's last n-gram may have ended, and the one before a place; -1: none.
  int64_t newest(int level, const std::vector<int32_t> &text) const;
  int64_t before(int level, int64_t place) const;
  int64_t owner(int64_t place) const { return chunks_[static_cast<size_t>(place / kChunk)].owner; }
  int32_t token(int64_t place) const { return tokens_[static_cast<size_t>(place)]; }
  // The neighbours of a place in its answer, -1: none.
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

// Proposals for rows, with the chance of each candidate, which is learned from what became of earlier ones.
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
    // What was guessed behind the text, and how often this row's guesses have held against how often they should have.
    std::vector<Guess> guesses;
    double held = 0.0, expected = 0.0;
  };
  // A match of a row's end: the place behind it, or -1 where its text has ended.
  struct Match {
    int64_t place;
    int length;
    bool own;
  };
  // How often guesses of one kind were tried and held.
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
