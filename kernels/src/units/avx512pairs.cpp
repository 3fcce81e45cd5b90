#include "../simd_avx512.h"
#define OUTRIDER_UNIT kAvx512Pairs
#define OUTRIDER_UNIT_NAME "avx512pairs"
#define OUTRIDER_ROW_BLOCK 12
#include "../products_pairs.inc"
