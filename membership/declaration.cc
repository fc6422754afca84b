#include "membership/declaration.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"

namespace rejoin::membership {

namespace {

using Tensor = proto::Declaration::Tensor;

std::string shape(const Tensor& tensor) {
  std::string types;
  for (const auto& type : tensor.moment_types()) types += (types.empty() ? " (" : ", ") + type;
  if (!types.empty()) types += ")";
  if (!tensor.gradient_type().empty()) types += ", a gradient of " + tensor.gradient_type();
  return fmt::format("{} elements of {}, {} moments{}, bucket {}{}", tensor.count(), tensor.type(), tensor.moments(),
                     types, tensor.bucket(), tensor.elementwise() ? "" : ", updated as a whole");
}

const Tensor* named(const proto::Declaration& in, const std::string& name) {
  const auto found =
      std::find_if(in.tensors().begin(), in.tensors().end(), [&](const Tensor& one) { return one.name() == name; });
  return found == in.tensors().end() ? nullptr : &*found;
}

// `text` where it is short, otherwise what is around `at`.
std::string excerpt(const std::string& text, std::size_t at) {
  constexpr std::size_t longest = 300, before = 60;
  if (text.size() <= longest) return printable(text, longest);
  const std::size_t from = at > before ? at - before : 0;
  return (from > 0 ? "…" : "") + printable(std::string_view(text).substr(from), longest) +
         (text.size() - from > longest ? "…" : "");
}

std::string difference(const proto::Declaration& here, const proto::Declaration& there) {
  const int common = std::min(here.tensors_size(), there.tensors_size());
  // What is not in a list that was cut may be behind the cut.
  const bool whole_here = here.omitted() == 0, whole_there = there.omitted() == 0;
  for (int i = 0; i < common; ++i) {
    const Tensor &ours = here.tensors(i), &theirs = there.tensors(i);
    if (ours.SerializeAsString() == theirs.SerializeAsString()) continue;
    if (ours.name() == theirs.name())
      return fmt::format("tensor '{}' has {} here, and {} there", ours.name(), shape(ours), shape(theirs));
    if (whole_there && named(there, ours.name()) == nullptr)
      return fmt::format("tensor '{}' ({}) is here alone", ours.name(), shape(ours));
    if (whole_here && named(here, theirs.name()) == nullptr)
      return fmt::format("tensor '{}' ({}) is there alone", theirs.name(), shape(theirs));
    return fmt::format("tensor {} in the order of declaration is '{}' here, and '{}' there", i, ours.name(),
                       theirs.name());
  }
  if (here.tensors_size() > common && whole_there)
    return fmt::format("tensor '{}' ({}) is here alone", here.tensors(common).name(), shape(here.tensors(common)));
  if (there.tensors_size() > common && whole_here)
    return fmt::format("tensor '{}' ({}) is there alone", there.tensors(common).name(), shape(there.tensors(common)));
  if (!(whole_here && whole_there) && here.fingerprint() == there.fingerprint())
    return fmt::format("not among the first {} in the order of declaration, but behind what there was room to tell",
                       common);
  return "";
}

}  // namespace

// Names come from trainers, and go into logs.
std::string first_difference(const proto::Declaration& here, const proto::Declaration& there) {
  constexpr std::size_t longest = 2000;
  return printable(difference(here, there), longest);
}

std::string fingerprint_difference(const proto::Declaration& here, const proto::Declaration& there) {
  const std::string &ours = here.fingerprint(), &theirs = there.fingerprint();
  if (ours == theirs) return "";
  const auto at = static_cast<std::size_t>(std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end()).first -
                                           ours.begin());
  return fmt::format("'{}' here, and '{}' there, from byte {} on", excerpt(ours, at), excerpt(theirs, at), at);
}

}  // namespace rejoin::membership
