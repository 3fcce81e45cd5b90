#include "outrider_kernels.h"

int32_t outrider_abi_version(void) { return OUTRIDER_ABI; }
