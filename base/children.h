// What a child of fork() does not keep up. See "Children of fork()" in docs/design-notes.md.
#pragma once

#include "base/fd.h"

namespace rejoin::children {

// In children of fork() that are made from now on, this descriptor is that of another socket, which has no connection:
// whoever is connected with a process that has ended would not hear of it for as long as such a child lives. Until its
// Fd closes it. Any thread.
void keep_from(const Fd& socket);
void forget(int fd);  // before it is closed

// Another number in a child of fork() than it was in its parent, whatever their processes' numbers are. From the first
// call on; any thread.
int generation();

}  // namespace rejoin::children
