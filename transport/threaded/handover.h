// Items from one thread to another, in order and without a lock: one thread puts them, another takes all that are
// there.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace rejoin::transport::threaded {

template <typename Item>
class Handover {
 public:
  Handover() = default;
  Handover(const Handover&) = delete;
  ~Handover() { (void)take(); }

  void put(Item item) {
    auto* node = new Node{std::move(item), last_.load(std::memory_order_relaxed)};
    while (!last_.compare_exchange_weak(node->before, node, std::memory_order_seq_cst, std::memory_order_relaxed)) {
    }
  }
  std::vector<Item> take() {
    std::vector<Item> items;
    Node* first = nullptr;
    for (Node* node = last_.exchange(nullptr, std::memory_order_acquire); node != nullptr;)
      node = std::exchange(node->before, std::exchange(first, node));
    while (first != nullptr) {
      const std::unique_ptr<Node> node(first);
      first = node->before;  // which is the one behind it now
      items.push_back(std::move(node->item));
    }
    return items;
  }
  // Sequentially consistent with put(): of "I sleep, is it empty?" and "put it, does anybody sleep?" one sees the
  // other.
  bool empty() const { return last_.load(std::memory_order_seq_cst) == nullptr; }

 private:
  struct Node {
    Item item;
    Node* before;
  };
  std::atomic<Node*> last_{nullptr};
};

}  // namespace rejoin::transport::threaded
