// Containers for what every operation passes through: once warm they allocate nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace rejoin::transport {

// A queue in a ring of memory, which grows and never shrinks.
template <typename T>
class Fifo {
 public:
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](std::size_t i) { return ring_[(head_ + i) & (ring_.size() - 1)]; }
  const T& operator[](std::size_t i) const { return ring_[(head_ + i) & (ring_.size() - 1)]; }
  T& front() { return ring_[head_]; }

  void push_back(T value) { emplace_back() = std::move(value); }
  T& emplace_back() {  // fresh, in its place
    grow();
    T& place = ring_[(head_ + size_++) & (ring_.size() - 1)];
    std::destroy_at(&place);
    return *std::construct_at(&place);
  }
  void push_front(T value) {
    grow();
    head_ = (head_ + ring_.size() - 1) & (ring_.size() - 1);
    ++size_;
    ring_[head_] = std::move(value);
  }
  T pop_front() {
    T value = std::move(ring_[head_]);
    head_ = (head_ + 1) & (ring_.size() - 1);
    --size_;
    return value;
  }
  void drop_front() {  // what it holds goes when its place is taken
    head_ = (head_ + 1) & (ring_.size() - 1);
    --size_;
  }
  template <typename Condition>
  void erase_if(Condition&& condition) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      if (condition((*this)[i])) continue;
      if (kept != i) (*this)[kept] = std::move((*this)[i]);
      ++kept;
    }
    size_ = kept;
  }

 private:
  void grow() {
    if (size_ < ring_.size()) return;
    std::vector<T> larger(std::max<std::size_t>(16, 2 * ring_.size()));
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    ring_.swap(larger);
    head_ = 0;
  }
  std::vector<T> ring_;  // a power of two of them, or none
  std::size_t head_ = 0, size_ = 0;
};

// Things found by a number, which is not 0 and not given again before its slot has had 2^32 - 1 others.
template <typename T>
class SlotMap {
 public:
  std::uint64_t add(T value) {
    const auto [number, place] = add();
    *place = std::move(value);
    return number;
  }
  std::pair<std::uint64_t, T*> add() {  // fresh, in its place, which holds until the next one
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    const std::uint32_t place = free_.back();
    free_.pop_back();
    Slot& slot = slots_[place];
    T& value = slot.value.emplace();
    if (++slot.uses == 0) slot.uses = 1;
    return {std::uint64_t{slot.uses} << 32 | place, &value};
  }
  T* find(std::uint64_t number) {
    const std::size_t place = number & 0xffffffff;
    if (place >= slots_.size() || slots_[place].uses != number >> 32 || !slots_[place].value) return nullptr;
    return &*slots_[place].value;
  }
  // Of one that is there.
  void erase(std::uint64_t number) {
    const auto place = static_cast<std::uint32_t>(number);
    free_.push_back(place);
    slots_[place].value.reset();
  }
  std::optional<T> remove(std::uint64_t number) {
    T* found = find(number);
    if (found == nullptr) return std::nullopt;
    std::optional<T> value = std::move(*found);
    erase(number);
    return value;
  }
  // In no order.
  std::vector<T> remove_all() {
    std::vector<T> all;
    for (std::uint32_t place = 0; place < slots_.size(); ++place)
      if (auto removed = remove(std::uint64_t{slots_[place].uses} << 32 | place)) all.push_back(std::move(*removed));
    return all;
  }

 private:
  struct Slot {
    std::uint32_t uses = 0;
    std::optional<T> value;
  };
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace rejoin::transport
