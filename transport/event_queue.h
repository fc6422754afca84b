// Events gathered until the next poll(), with the bytes of their messages.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace rejoin::transport {

class EventQueue {
 public:
  void emit(Event event, BytesView message = {}) {
    if (!message.empty()) {
      spans_.push_back({events_.size(), bytes_.size(), message.size()});
      bytes_.insert(bytes_.end(), message.begin(), message.end());
    }
    events_.push_back(std::move(event));
  }
  bool empty() const { return events_.empty(); }
  std::size_t bytes() const { return events_.size() * sizeof(Event) + bytes_.size(); }

  // Valid until the next call.
  std::span<const Event> take() {
    taken_.clear();
    taken_.swap(events_);
    taken_bytes_.clear();
    taken_bytes_.swap(bytes_);
    for (const auto& span : spans_) taken_[span.event].message = {taken_bytes_.data() + span.offset, span.size};
    spans_.clear();
    return taken_;
  }

 private:
  struct Span {
    std::size_t event, offset, size;
  };
  std::vector<Event> events_, taken_;
  Bytes bytes_, taken_bytes_;
  std::vector<Span> spans_;
};

// A caller's message that comes in parts, put together for its event.
class MessageParts {
 public:
  // `more`: others follow. False: it is over the limit of a message.
  bool add(BytesView part, bool more, EndpointId endpoint, EventQueue& events) {
    if (partial_.size() + part.size() > Engine::kMaxMessage) return false;
    if (more || !partial_.empty()) {
      partial_.insert(partial_.end(), part.begin(), part.end());
      part = partial_;
    }
    if (more) return true;
    events.emit({.kind = EventKind::message, .endpoint = endpoint}, part);
    partial_.clear();
    return true;
  }

 private:
  Bytes partial_;
};

}  // namespace rejoin::transport
