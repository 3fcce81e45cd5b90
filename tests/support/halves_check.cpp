// Which way passes go, by what earlier ones took: prints what is not as wanted, and then ends with 1.
#include <stdio.h>
#include <stdlib.h>

#include "halves_choice.h"

namespace {

int wrong = 0;

void expect(bool what, const char *said) {
  if (what) return;
  fprintf(stderr, "%s\n", said);
  wrong = 1;
}

// How many of this many passes over that many tokens go in halves, when these take `ratio` of the time of whole ones.
int in_halves(outrider::HalvesChoice *choice, int passes, int tokens, double ratio) {
  int count = 0;
  for (int i = 0; i < passes; ++i) {
    const bool halves = choice->next(tokens, int64_t{1000} * tokens);
    count += halves;
    choice->took(tokens * (halves ? ratio : 1.0));
  }
  return count;
}

}  // namespace

int main() {
  using outrider::HalvesChoice;
  unsetenv("OUTRIDER_HALVES");
  {
    HalvesChoice choice;
    expect(!choice.always(), "halves are not asked for");
    expect(in_halves(&choice, 10, 32, 0.8) == 5, "both ways are tried in turn");
    expect(in_halves(&choice, 250, 32, 0.8) == 250, "the quicker way is kept to: halves");
    expect(in_halves(&choice, 10, 32, 1.2) == 5, "both ways are tried again");
    expect(in_halves(&choice, 250, 32, 1.2) == 0, "the quicker way is kept to: whole");
  }
  {
    HalvesChoice choice;
    in_halves(&choice, 10, 32, 0.99);
    expect(in_halves(&choice, 100, 32, 0.99) == 0, "what gains next to nothing is left");
    expect(in_halves(&choice, 100, 40, 0.5) == 0, "the choice holds for passes of about that size");
    expect(in_halves(&choice, 10, 100, 0.5) == 5, "passes of another size are tried anew");
    expect(in_halves(&choice, 50, 100, 0.5) == 50, "with what came of them");
  }
  {
    HalvesChoice choice;
    // What a pass took is compared with that of one like it alone.
    for (int i = 0; i < 20; ++i)
      expect(in_halves(&choice, 1, i % 2 ? 20 : 60, 0.5) == 0, "sizes that differ are not compared");
  }
  setenv("OUTRIDER_HALVES", "1", 1);
  {
    HalvesChoice choice;
    expect(choice.always() && in_halves(&choice, 30, 32, 2.0) == 30, "halves that are asked for");
  }
  setenv("OUTRIDER_HALVES", "0", 1);
  {
    HalvesChoice choice;
    expect(!choice.always() && in_halves(&choice, 30, 32, 0.5) == 0, "whole passes that are asked for");
  }
  return wrong;
}
