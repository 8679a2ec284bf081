// The library calls of no_ops.def. Their arguments are never looked at, so that no header is needed here;
// libraries.cpp has the headers and checks that each answers a status.
#include "card.hpp"

#define CUBLAS(name)                                  \
    extern "C" int name() {                           \
        stand_in::count(stand_in::Counter::kLibrary); \
        return 0;                                     \
    }
#include "no_ops.def"
