// Chooses the unit for this machine. Compiled without special flags, or it could die of SIGILL where it should refuse.
#include <stdlib.h>
#include <string.h>
#ifdef OUTRIDER_X86
  #include <cpuid.h>
  #include <sys/syscall.h>
  #include <unistd.h>
#endif

#include <string>
#include <utility>

#include "kernels.h"

namespace outrider {
namespace {

struct Unit {
  const Kernels *kernels;
  bool present;
};

constexpr int kUnits = 6;

#ifdef OUTRIDER_X86
// The kernel grants AMX tile registers only to processes that request them. Requesting them twice is harmless.
bool tiles_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// In a virtual machine each CPUID is an exit to its host, so none is asked for twice.

// F16C, by CPUID: __builtin_cpu_supports does not know its name before GCC 11.
bool has_half_conversion() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
  }();
  return has;
}

[[maybe_unused]] bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  return (d & kBf16) && (d & kTile) && (d & kInt8) && tiles_granted();
}

// AMD families whose vector additions run on other pipes than multiplications, so that products in pairs are faster. On Intel's processors
// they share pipes.
constexpr unsigned kZen4 = 25, kZen5 = 26;

unsigned amd_family() {
  static const unsigned family = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0u;
    return (a >> 8 & 15) + (a >> 20 & 255);
  }();
  return family;
}

bool adds_beside_products() { return amd_family() == kZen4 || amd_family() == kZen5; }
#endif

// The unit that OUTRIDER_ISA names, or null.
const char *wanted_unit() {
  const char *const name = getenv("OUTRIDER_ISA");
  return name && *name ? name : nullptr;
}

#ifdef OUTRIDER_X86
// A table is only copied here, and so may be of a unit whose instructions the machine has not.
Kernels with_products(const Products &products) {
  Kernels kernels = kAvx512Vnni;
  static_cast<Products &>(kernels) = products;
  return kernels;
}
#endif

// Best first. __builtin_cpu_supports also checks that the system saves the registers.
void list_units(Unit units[kUnits]) {
#ifdef OUTRIDER_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_conversion();
  #ifdef OUTRIDER_EMULATE
  const bool avx512 = avx2, bf16 = avx2, amx = avx2;
  #else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  const bool amx = bf16 && has_amx();
  #endif
  static const Kernels of_amx = with_products(kAmx), of_bf16 = with_products(kAvx512Bf16),
                       of_pairs = with_products(kAvx512Pairs);
  units[0] = {&of_amx, amx};
  units[1] = {&of_bf16, bf16};
  units[2] = {&of_pairs, bf16};
  if (adds_beside_products()) std::swap(units[1], units[2]);
  units[3] = {&kAvx512Vnni, avx512};
  units[4] = {&kAvx2, avx2};
#else
  units[0] = units[1] = units[2] = units[3] = units[4] = {&kGeneric, false};
#endif
  units[5] = {&kGeneric, true};
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
  const char *const wanted = wanted_unit();
  for (const Unit &unit : units) {
    if (unit.present && (!wanted || strcmp(unit.kernels->name, wanted) == 0)) return unit.kernels;
  }
  static thread_local std::string refusal;
  refusal = std::string("OUTRIDER_ISA=") + wanted +
            " is not an instruction set of this machine, which has: " + available_kernels();
  *message = refusal.c_str();
  return nullptr;
}

int fewest_in_pairs(int scales) {
#ifdef OUTRIDER_X86
  constexpr int kFewestOnZen5 = 10;
  if (amd_family() == kZen5 && !wanted_unit()) return scales == OUTRIDER_WORDS ? kFewestOnZen5 : 0;
#endif
  const bool has_constants = scales == OUTRIDER_WORDS || scales == OUTRIDER_FACTORS;
  return has_constants || wanted_unit() ? kFewestInPairs : kMostInPairs + 1;
}

}  // namespace outrider
