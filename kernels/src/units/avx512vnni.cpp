#include "../simd_avx512.h"
#define OUTRIDER_UNIT kAvx512Vnni
#define OUTRIDER_UNIT_NAME "avx512vnni"
#define OUTRIDER_ROW_BLOCK 12
#include "../unit.inc"
