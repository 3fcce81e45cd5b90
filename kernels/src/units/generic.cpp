#include "../simd_generic.h"
#define OUTRIDER_UNIT kGeneric
#define OUTRIDER_UNIT_NAME "generic"
#define OUTRIDER_ROW_BLOCK 4
#include "../unit.inc"
