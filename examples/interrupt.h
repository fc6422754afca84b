// Ctrl-C, SIGTERM and SIGHUP as a wish to end, which is looked at wherever the demo waits.
#pragma once

#include "base/result.h"

namespace rejoin::demo {

void catch_interrupts();  // once, from main; signals that are ignored already stay so (nohup)
int interrupted();        // the signal that has come; 0: none
// `cancelled` where one has come.
Result<> unless_interrupted();

}  // namespace rejoin::demo
