#include "../simd_avx512.h"
#define OUTRIDER_UNIT kAvx512Bf16
#define OUTRIDER_UNIT_NAME "avx512bf16"
#define OUTRIDER_ROW_BLOCK 12
#include "../products_bf16.inc"
