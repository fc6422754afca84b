#include "membership/declaration.h"

#include <fmt/format.h>

#include <algorithm>

namespace rejoin::membership {

namespace {

using Tensor = proto::Declaration::Tensor;

std::string shape(const Tensor& tensor) {
  return fmt::format("{} elements of {}, {} moments, bucket {}{}", tensor.count(), tensor.type(), tensor.moments(),
                     tensor.bucket(), tensor.elementwise() ? "" : ", updated as a whole");
}

const Tensor* named(const proto::Declaration& in, const std::string& name) {
  const auto found =
      std::find_if(in.tensors().begin(), in.tensors().end(), [&](const Tensor& one) { return one.name() == name; });
  return found == in.tensors().end() ? nullptr : &*found;
}

}  // namespace

std::string first_difference(const proto::Declaration& here, const proto::Declaration& there) {
  const int common = std::min(here.tensors_size(), there.tensors_size());
  for (int i = 0; i < common; ++i) {
    const Tensor &ours = here.tensors(i), &theirs = there.tensors(i);
    if (ours.SerializeAsString() == theirs.SerializeAsString()) continue;
    if (ours.name() == theirs.name())
      return fmt::format("tensor '{}' has {} here, and {} there", ours.name(), shape(ours), shape(theirs));
    if (named(there, ours.name()) == nullptr)
      return fmt::format("tensor '{}' ({}) is here alone", ours.name(), shape(ours));
    if (named(here, theirs.name()) == nullptr)
      return fmt::format("tensor '{}' ({}) is there alone", theirs.name(), shape(theirs));
    return fmt::format("tensor {} in the order of declaration is '{}' here, and '{}' there", i, ours.name(),
                       theirs.name());
  }
  if (here.tensors_size() > common)
    return fmt::format("tensor '{}' ({}) is here alone", here.tensors(common).name(), shape(here.tensors(common)));
  if (there.tensors_size() > common)
    return fmt::format("tensor '{}' ({}) is there alone", there.tensors(common).name(), shape(there.tensors(common)));
  return "";
}

}  // namespace rejoin::membership
