// Which unit this machine can run. Compiled without special flags, or it would die where it should refuse.
#include <stdlib.h>
#include <string.h>

#include <string>

#include "kernels.h"

namespace outrider {
namespace {

struct Unit {
  const Kernels *kernels;
  bool present;
};

constexpr int kUnits = 4;

// Best first. __builtin_cpu_supports also asks whether the system saves the registers.
void list_units(Unit units[kUnits]) {
#ifdef OUTRIDER_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  units[0] = {&kAvx512Bf16, avx512 && __builtin_cpu_supports("avx512bf16")};
  units[1] = {&kAvx512Vnni, avx512};
  units[2] = {&kAvx2, avx2};
#else
  units[0] = units[1] = units[2] = {&kGeneric, false};
#endif
  units[3] = {&kGeneric, true};
}

std::string names_of_present() {
  Unit units[kUnits];
  list_units(units);
  std::string names;
  for (const Unit &unit : units)
    if (unit.present) names += (names.empty() ? "" : " ") + std::string(unit.kernels->name);
  return names;
}

}  // namespace

const char *available_kernels() {
  static const std::string names = names_of_present();
  return names.c_str();
}

const Kernels *choose_kernels(const char **message) {
  Unit units[kUnits];
  list_units(units);
  const char *wanted = getenv("OUTRIDER_ISA");
  for (const Unit &unit : units) {
    if (unit.present && (!wanted || !*wanted || strcmp(unit.kernels->name, wanted) == 0)) return unit.kernels;
  }
  static thread_local std::string refusal;
  refusal = std::string("OUTRIDER_ISA=") + wanted + " is not an instruction set of this machine, which has: " +
            available_kernels();
  *message = refusal.c_str();
  return nullptr;
}

}  // namespace outrider
