// Checks a program, once, when an engine is created for it.
#include "engine.h"

#include <algorithm>

#include "message.h"
#include "op_check.h"
#include "pack.h"

namespace outrider {

int32_t Engine::check(const outrider_program &program) {
  if (program.op_count < 1 || program.vocabulary < 1 || program.context < 1)
    return fail(OUTRIDER_INVALID, "a program of %d operations, vocabulary %d, context %d", program.op_count,
                program.vocabulary, program.context);
  for (const outrider_weight &weight : weights) {
    const int32_t status = check_weight(weight);
    if (status != OUTRIDER_OK) return status;
    if (!weight.data || reinterpret_cast<uintptr_t>(weight.data) % 64)
      return fail(OUTRIDER_INVALID, "packed weights must lie at a multiple of 64 bytes");
  }
  std::vector<bool> selected(widths.size());
  bool selecting = false;
  for (const outrider_op &op : ops) {
    const int32_t status = check_op(*this, op, selecting, &selected);
    if (status != OUTRIDER_OK) return status;
    selecting = op.kind == OUTRIDER_SELECT;
    if (!selecting && std::find(selected.begin(), selected.end(), true) == selected.end()) ++first_select;
  }
  if (ops.back().kind != OUTRIDER_CHOOSE) return fail(OUTRIDER_INVALID, "a program ends with choose");
  return check_states_of_program();
}

// The program of a head has exactly one HIDDEN_IN, one LOAD_HIDDEN and one STORE_HIDDEN, in this order; other programs have none of them.
int32_t Engine::check_states_of_program() {
  std::vector<const outrider_op *> found;
  for (const outrider_op &op : ops) {
    if (op.kind == OUTRIDER_HIDDEN_OUT) hidden_out = std::max(hidden_out, op.integer + op.in.width);
    if (op.kind == OUTRIDER_HIDDEN_IN || op.kind == OUTRIDER_LOAD_HIDDEN || op.kind == OUTRIDER_STORE_HIDDEN)
      found.push_back(&op);
  }
  if (found.empty()) return OUTRIDER_OK;
  if (found.size() != 3 || found[0]->kind != OUTRIDER_HIDDEN_IN || found[1]->kind != OUTRIDER_LOAD_HIDDEN ||
      found[2]->kind != OUTRIDER_STORE_HIDDEN || found[1]->out.width != found[2]->in.width)
    return fail(OUTRIDER_INVALID, "a program is given a state, loads one, and stores one as wide, once each");
  hidden_in = found[0]->out.width;
  return OUTRIDER_OK;
}

}  // namespace outrider
