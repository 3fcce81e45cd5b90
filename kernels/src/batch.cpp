// Preparation of a forward pass: checks the batch, and reserves its rows' KV cache blocks and the buffers' memory.
#include <string.h>

#include <algorithm>
#include <new>

#include "engine.h"
#include "message.h"

namespace outrider {

int32_t Engine::check_batch(const outrider_batch &batch, int *tokens, int *selected) const {
  *tokens = *selected = 0;
  int branch = 0, choices = 0;
  std::vector<bool> seen(rows.size(), false);
  for (int i = 0; i < batch.feeds; ++i) {
    const int row = batch.rows[i], count = batch.counts[i];
    const int32_t status = check_row(row);
    if (status != OUTRIDER_OK) return status;
    if (seen[static_cast<size_t>(row)]) return fail(OUTRIDER_INVALID, "row %d is fed twice in one batch", row);
    seen[static_cast<size_t>(row)] = true;
    const int choose = batch.choose[i], logits = batch.logits ? batch.logits[i] : 0;
    if (count < 1 || choose < 0 || choose > count || logits < 0 || logits > count)
      return fail(OUTRIDER_INVALID, "row %d: %d tokens fed, %d choices and %d logits wanted", row, count, choose, logits);
    const int branches = batch.branches ? batch.branches[i] : 0;
    if (branches < 0) return fail(OUTRIDER_INVALID, "row %d: %d branches", row, branches);
    if (((choose || branches) && !batch.chosen) || (logits && !batch.logits_out))
      return fail(OUTRIDER_INVALID, "choices or logits are wanted, but there is no place for them");
    const int logprobs = batch.logprobs ? batch.logprobs[i] : -1;
    if (logprobs > vocabulary || (logprobs >= 0 && (!batch.logprob_tokens || !batch.logprob_values)))
      return fail(OUTRIDER_INVALID, "row %d: %d log-probabilities wanted, of a vocabulary of %d", row, logprobs,
                  vocabulary);
    const int32_t states = check_states(batch, i);
    if (states != OUTRIDER_OK) return states;
    const int64_t length = static_cast<int64_t>(rows[static_cast<size_t>(row)].history.size()) + count;
    if (length > context)
      return fail(OUTRIDER_CONTEXT, "row %d would hold %lld tokens, the model's context is %d", row,
                  static_cast<long long>(length), context);
    for (int t = 0; t < count; ++t, ++*tokens) {
      const int token = batch.tokens[*tokens];
      if (token < 0 || token >= vocabulary)
        return fail(OUTRIDER_INVALID, "row %d: token %d is not in the vocabulary of %d", row, token, vocabulary);
    }
    *selected += std::max(choose, logits);
    choices += choose + branches;
    for (int b = 0; b < branches; ++b, ++branch) {
      const int after = batch.branch_after[branch], token = batch.branch_tokens[branch];
      if (after < 1 || after >= count)
        return fail(OUTRIDER_INVALID, "row %d: a branch after %d of %d tokens fed", row, after, count);
      if (token < 0 || token >= vocabulary)
        return fail(OUTRIDER_INVALID, "row %d: token %d is not in the vocabulary of %d", row, token, vocabulary);
    }
  }
  for (int i = 0; batch.mask_of && i < choices; ++i)
    if (batch.mask_of[i] >= 0 && (!batch.masks || batch.mask_words < (vocabulary + 31) / 32))
      return fail(OUTRIDER_INVALID, "masks of %d words for a vocabulary of %d", batch.masks ? batch.mask_words : 0,
                  vocabulary);
  *tokens += branch;
  *selected += branch;
  return OUTRIDER_OK;
}

int32_t Engine::check_states(const outrider_batch &batch, int feed) const {
  const int row = batch.rows[feed], count = batch.counts[feed], given = batch.given ? batch.given[feed] : 0;
  if (batch.states && batch.states[feed] && (!hidden_out || !batch.states_out))
    return fail(OUTRIDER_INVALID, "states are wanted, but the program has none, or there is no place for them");
  if (given && (!hidden_in || !batch.states_in))
    return fail(OUTRIDER_INVALID, "row %d: states are given to a program that takes none in", row);
  if (!hidden_in) return OUTRIDER_OK;
  const RowState &state = rows[static_cast<size_t>(row)];
  const bool follows = count == 1 && !state.stored_hidden.empty() && state.stored_at == state.history.size();
  if (given != count && (given != 0 || !follows))
    return fail(OUTRIDER_INVALID, "row %d: %d of %d tokens fed come with a state, and none has been left for the first",
                row, given, count);
  if (batch.branches && batch.branches[feed])
    return fail(OUTRIDER_INVALID, "row %d: a program that takes states in has no branches", row);
  return OUTRIDER_OK;
}

// Gives every fed row the blocks that it will write; a shared block that it will write to is copied. On failure the rows stay as they were.
int32_t Engine::reserve_blocks(const outrider_batch &batch) {
  int32_t status = OUTRIDER_OK;
  try {
    for (int i = 0; i < batch.feeds && status == OUTRIDER_OK; ++i)
      status = reserve_blocks_of(&rows[static_cast<size_t>(batch.rows[i])], batch.counts[i]);
  } catch (const std::bad_alloc &) {
    status = fail(OUTRIDER_NO_MEMORY, "no memory for the list of a row's cache blocks");
  }
  if (status != OUTRIDER_OK) give_back(batch);
  return status;
}

int32_t Engine::reserve_blocks_of(RowState *row, int count) {
  const size_t length = row->history.size(), partial = length / kBlockTokens;
  const size_t needed = (length + static_cast<size_t>(count) + kBlockTokens - 1) / kBlockTokens;
  row->blocks.reserve(needed);
  int32_t status = OUTRIDER_OK;
  if (length % kBlockTokens && cache->shared(row->blocks[partial])) {
    const int copy = cache->take(&status);
    if (copy < 0) return status;
    memcpy(cache->data(copy), cache->data(row->blocks[partial]), static_cast<size_t>(cache->block_bytes()));
    cache->release(row->blocks[partial]);
    row->blocks[partial] = copy;
  }
  while (row->blocks.size() < needed) {
    const int block = cache->take(&status);
    if (block < 0) return status;
    row->blocks.push_back(block);
  }
  return OUTRIDER_OK;
}

// A row's own length releases the blocks, and drops the snapshots, that lie behind it.
void Engine::give_back(const outrider_batch &batch) {
  for (int i = 0; i < batch.feeds; ++i)
    truncate(batch.rows[i], static_cast<int>(rows[static_cast<size_t>(batch.rows[i])].history.size()));
}

int32_t Engine::reserve_scratch(int tokens, int selected) {
  // Choosing::logits points into a buffer that may be reallocated here.
  choosings.clear();
  const int64_t count = std::max(tokens, selected);
  bool enough = words.reserve((count * most_words + kLanes) * 4) && scales.reserve(count * most_groups * 4 + 64) &&
                offsets.reserve(count * most_groups * 4 + 64) && starts.reserve(count * most_groups * 4 + 64) &&
                (!any_in_pairs || less.reserve(count * most_groups * 4 + 64)) &&
                attention.reserve(pool->threads() * most_attention * 4 + 64) &&
                expanded.reserve(pool->threads() * most_expanded + 64);
  for (size_t i = 0; i < buffers.size(); ++i) {
    // A buffer that is written only after SELECT (above all the logits) needs a row only for each selected token.
    const bool late = std::none_of(ops.begin(), ops.end(), [&](const outrider_op &op) {
      return op.kind != OUTRIDER_CHOOSE && op.out.buffer == static_cast<int>(i) &&
             &op < &*std::find_if(ops.begin(), ops.end(), [](const outrider_op &o) { return o.kind == OUTRIDER_SELECT; });
    });
    enough = enough && buffers[i]->reserve((late ? std::max(selected, 1) : count) * stride(static_cast<int>(i)) * 4);
  }
  for (const auto &rotation : rotations)
    enough = enough && rotation->tables.reserve(2 * tokens * round_up(rotation->half, kLanes) * 4);
  return enough ? OUTRIDER_OK : fail(OUTRIDER_NO_MEMORY, "no memory for a batch of %d tokens", tokens);
}

}  // namespace outrider
