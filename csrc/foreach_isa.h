// For kernel headers that leave it to their includer to open the target's namespace.
#define MASKWISE_BARE
#include "foreach_target.h"
