#include "../simd_avx2.h"
#define OUTRIDER_UNIT kAvx2
#define OUTRIDER_UNIT_NAME "avx2"
#define OUTRIDER_ROW_BLOCK 4
#define OUTRIDER_SHORT_SUMS
#include "../unit.inc"
