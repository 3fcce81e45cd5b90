// An engine's rows: open, fork, skip, truncate, close.
#include "engine.h"

#include <algorithm>

#include "message.h"

namespace outrider {

int32_t Engine::check_row(int row) const {
  if (row < 0 || row >= static_cast<int>(rows.size()) || !rows[static_cast<size_t>(row)].open)
    return fail(OUTRIDER_NO_ROW, "row %d is not open", row);
  return OUTRIDER_OK;
}

int32_t Engine::open(const outrider_sampling &sampling, int prompt, int32_t *row) {
  RowState state;
  const int32_t status = copy_sampling(sampling, vocabulary, &state.sampling);
  if (status != OUTRIDER_OK) return status;
  state.prompt = std::max(prompt, 0);
  *row = add(std::move(state));
  return OUTRIDER_OK;
}

int32_t Engine::add(RowState &&state) {
  size_t index = 0;
  while (index < rows.size() && rows[index].open) ++index;
  if (index == rows.size()) rows.emplace_back();
  rows[index] = std::move(state);
  rows[index].open = true;
  return static_cast<int32_t>(index);
}

int32_t Engine::fork(int source, int length, const outrider_sampling &sampling, int prompt, int32_t *row) {
  int32_t status = check_row(source);
  if (status != OUTRIDER_OK) return status;
  const int held = static_cast<int>(rows[static_cast<size_t>(source)].history.size());
  if (length < 0 || length > held) return fail(OUTRIDER_INVALID, "a fork of %d tokens from a row of %d", length, held);
  // The new row is whole before it is added: if memory runs out, there is none.
  RowState to;
  status = copy_sampling(sampling, vocabulary, &to.sampling);
  if (status != OUTRIDER_OK) return status;
  const RowState &from = rows[static_cast<size_t>(source)];
  to.prompt = std::max(prompt, 0);
  to.history.assign(from.history.begin(), from.history.begin() + length);
  to.rope = from.rope;
  to.begin = std::min(from.begin, length);
  if (!recurrence.empty()) to.recurrence = from.recurrence.forked(length, recurrence);
  if (longest > 0 && (from.rope == RowRope::kNone || (from.rope == RowRope::kUsual && length > longest)))
    to.rope = RowRope::kNone;  // no keys with the right frequencies: there is nothing to share
  else to.blocks.assign(from.blocks.begin(), from.blocks.begin() + (cached(to) + kBlockTokens - 1) / kBlockTokens);
  *row = add(std::move(to));
  for (const int block : rows[static_cast<size_t>(*row)].blocks) cache->retain(block);
  return OUTRIDER_OK;
}

int32_t Engine::truncate(int row, int length) {
  const int32_t status = check_row(row);
  if (status != OUTRIDER_OK) return status;
  RowState &state = rows[static_cast<size_t>(row)];
  if (length < 0 || length > static_cast<int>(state.history.size()))
    return fail(OUTRIDER_INVALID, "row %d has %d tokens and cannot be truncated to %d", row,
                static_cast<int>(state.history.size()), length);
  state.history.resize(static_cast<size_t>(length));
  state.begin = std::min(state.begin, length);
  if (static_cast<size_t>(length) < state.stored_at) state.stored_hidden.clear();
  if (!recurrence.empty()) state.recurrence.truncate(length);
  for (const size_t kept = static_cast<size_t>((cached(state) + kBlockTokens - 1) / kBlockTokens);
       state.blocks.size() > kept;) {
    cache->release(state.blocks.back());
    state.blocks.pop_back();
  }
  return OUTRIDER_OK;
}

int32_t Engine::skip(int row, const int32_t *tokens, int count) {
  int32_t status = check_row(row);
  if (status != OUTRIDER_OK) return status;
  RowState &state = rows[static_cast<size_t>(row)];
  const int64_t length = static_cast<int64_t>(state.history.size()) + count;
  if (count < 1 || longest > 0 || !recurrence.empty())
    return fail(OUTRIDER_INVALID, "row %d cannot skip %d tokens", row, count);
  if (length > context)
    return fail(OUTRIDER_CONTEXT, "row %d would hold %lld tokens, the model's context is %d", row,
                static_cast<long long>(length), context);
  for (int t = 0; t < count; ++t)
    if (tokens[t] < 0 || tokens[t] >= vocabulary)
      return fail(OUTRIDER_INVALID, "row %d: token %d is not in the vocabulary of %d", row, tokens[t], vocabulary);
  const int32_t id = row, counts = count;
  outrider_batch batch{};
  batch.feeds = 1;
  batch.rows = &id;
  batch.counts = &counts;
  state.history.reserve(static_cast<size_t>(length));
  status = reserve_blocks(batch);
  if (status != OUTRIDER_OK) return status;
  try {
    meet(tokens, count);
  } catch (...) {
    give_back(batch);
    throw;
  }
  state.history.insert(state.history.end(), tokens, tokens + count);
  state.begin = static_cast<int32_t>(length);
  state.stored_hidden.clear();
  return OUTRIDER_OK;
}

int32_t Engine::close(int row) {
  const int32_t status = truncate(row, 0);
  if (status != OUTRIDER_OK) return status;
  rows[static_cast<size_t>(row)] = RowState();
  return OUTRIDER_OK;
}

int32_t Engine::length(int row) const {
  const int32_t status = check_row(row);
  return status == OUTRIDER_OK ? static_cast<int32_t>(rows[static_cast<size_t>(row)].history.size()) : -status;
}

}  // namespace outrider
