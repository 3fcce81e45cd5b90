#define OUTRIDER_AMX
#include "../simd_avx512.h"
#define OUTRIDER_UNIT kAmx
#define OUTRIDER_UNIT_NAME "amx"
#define OUTRIDER_ROW_BLOCK 8
#include "../products_amx.inc"
