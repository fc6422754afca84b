// A system that has no watch left for a descriptor, as where another process of this user has the last of them.
#pragma once

namespace rejoin::test {

// For as long as this lives the `which`th watch that this thread asks for is not given; the others are.
class NoWatch {
 public:
  explicit NoWatch(int which);
  ~NoWatch();
  NoWatch(const NoWatch&) = delete;
  NoWatch& operator=(const NoWatch&) = delete;
  static bool has_come();
};

}  // namespace rejoin::test
